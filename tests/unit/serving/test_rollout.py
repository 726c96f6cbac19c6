"""Versions that answer under one name: canaries and shadows, asked as clients do."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import onnx
import pytest
import tritonclient.grpc
import tritonclient.http
from onnx import numpy_helper
from upath import UPath

from app.errors import EngineError
from app.serving.config import CandidateConfig, DeployedModel
from app.serving.demand import Scaling
from app.serving.protocol.infer import InferResponse
from app.serving.rollout import MirroredTarget, Shadow
from app.tensors import OUTPUT
from tests.engine_contract import PROCESSOR, TEXTS, exported, rows
from tests.helpers import wait_until
from tests.serving import Server, serving
from tests.toy import LABELS, body, endpoint_config, publish, version_config

SEED, REQUESTS = 3, 40


def changed(factor: float) -> bytes:
    """The model with the embeddings of every token but padding and the unknown one multiplied."""
    model = onnx.load_from_string(exported())
    for tensor in model.graph.initializer:
        if tuple(tensor.dims) == (PROCESSOR.facts["vocab_size"], 16):
            embeddings = numpy_helper.to_array(tensor).copy()
            embeddings[2:] *= factor
            tensor.CopyFrom(numpy_helper.from_array(embeddings, tensor.name))
            return model.SerializeToString()
    raise AssertionError("the model has no embeddings")


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> UPath:
    """With versions 1 and 2, which answer differently, 3, which has no finite answer to a text, and 4, no model.

    Version 5 has its labels in another order.
    """
    folder = UPath(tmp_path_factory.mktemp("rollout"))
    publish(folder, exported(), changed(-3.0), changed(np.nan), b"no model")
    publish(folder, exported(), labels=LABELS[::-1])
    return folder


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(random.Random(SEED)) as started:
        yield started


def deploy(server: Server, storage: UPath, canary: int | None = None, shadow: int | None = None, **knobs: int) -> None:
    """Version 1, a canary of 25 %, a shadow of everything with ``knobs``."""
    model = DeployedModel(
        production=version_config(storage, 1),
        canary=canary and CandidateConfig(version=version_config(storage, canary), percent=25),
        shadow=shadow and CandidateConfig(version=version_config(storage, shadow, **knobs), percent=100),
    )
    server.run(server.endpoint.update(endpoint_config(model)))


def test_what_a_successor_drops_is_named(storage: UPath) -> None:
    version = version_config(storage, 1)
    candidate = CandidateConfig(version=version, percent=10)
    plain, trying = DeployedModel(production=version), DeployedModel(production=version, canary=candidate)
    assert trying.lost_in(plain) == ["canary"]
    assert plain.lost_in(trying) == trying.lost_in(trying) == []


def ask(server: Server, path: str = "/v1/models/toy/predict") -> httpx.Response:
    return httpx.post(f"http://{server.http}{path}", json={"inputs": TEXTS[:2]})


def test_tensors_go_to_a_canary_only_if_they_mean_the_same_to_it(server: Server, storage: UPath) -> None:
    deploy(server, storage, canary=5)
    tensors, texts = body(rows(1)), {"inputs": TEXTS[:1]}

    def versions(path: str, asked: object) -> set[str]:
        answers = [httpx.post(f"http://{server.http}{path}", json=asked) for _ in range(REQUESTS)]
        return {answer.json()["model_version"] for answer in answers}

    assert versions("/v1/models/toy/predict", texts) == {"1", "5"}
    assert versions("/v2/models/toy/infer", tensors) == {"1"}
    assert versions("/v2/models/toy/versions/5/infer", tensors) == {"5"}
    deploy(server, storage, shadow=5)
    assert isinstance(server.endpoint.route("toy"), MirroredTarget)
    assert server.endpoint.route("toy", takes_tensors=True) is server.endpoint.find("toy")


def fails(server: Server, version: str) -> int:
    (statistics,) = server.endpoint.statistics("toy", version)
    return statistics.inference_stats.fail.count


def test_a_canary_answers_its_share_of_the_requests_that_name_no_version(server: Server, storage: UPath) -> None:
    deploy(server, storage, canary=2)
    client, tensors = tritonclient.grpc.InferenceServerClient(server.grpc), rows(20)  # three calls of the engine
    inputs = [tritonclient.grpc.InferInput(name, list(array.shape), "INT64") for name, array in tensors.items()]
    for input_ in inputs:
        input_.set_data_from_numpy(tensors[input_.name()])
    expected = {version: server.endpoint.find("toy", version).model.engine.infer(tensors)[OUTPUT] for version in "12"}
    assert np.abs(expected["1"] - expected["2"]).max() > 0.1
    answered: Counter[str] = Counter()
    for _ in range(REQUESTS):
        answer = client.infer("toy", inputs)
        version = answer.get_response().model_version
        assert np.allclose(answer.as_numpy(OUTPUT), expected[version], atol=1e-4), "all rows are of one version"
        answered[version] += 1
    drawn = random.Random(SEED)
    assert answered["2"] == sum(drawn.random() < 0.25 for _ in range(REQUESTS))
    for version in "12":
        response = client.infer("toy", inputs, model_version=version).get_response()
        assert response.model_version == version


def test_every_version_is_told_of(server: Server, storage: UPath) -> None:
    deploy(server, storage, canary=2, shadow=3)
    client = tritonclient.http.InferenceServerClient(server.http)
    assert client.get_model_metadata("toy")["versions"] == ["1", "2", "3"]
    assert client.get_model_metadata("toy", "2")["versions"] == ["1", "2", "3"]
    assert [(item["version"], item["reason"]) for item in client.get_model_repository_index()] == [
        ("1", ""),
        ("2", "canary, 25 %"),
        ("3", "shadow, 100 %"),
    ]
    assert client.is_model_ready("toy", "3")
    for name, version, told in (("toy", "", ["1", "2", "3"]), ("", "", ["1", "2", "3"]), ("toy", "2", ["2"])):
        assert [
            statistic["version"] for statistic in client.get_inference_statistics(name, version)["model_stats"]
        ] == told
    refused = ask(server, "/v2/models/toy/versions/9/infer")
    assert refused.status_code == 404
    assert refused.json()["error"] == "model 'toy' has no version '9' here: served are 1, 2, 3"


def test_a_shadow_is_sent_every_request_and_its_errors_reach_nobody(server: Server, storage: UPath) -> None:
    deploy(server, storage, canary=2, shadow=3)
    answers = [ask(server) for _ in range(10)]
    assert {answer.status_code for answer in answers} == {200}
    assert "3" not in {answer.json()["model_version"] for answer in answers}
    wait_until(lambda: fails(server, "3") == 10)
    assert fails(server, "1") == fails(server, "2") == 0
    assert ask(server, "/v2/models/toy/versions/1/infer").status_code == 400  # it is no request of the protocol
    assert fails(server, "3") == 10
    server.run(server.endpoint.check())


def test_a_shadow_that_cannot_keep_up_loses_copies_and_delays_nobody(server: Server, storage: UPath) -> None:
    deploy(server, storage, shadow=2, max_batch_size=1, queue_limit=1)
    tensors = {name: array.tolist() for name, array in rows(64, 32).items()}
    inputs = [{"name": name, "shape": [64, 32], "datatype": "INT64", "data": data} for name, data in tensors.items()]

    def infer(_: int) -> int:
        return httpx.post(f"http://{server.http}/v2/models/toy/infer", json={"inputs": inputs}, timeout=60).status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(infer, range(REQUESTS))) == {200}
    assert fails(server, "2") > 0
    assert fails(server, "1") == 0


def test_copies_that_are_too_large_together_are_lost(server: Server, storage: UPath) -> None:
    deploy(server, storage, shadow=2)
    ran: list[int] = []
    answer = InferResponse("toy", "1", None, {OUTPUT: np.zeros((1, 2), np.float32)})

    async def send() -> None:
        shadow, rest = Shadow(server.endpoint.find("toy", "2"), max_bytes=10), asyncio.Event()
        production = server.endpoint.find("toy").model

        async def copy(number: int) -> InferResponse:
            ran.append(number)
            await rest.wait()
            return answer

        for number, num_bytes in enumerate((6, 6, 4)):
            shadow.send(copy(number), answer, production, num_bytes)
        rest.set()
        await asyncio.sleep(0.01)
        shadow.send(copy(3), answer, production, 10)
        await asyncio.sleep(0.01)

    server.run(send())
    assert ran == [0, 2, 3]
    assert fails(server, "2") == 1


def test_what_is_tried_and_cannot_be_loaded_leaves_what_is_served(server: Server, storage: UPath) -> None:
    deploy(server, storage, canary=2)
    before = server.endpoint.config
    for role in ("canary", "shadow"):
        with pytest.raises(EngineError):
            deploy(server, storage, **{role: 4})
    assert server.endpoint.config == before
    assert ask(server).status_code == 200


def test_a_canary_that_becomes_production_stays_in_memory(server: Server, storage: UPath) -> None:
    deploy(server, storage, canary=2)
    engine = server.endpoint.find("toy", "2").model.engine
    server.run(server.endpoint.update(endpoint_config(DeployedModel(production=version_config(storage, 2)))))
    assert server.endpoint.find("toy").model.engine is engine
    assert ask(server).json()["model_version"] == "2"


def test_latency_is_told_beside_its_target(server: Server, storage: UPath) -> None:
    def target(seconds: float | None) -> None:
        model = DeployedModel(production=version_config(storage, 1), scaling=Scaling(latency_target_s=seconds))
        server.run(server.endpoint.update(endpoint_config(model)))

    target(1e-9)
    assert server.endpoint.latency_to_target == 0.0
    assert ask(server).status_code == 200
    assert server.endpoint.latency_to_target > 1
    target(60.0)
    assert 0 < server.endpoint.latency_to_target < 1
    target(None)
    assert server.endpoint.latency_to_target == 0.0
