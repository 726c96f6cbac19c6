"""An endpoint as clients meet it: HTTP and gRPC, asked by Triton's own clients, and versions that change under load."""

import gzip
import json
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException
from upath import UPath

from app.config import ServeConfig
from app.errors import EngineError
from app.repository.repository import Repository
from app.serving.batching.scheduler import RowsByLength
from app.serving.config import DeployedModel, EndpointConfig, VersionConfig
from app.serving.transport import asgi
from app.tensors import OUTPUT, Tensors
from tests.engine_contract import TEXTS, exported, rows
from tests.helpers import wait_until
from tests.serving import Server, serving
from tests.toy import LABELS, answering, asked, body, config, endpoint_config, publish
from tests.wire import drip
from tests.wording import refused


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> UPath:
    """With versions 1 and 2 of the model 'toy', which are alike, 3, whose file is no model, and 4, all NaN."""
    folder = UPath(tmp_path_factory.mktemp("serving"))
    publish(folder, exported(), exported(), b"no model", answering(np.nan))
    return folder


@pytest.fixture(scope="module")
def server(storage: UPath) -> Iterator[Server]:
    with serving() as started:
        started.run(started.endpoint.update(config(storage)))
        yield started


def expected(tensors: Tensors, server: Server) -> np.ndarray:
    return server.endpoint.find("toy").model.engine.infer(tensors)[OUTPUT]


@pytest.mark.parametrize("binary", [True, False])
def test_tritons_http_client_works_unchanged(server: Server, binary: bool) -> None:
    client, tensors = tritonclient.http.InferenceServerClient(server.http), rows(3)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("toy")
    assert {"binary_tensor_data", "statistics"} <= set(client.get_server_metadata()["extensions"])
    assert client.get_model_metadata("toy")["inputs"][0] == {
        "name": "input_ids",
        "datatype": "INT64",
        "shape": [-1, -1],
    }
    assert client.get_model_config("toy")["max_batch_size"] == 8
    assert client.get_model_repository_index() == [{"name": "toy", "version": "1", "state": "READY", "reason": ""}]
    inputs = asked(tritonclient.http, tensors, binary_data=binary)
    wanted = [tritonclient.http.InferRequestedOutput(OUTPUT, binary_data=binary)]
    before = client.get_inference_statistics("toy")["model_stats"][0]["inference_count"]
    answer = client.infer("toy", inputs, request_id="7", outputs=wanted, request_compression_algorithm="gzip")
    assert answer.get_response()["id"] == "7"
    assert np.allclose(answer.as_numpy(OUTPUT), expected(tensors, server), atol=1e-5)
    assert client.get_inference_statistics("toy")["model_stats"][0]["inference_count"] == before + 3
    classes = client.infer("toy", inputs, outputs=[tritonclient.http.InferRequestedOutput(OUTPUT, class_count=1)])
    best = [LABELS[index] for index in expected(tensors, server).argmax(1)]
    assert [item.decode().rpartition(":")[2] for item in classes.as_numpy(OUTPUT).ravel()] == best
    with pytest.raises(InferenceServerException, match="is not deployed"):
        client.get_model_metadata("other")


def test_calls_have_the_maximum_rows_of_their_length(storage: UPath) -> None:
    with serving() as server:
        by_length = RowsByLength("input_ids", 1, ((8, 4), (16, 1)))
        server.run(server.endpoint.update(config(storage, by_length=by_length)))
        client = tritonclient.http.InferenceServerClient(server.http)
        for length in (4, 8, 16, 32):
            tensors = rows(4, length)
            answer = client.infer("toy", asked(tritonclient.http, tensors))
            assert np.allclose(answer.as_numpy(OUTPUT), expected(tensors, server), atol=1e-5)
        (counted,) = client.get_inference_statistics("toy")["model_stats"]
        sizes = {stats["batch_size"]: stats["compute_infer"]["count"] for stats in counted["batch_stats"]}
        assert (sizes, counted["inference_count"], counted["execution_count"]) == ({1: 8, 4: 2}, 16, 10)
        assert client.get_model_config("toy")["max_batch_size"] == 8


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("health/live", {"live": True}),
        ("health/ready", {"ready": True}),
        ("models/toy/ready", {"name": "toy", "ready": True}),
        ("models/toy/versions/1/ready", {"name": "toy", "ready": True}),
    ],
)
def test_health_is_told_in_the_words_that_kserves_client_reads(server: Server, path: str, told: object) -> None:
    assert httpx.get(f"http://{server.http}/v2/{path}").json() == told


def test_tritons_grpc_client_works_unchanged(server: Server) -> None:
    client, tensors = tritonclient.grpc.InferenceServerClient(server.grpc), rows(3)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("toy")
    assert not client.is_model_ready("other")
    assert client.get_model_metadata("toy").platform == "onnxruntime_onnx"
    assert client.get_model_config("toy").config.max_batch_size == 8
    assert [model.name for model in client.get_model_repository_index().models] == ["toy"]
    inputs = asked(tritonclient.grpc, tensors)
    for compression in (None, "gzip", "deflate"):
        answer = client.infer("toy", inputs, compression_algorithm=compression)
        assert np.allclose(answer.as_numpy(OUTPUT), expected(tensors, server), atol=1e-5)
    assert client.get_inference_statistics("toy").model_stats[0].inference_count >= 9
    client.load_model("toy")
    for ask, status in (
        (lambda: client.infer("other", inputs), "NOT_FOUND"),
        (lambda: client.infer("toy", inputs[:1]), "INVALID_ARGUMENT"),
        (lambda: client.unload_model("toy"), "INVALID_ARGUMENT"),
        (lambda: client.load_model("other"), "NOT_FOUND"),
    ):
        with pytest.raises(InferenceServerException) as refused:
            ask()
        assert refused.value.status() == f"StatusCode.{status}"


def test_a_stream_of_grpc_requests_is_answered_in_order_and_outlives_a_bad_one(server: Server) -> None:
    client, told, done = tritonclient.grpc.InferenceServerClient(server.streams), [], threading.Semaphore(0)

    def note(result: object, error: object) -> None:
        told.append(error or result)
        done.release()

    client.start_stream(note)
    for count, model in ((1, "toy"), (2, "other"), (3, "toy")):
        client.async_stream_infer(model, asked(tritonclient.grpc, rows(count)))
    for _ in range(3):
        assert done.acquire(timeout=30)
    client.stop_stream()
    assert told[0].get_response().parameters["triton_final_response"].bool_param
    assert [len(reply.as_numpy(OUTPUT)) for reply in (told[0], told[2])] == [1, 3]
    assert "'other' is not deployed" in str(told[1])


def test_texts_of_a_list_are_run_with_those_of_their_length(storage: UPath) -> None:
    texts = ["good", " ".join(["good book"] * 9), "bad", "neither", " ".join(["bad book"] * 5)]
    with serving() as server:
        server.run(server.endpoint.update(config(storage, queue_limit=1)))
        alone = [_predictions(server, [text])[0] for text in texts]
        before = server.endpoint.find("toy").statistics
        together = _predictions(server, texts)
        after = server.endpoint.find("toy").statistics
    assert [item["scores"] for item in together] == [pytest.approx(item["scores"], abs=1e-5) for item in alone]
    assert after.inference_count - before.inference_count == len(texts)
    assert after.execution_count - before.execution_count == 3, "as many as there are lengths"


def _predictions(server: Server, texts: list[str]) -> list[dict[str, Any]]:
    answer = httpx.post(f"http://{server.http}/v1/models/toy/predict", json={"inputs": texts})
    return answer.raise_for_status().json()["predictions"]


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_people_may_compress_too(server: Server, encoding: str, compress: Callable[[bytes], bytes]) -> None:
    url, texts = f"http://{server.http}/v1/models/toy/predict", ["good"] * 32
    content = compress(json.dumps({"inputs": texts}).encode())
    answer = httpx.post(url, content=content, headers={"content-encoding": encoding})
    assert answer.json()["predictions"] == _predictions(server, texts)


def test_a_version_that_changes_under_load_loses_no_request(server: Server, storage: UPath) -> None:
    answers: list[tuple[int, str]] = []
    stop = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=f"http://{server.http}") as client:
            while not stop.is_set():
                answer = client.post("/v1/models/toy/predict", json={"inputs": TEXTS[:2]})
                answers.append((answer.status_code, answer.json().get("model_version", answer.text)))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for version in (2, 1, 2, 1):
        server.run(server.endpoint.update(config(storage, version)))
        before = len(answers)
        wait_until(lambda: (200, str(version)) in answers[before:])  # noqa: B023 # it is over before they change
    stop.set()
    for thread in threads:
        thread.join()
    assert set(answers) == {(200, "1"), (200, "2")}


def test_another_version_with_the_same_number_is_loaded(tmp_path: Path) -> None:
    """The old version's folder was removed by hand, so its number was free."""
    storage = UPath(tmp_path)

    def deployed_as(logit: float) -> EndpointConfig:
        publish(storage, answering(logit))
        manifest = Repository(storage).manifest("toy", 1)
        return endpoint_config(DeployedModel(production=VersionConfig.of(str(storage), manifest, ServeConfig())))

    def answer(server: Server) -> float:
        return float(server.endpoint.find("toy").model.engine.infer(rows(1))[OUTPUT].max())

    with serving() as server:
        first = deployed_as(0.0)
        server.run(server.endpoint.update(first))
        before = answer(server)
        shutil.rmtree(tmp_path / "models")
        second = deployed_as(5.0)
        server.run(server.endpoint.update(second))
        assert answer(server) == pytest.approx(before + 5.0, abs=1e-3)
        # A replica that starts later must not answer with a version that was not deployed.
        with refused("version.changed"):
            server.run(server.endpoint.update(first))


@pytest.mark.parametrize(("version", "words"), [(3, "cannot load"), (4, "not finite: publish another version")])
def test_a_version_that_cannot_be_loaded_leaves_the_old_one(
    server: Server, storage: UPath, version: int, words: str
) -> None:
    before = server.endpoint.config
    with pytest.raises(EngineError, match=words):
        server.run(server.endpoint.update(config(storage, version)))
    assert server.endpoint.config == before
    answer = httpx.post(f"http://{server.http}/v1/models/toy/predict", json={"inputs": "good"})
    assert (answer.status_code, answer.json()["model_version"]) == (200, "1")
    server.run(server.endpoint.check())


def test_overload_is_refused_at_once_and_says_when_to_come_back(storage: UPath) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(f"http://{server.http}/v2/models/toy/infer", json=body(rows(64, 32)), timeout=60))

    with serving() as server:
        server.run(server.endpoint.update(config(storage, max_batch_size=1, queue_limit=1)))
        for _ in range(5):
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(lambda _: ask(), range(16)))
            if any(answer.status_code == 503 for answer in answers):
                break  # a busy machine may send one after another
    assert {answer.status_code for answer in answers} == {200, 503}
    refused = [answer for answer in answers if answer.status_code == 503]
    assert all(int(item.headers["retry-after"]) >= 1 for item in refused)
    assert all("wait already" in item.json()["error"] for item in refused)


def test_a_request_that_cannot_be_answered_in_time_is_told_so(server: Server) -> None:
    answer = httpx.post(f"http://{server.http}/v2/models/toy/infer", json=body(rows(1), timeout=1))
    assert answer.status_code == 504
    assert "cannot be answered within" in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "content", "status", "words"),
    [
        ("/v1/models/toy/predict", {"inputs": ["a"] * 1025}, 400, "inputs has 1025 rows: at most 1024"),
        ("/v2/models/%2e%2e%2f/infer", {}, 404, "/v2/models/..//infer"),
        ("/v2/nothing?\xff", {}, 404, "no POST /v2/nothing here"),
        ("/v2/repository/models/toy/unload", {}, 400, "run jobs.undeploy"),
    ],
)
def test_odd_requests_are_refused(server: Server, path: str, content: object, status: int, words: str) -> None:
    answer = httpx.post(f"http://{server.http}{path}", json=content)
    assert answer.status_code == status
    assert words in answer.json()["error"]


@pytest.mark.parametrize("path", ["/v2/models/toy/infer", "/v1/models/toy/predict", "/v2/repository/index"])
@pytest.mark.parametrize("size", [1000, 2**25])
def test_a_body_that_drips_is_told_so_and_its_connection_closed(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, size: int
) -> None:
    monkeypatch.setattr(asgi, "_RECEIVE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(asgi, "_REST_TIMEOUT_S", 0.1)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode()
    said = drip(server.http, head, pause_s=0.02, patience_s=3)
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"the body did not come within 0.1 s" in said


@pytest.mark.parametrize(
    ("request_line", "length", "status"),
    [
        ("GET /v2/health/live", 1000, 200),
        ("POST /v2/nothing", 1000, 404),
        ("POST /v2/models/toy/infer", 2**40, 413),
        ("POST /v1/models/toy/predict", 2**40, 413),
    ],
)
def test_a_body_that_is_not_read_and_drips_does_not_keep_its_connection(
    server: Server, monkeypatch: pytest.MonkeyPatch, request_line: str, length: int, status: int
) -> None:
    monkeypatch.setattr(asgi, "_REST_TIMEOUT_S", 0.1)
    head = f"{request_line} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()
    assert drip(server.http, head, pause_s=0.02, patience_s=3).startswith(f"HTTP/1.1 {status} ".encode())


def test_what_grpc_does_not_speak_is_said_so(server: Server) -> None:
    with pytest.raises(InferenceServerException, match="SystemSharedMemoryStatus is not supported") as refused:
        tritonclient.grpc.InferenceServerClient(server.grpc).get_system_shared_memory_status()
    assert refused.value.status() == "StatusCode.UNIMPLEMENTED"
