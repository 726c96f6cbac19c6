"""Behaviour of an endpoint when its engine is slow, or other clients misbehave."""

import asyncio
import concurrent.futures
import dataclasses
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2 as pb
from upath import UPath

from app.errors import EngineError
from app.published.loaded import LoadedModel, ShapeGroup
from app.serving import endpoint
from app.serving.config import CandidateConfig, DeployedModel, EndpointConfig
from app.serving.model import health
from app.serving.protocol.predict import PredictRequest
from app.tensors import OUTPUT
from tests.engine_contract import exported, rows
from tests.helpers import wait_until
from tests.serving import Server, serving
from tests.tables import Faults
from tests.toy import asked, body, config, endpoint_config, expected, is_right, publish, version_config
from tests.troubled import POISON, Troubled, answers, ask
from tests.wire import message

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> UPath:
    folder = UPath(tmp_path_factory.mktemp("serving"))
    publish(folder, exported())
    return folder


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as started:
        yield started


@pytest.fixture
def troubled(server: Server, storage: UPath, monkeypatch: pytest.MonkeyPatch) -> Iterator[Troubled]:
    """The engine of the model that the server serves."""
    engines: list[Troubled] = []

    def load(*arguments: Any, **named: Any) -> LoadedModel:
        model = real(*arguments, **named)
        engines.append(Troubled(model.engine))
        return dataclasses.replace(model, engine=engines[-1])

    real: Callable[..., LoadedModel] = endpoint.load_model
    monkeypatch.setattr(endpoint, "load_model", load)
    server.run(server.endpoint.update(config(storage)))
    yield engines[0]
    engines[0].go.set()
    engines[0].well.set()


def succeeded_and_failed(server: Server) -> tuple[int, int]:
    counted = server.endpoint.find("toy").statistics.inference_stats
    return counted.success.count, counted.fail.count


def test_what_a_slow_engine_answers_too_late_is_refused_in_time(
    server: Server, troubled: Troubled, faults: Faults
) -> None:
    with faults("S2", "an engine that takes 2 s longer; a request that allows 0.5 s", "504 in 1 s") as fault:
        troubled.go.clear()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            first = pool.submit(ask, server, rows(1))
            wait_until(lambda: bool(troubled.calls))
            began_s = time.monotonic()
            late = ask(server, rows(2), timeout=500_000)
            seconds = time.monotonic() - began_s
            server.run(server.endpoint.check())  # at work is not ill
            time.sleep(2 - seconds)  # the fault itself
            troubled.go.set()
            assert first.result().status_code == 200
        fault.saw(f"{late.status_code} after {seconds:.2f} s")
        assert late.status_code == 504
        assert seconds <= 1
        assert answers(server)
        assert 2 not in troubled.calls


def test_an_engine_that_does_not_come_back_fails_the_health_check(
    server: Server, troubled: Troubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_STUCK_S", 0.1)
    troubled.go.clear()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(ask, server, rows(1))
        wait_until(lambda: bool(troubled.calls))

        def is_ill() -> bool:
            try:
                server.run(server.endpoint.check())
            except EngineError as error:
                return "has run a single call" in str(error)
            return False

        wait_until(is_ill)
        troubled.go.set()
        assert first.result().status_code == 200
    server.run(server.endpoint.check())


def test_engines_are_looked_at_together(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other with its answer."""
    publish(UPath(tmp_path), exported(), exported())
    production, other = (version_config(UPath(tmp_path), version) for version in (1, 2))
    both = DeployedModel(production=production, canary=CandidateConfig(version=other, percent=50))
    server.run(server.endpoint.update(endpoint_config(both)))
    meet = threading.Barrier(2, timeout=10)
    monkeypatch.setattr(LoadedModel, "check", lambda _: meet.wait())
    monkeypatch.setattr(health, "_TRUSTED_S", -1)
    monkeypatch.setattr(health, "_WAIT_S", 30)
    server.run(server.endpoint.check())


@pytest.mark.parametrize("raises", [True, False], ids=["raises", "no number"])
def test_one_bad_item_in_a_batch_of_eight_is_refused_alone(
    server: Server, troubled: Troubled, faults: Faults, raises: bool
) -> None:
    texts = [rows(1, 16) | {"input_ids": rows(8)["input_ids"][[index]]} for index in range(8)]
    texts[3]["input_ids"][0, 0] = POISON
    troubled.raises = raises
    injected = f"1 of 8 requests of a batch that the engine {'fails on' if raises else 'answers NaN'}"
    with faults("S8", injected, "400 to it, 200 to seven") as fault:
        troubled.go.clear()
        with concurrent.futures.ThreadPoolExecutor(9) as pool:
            first = pool.submit(ask, server, rows(1))
            wait_until(lambda: bool(troubled.calls))
            sent = [pool.submit(ask, server, text) for text in texts]
            wait_until(lambda: server.endpoint.find("toy").waiting == 8)
            troubled.go.set()
            got = [reply.result() for reply in sent]
            assert first.result().status_code == 200
        fault.saw(", ".join(str(reply.status_code) for reply in got))
        assert troubled.calls[1] == 8, "they shared a call"
        assert [reply.status_code for reply in got] == [400 if index == 3 else 200 for index in range(8)]
        assert "error" in got[3].json()
        assert all(is_right(got[index].json(), expected(texts[index])) for index in range(8) if index != 3)
        assert succeeded_and_failed(server) == (8, 1)


def test_many_bad_items_cost_one_look_at_the_engine_which_is_not_closed_before(
    server: Server, troubled: Troubled
) -> None:
    bad, toy = rows(1), server.endpoint.find("toy")
    bad["input_ids"][0, 0] = POISON
    troubled.raises = True
    troubled.well.clear()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        sent = [pool.submit(ask, server, bad) for _ in range(8)]
        wait_until(lambda: toy.statistics.inference_stats.fail.count == 8)
        server.run(server.endpoint.update(EndpointConfig()))
        troubled.well.set()
        assert {reply.result().status_code for reply in sent} == {400}
    assert troubled.blanks == 1


@pytest.mark.parametrize("inputs", [[], ["a"] * 1025])
def test_what_cannot_be_read_is_invalid_and_no_failure(server: Server, storage: UPath, inputs: list[str]) -> None:
    server.run(server.endpoint.update(config(storage)))
    answer = httpx.post(f"http://{server.http}/v1/models/toy/predict", json={"inputs": inputs})
    assert answer.status_code == 400
    assert succeeded_and_failed(server) == (0, 0)
    assert server.endpoint.find("toy").statistics.invalid_count == 1


def begin_over_http(server: Server) -> Callable[[], None]:
    """Send seven requests of two rows each, and return what goes away from them."""
    host, _, port = server.http.rpartition(":")
    clients = [socket.create_connection((host, int(port))) for _ in range(7)]
    for client in clients:
        client.sendall(message("POST", "/v2/models/toy/infer", json.dumps(body(rows(2))).encode()))

    def leave() -> None:
        for client in clients:
            client.close()

    return leave


def begin_over_grpc(server: Server) -> Callable[[], None]:
    """The same."""
    client, inputs = tritonclient.grpc.InferenceServerClient(server.grpc), asked(tritonclient.grpc, rows(2))
    running = [client.async_infer("toy", inputs, lambda result, error: None) for _ in range(7)]

    def leave() -> None:
        for call in running:
            call.cancel()
        client.close()

    return leave


@pytest.mark.parametrize(
    ("how", "begin"), [("disconnect over HTTP", begin_over_http), ("cancel over gRPC", begin_over_grpc)]
)
def test_who_goes_away_is_not_run_and_frees_the_queue(
    server: Server, troubled: Troubled, faults: Faults, how: str, begin: Callable[[Server], Callable[[], None]]
) -> None:
    with faults("S9", f"7 of 8 clients {how} while they wait", "none of them run; queue 0 in 1 s") as fault:
        troubled.go.clear()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            first = pool.submit(ask, server, rows(1))
            wait_until(lambda: bool(troubled.calls))
            leave = begin(server)
            wait_until(lambda: server.endpoint.find("toy").waiting == 7)
            leave()
            left_s = time.monotonic()
            wait_until(lambda: not server.endpoint.find("toy").waiting)
            fault.saw(f"queue 0 after {time.monotonic() - left_s:.2f} s")
            assert time.monotonic() - left_s <= 1
            troubled.go.set()
            assert first.result().status_code == 200
        fault.saw(f"{len(troubled.calls) - 1} of 7 run")
        assert troubled.calls == [1]
        assert succeeded_and_failed(server) == (1, 7)


@pytest.mark.usefixtures("troubled")
def test_overload_over_grpc_says_when_to_come_back(server: Server, storage: UPath) -> None:
    server.run(server.endpoint.update(config(storage, queue_limit=1)))
    slow = server.endpoint.find("toy").model.engine
    assert isinstance(slow, Troubled)
    sent = pb.ModelInferRequest(model_name="toy")
    for name, tensor in rows(1).items():
        sent.inputs.add(name=name, datatype="INT64", shape=tensor.shape)
        sent.raw_input_contents.append(tensor.tobytes())
    slow.go.clear()
    with grpc.insecure_channel(server.grpc) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        running = infer.future(sent.SerializeToString())
        wait_until(lambda: bool(slow.calls))
        waiting = infer.future(sent.SerializeToString())
        wait_until(lambda: server.endpoint.find("toy").waiting == 1)
        refused = infer.future(sent.SerializeToString())
        assert refused.code().name == "UNAVAILABLE"
        assert dict(refused.trailing_metadata())["retry-after"] == "1"
        slow.go.set()
        assert {running.code().name, waiting.code().name} == {"OK"}


def test_what_is_too_late_when_it_can_be_read_is_not_read(
    server: Server, storage: UPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    server.run(server.endpoint.update(config(storage)))
    monkeypatch.setattr(LoadedModel, "encode", lambda _, inputs: read.append(inputs))
    answer = httpx.post(f"http://{server.http}/v1/models/toy/predict", json={"inputs": "good", "timeout_s": 1e-9})
    assert answer.status_code == 504
    assert not read
    assert succeeded_and_failed(server) == (0, 1)


def test_a_version_that_still_reads_for_nobody_is_let_go_of_without_a_halt(
    server: Server, storage: UPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, go = threading.Event(), threading.Event()

    def encode(*_: object) -> list[ShapeGroup]:
        reads.set()
        go.wait(60)
        return []

    server.run(server.endpoint.update(config(storage)))
    monkeypatch.setattr(LoadedModel, "encode", encode)
    asking = server.endpoint.route("toy").predict(PredictRequest(inputs="good"))
    gone = asyncio.run_coroutine_threadsafe(asking, server.loop)
    assert reads.wait(60)
    gone.cancel()
    server.run(server.endpoint.update(EndpointConfig()))
    assert httpx.get(f"http://{server.http}/v2/health/live").status_code == 200
    go.set()


def test_requests_of_a_stream_share_a_call(server: Server, troubled: Troubled) -> None:
    client, told = tritonclient.grpc.InferenceServerClient(server.streams), queue.SimpleQueue[Any]()
    client.start_stream(lambda result, error: told.put(error or result))
    troubled.go.clear()
    for _ in range(8):
        client.async_stream_infer("toy", asked(tritonclient.grpc, rows(1)))
    wait_until(lambda: server.endpoint.find("toy").waiting == 8 - sum(troubled.calls))
    assert server.methods.unseen_by_serve == 7, "which Serve does not count, and the autoscaler is told of"
    troubled.go.set()
    for _ in range(8):
        assert np.allclose(told.get(timeout=30).as_numpy(OUTPUT), expected(rows(1)), atol=1e-4)
    client.stop_stream()
    assert len(troubled.calls) <= 2
    assert not server.methods.unseen_by_serve


def test_a_stream_does_not_fill_a_queue_by_itself(server: Server, storage: UPath) -> None:
    server.run(server.endpoint.update(config(storage, max_batch_size=1, queue_limit=2)))
    client, told = tritonclient.grpc.InferenceServerClient(server.streams), queue.SimpleQueue[Any]()
    client.start_stream(lambda result, error: told.put(error))
    for _ in range(16):
        client.async_stream_infer("toy", asked(tritonclient.grpc, rows(1)))
    assert [told.get(timeout=30) for _ in range(16)] == [None] * 16
    client.stop_stream()


def test_a_stream_whose_client_goes_away_frees_the_queue(server: Server, troubled: Troubled) -> None:
    client = tritonclient.grpc.InferenceServerClient(server.streams)
    client.start_stream(lambda result, error: None)
    troubled.go.clear()
    for _ in range(8):
        client.async_stream_infer("toy", asked(tritonclient.grpc, rows(1)))
    wait_until(lambda: bool(troubled.calls) and server.endpoint.find("toy").waiting == 8 - troubled.calls[0])
    client.stop_stream(cancel_requests=True)
    wait_until(lambda: not server.endpoint.find("toy").waiting)
    troubled.go.set()
    assert answers(server)


def test_streams_leave_room_for_others(server: Server, storage: UPath) -> None:
    server.run(server.endpoint.update(config(storage, queue_limit=1)))
    most = server.endpoint.config.max_requests // 2
    with grpc.insecure_channel(server.streams) as channel:
        infer = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        idle: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        streams = [infer(iter(idle.get, b"")) for _ in range(most + 1)]
        wait_until(lambda: any(stream.done() for stream in streams))
        (refused,) = [stream for stream in streams if stream.done()]
        assert (refused.code().name, refused.details()) == (
            "UNAVAILABLE",
            f"{most} streams are open already: end one, or send requests by themselves",
        )
        assert answers(server)
        for stream in streams:
            stream.cancel()
            idle.put(b"")
