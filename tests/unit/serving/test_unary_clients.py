"""Clients of unary calls: many, slow, or gone."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import uvloop
from ray.serve._private.http_util import start_asgi_http_server
from ray.serve.config import HTTPOptions
from tritonclient.grpc import service_pb2 as pb
from upath import UPath
from uvicorn.config import HTTP_PROTOCOLS

from app.serving.batching.scheduler import QueuedRequest
from app.serving.endpoint import Endpoint
from app.serving.transport import fast_grpc
from app.serving.transport.fast_grpc import GrpcCall, GrpcConnection
from app.serving.transport.fast_http import FastPath, use_fast_path
from app.serving.transport.grpc import GrpcMethods
from app.serving.transport.http import HttpApi
from app.serving.transport.inference_call import Admission
from app.tensors import OUTPUT
from tests.calls import CHUNKED, SERVICE, Line, call, chunks, exchange, head, prefixed
from tests.engine_contract import rows
from tests.haproxy import in_front
from tests.helpers import wait_until
from tests.serving import Server, serving
from tests.toy import asked, config, expected
from tests.unary import GOOD, infer, logits, require_idle, toy_server


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> UPath:
    return UPath(tmp_path_factory.mktemp("unary"))


@pytest.fixture(scope="module")
def server(storage: UPath) -> Iterator[Server]:
    with toy_server(storage) as started:
        yield started


@pytest.fixture(autouse=True)
def _nothing_stays(server: Server) -> Iterator[None]:
    yield
    require_idle(server)


def busy(server: Server) -> list[GrpcConnection]:
    """Return the connections that have a call."""
    connections = list(server.listener.server_state.connections)
    return [connection for connection in connections if isinstance(connection, GrpcConnection) and connection._call]


HALF = head(CHUNKED) + chunks(prefixed(GOOD)[:-1], end=False)
"""A call whose last byte does not come."""


@pytest.mark.parametrize("size", [1, 5, 20])
def test_the_first_line_may_come_in_pieces(server: Server, size: int) -> None:
    sent = call(GOOD)
    assert exchange(server.http, sent[:size], sent[size:], pause_s=0.02)[0].status == "0"


def test_a_client_that_goes_away_leaves_nothing_behind(server: Server) -> None:
    admission = server.fast_path.admission
    part = prefixed(infer(300))[:50_000]
    with Line(server.http) as one, Line(server.http) as other:
        for line in (one, other):
            line.send(head(CHUNKED) + chunks(part, end=False))
        wait_until(lambda: admission._bytes == 2 * len(part))
        one.socket.close()
        wait_until(lambda: admission._bytes == len(part))
    wait_until(lambda: not admission._bytes)


@pytest.mark.parametrize("timeout_s", [None, 0.2])
def test_a_call_that_a_client_gives_up_is_abandoned(server: Server, timeout_s: float | None) -> None:
    """HAProxy closes its connection to the replica."""
    admission, served = server.fast_path.admission, server.endpoint.find("toy")
    entered = threading.Event()
    gone: list[QueuedRequest] = []

    def submit(*_: object) -> QueuedRequest:
        entered.set()
        return Mock(QueuedRequest)

    with pytest.MonkeyPatch.context() as patched, grpc.insecure_channel(server.grpc) as channel:
        patched.setattr(served.batcher, "submit", submit)
        patched.setattr(served.batcher, "cancel", gone.append)
        waiting = channel.unary_unary(f"{SERVICE}ModelInfer").future(GOOD, timeout=timeout_s)
        while timeout_s is not None and not entered.wait(5 * timeout_s):  # on a busy machine it may not even come here
            timeout_s = 3 * timeout_s
            waiting = channel.unary_unary(f"{SERVICE}ModelInfer").future(GOOD, timeout=timeout_s)
        assert entered.wait(20)
        if timeout_s is None:
            assert admission.ongoing == 1
            waiting.cancel()
        wait_until(lambda: bool(gone) and not admission.ongoing)
        if timeout_s is not None:
            assert waiting.code() is grpc.StatusCode.DEADLINE_EXCEEDED


class _Unread:
    """A connection whose client reads none of its answer."""

    def __init__(self, server: Server) -> None:
        self.line = Line(server.http)
        self.line.send(HALF)
        wait_until(lambda: bool(busy(server)))
        (self.connection,) = busy(server)

    def answer(self, server: Server) -> None:
        """Send an answer that is larger than the buffers of sockets."""
        call = self.connection._call
        assert call is not None
        server.loop.call_soon_threadsafe(call._respond, bytes(2**24))
        wait_until(lambda: self.connection._is_sending)


def test_an_answer_takes_room_until_it_is_sent(server: Server) -> None:
    admission, unread = server.fast_path.admission, _Unread(server)
    unread.answer(server)
    assert admission._bytes == 2**24
    (answer,) = unread.line.read(1)
    assert (len(answer.content), answer.status) == (2**24 + 5, "0")
    wait_until(lambda: not admission._bytes)
    unread.line.socket.close()


def test_a_client_that_does_not_read_is_disconnected(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_grpc, "_SEND_TIMEOUT_S", 0.1)
    monkeypatch.setattr(fast_grpc, "_MIN_BYTES_PER_S", 2**32)
    monkeypatch.setattr(fast_grpc, "_CHECK_S", 0.02)
    unread = _Unread(server)
    unread.answer(server)
    wait_until(lambda: unread.connection not in server.listener.server_state.connections)


def test_a_call_is_refused_without_room_for_its_answer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    message = pb.RepositoryIndexRequest().SerializeToString()
    with monkeypatch.context() as patched:
        patched.setattr(server.fast_path.admission, "_room_bytes", 10)
        assert exchange(server.http, call(message, method="RepositoryIndex"))[0].status == "14"


def test_calls_of_many_clients_are_answered_and_counted(server: Server) -> None:
    served, unary = server.endpoint.find("toy"), server.fast_path.grpc
    before, inferred, answered = served.statistics, unary.inferred, len(served.latencies._answered)
    inputs = [asked(tritonclient.grpc, rows(count)) for count in (1, 2, 3)]
    wrong: list[str] = []

    def send() -> None:
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            for tensors, count in zip(inputs, (1, 2, 3), strict=True):
                result = client.infer("toy", tensors, request_id=str(count), client_timeout=30)
                if not np.allclose(result.as_numpy(OUTPUT), expected(rows(count)), atol=1e-4):
                    wrong.append(str(count))

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    after = served.statistics
    assert after.inference_count == before.inference_count + 8 * 6
    assert after.inference_stats.success.count == before.inference_stats.success.count + 8 * 3
    assert unary.inferred == inferred + 8 * 3
    assert len(served.latencies._answered) == answered + 8 * 3


def test_many_calls_of_a_client_are_answered_at_a_time(server: Server) -> None:
    """HAProxy opens a connection for each, and uses it again."""
    open_ones = server.listener.server_state.connections
    with grpc.insecure_channel(server.grpc) as channel:
        model_infer = channel.unary_unary(f"{SERVICE}ModelInfer")
        for _ in range(3):
            waiting = [model_infer.future(infer(count % 3 + 1)) for count in range(60)]
            for count, answer in enumerate(waiting):
                assert np.allclose(logits(answer.result()), expected(rows(count % 3 + 1)).ravel(), atol=1e-4)
            num_open = len(open_ones)
    assert num_open <= 120


def test_a_message_that_arrives_too_slowly_times_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_grpc, "_RECEIVE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(fast_grpc, "_CHECK_S", 0.02)
    assert exchange(server.http, HALF)[0].status == "4"


def test_a_header_that_does_not_end_is_disconnected(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_grpc, "_RECEIVE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(fast_grpc, "_CHECK_S", 0.02)
    assert exchange(server.http, head(CHUNKED)[:-2], count=None) == []


def test_a_closing_connection_answers_its_call(server: Server) -> None:
    async def shut_down() -> None:
        for connection in [one for one in server.listener.server_state.connections if isinstance(one, GrpcConnection)]:
            connection.shutdown()

    with Line(server.http) as idle, Line(server.http) as line:
        idle.send(call(GOOD))
        idle.read(1)
        line.send(HALF)
        wait_until(lambda: bool(busy(server)))
        server.run(shut_down())
        idle.read()
        line.send(chunks(prefixed(GOOD)[-1:]))
        (answer,) = line.read()
    assert (answer.status, answer.lines["connection"]) == ("0", "close")


def test_a_connection_without_calls_is_closed(server: Server) -> None:
    async def run() -> None:
        loop, open_ones = asyncio.get_running_loop(), set[Any]()
        service = server.fast_path.grpc
        listener = await loop.create_server(lambda: GrpcConnection(service, open_ones, 0.05), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()
        async with asyncio.timeout(10):
            while open_ones:
                await asyncio.sleep(0.01)
        listener.close()

    asyncio.run(run())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_listener_of_serve_answers_calls_and_lets_them_end(
    storage: UPath, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica has such a listener, on an event loop of asyncio or uvloop."""
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])

    async def serve() -> None:
        endpoint = Endpoint()
        await endpoint.update(config(storage))
        admission = Admission(endpoint)
        fast_path = FastPath(admission, GrpcMethods(admission))
        use_fast_path(fast_path)
        options = HTTPOptions(host="127.0.0.1", port=0)
        task, listener = await start_asgi_http_server(
            HttpApi(admission), options, event_loop=asyncio.get_running_loop()
        )
        while not listener.started:
            await asyncio.sleep(0.01)
        host, port = listener.servers[0].sockets[0].getsockname()
        replica = f"{host}:{port}"
        with in_front(replica, replica) as front:
            channel = grpc.aio.insecure_channel(front.grpc)
            model_infer = channel.unary_unary(f"{SERVICE}ModelInfer")
            for count in (1, 1000):
                assert np.allclose(logits(await model_infer(infer(count))), expected(rows(count)).ravel(), atol=1e-4)
            last = asyncio.ensure_future(model_infer(infer(1)))
            while not fast_path.admission.ongoing and not last.done():
                await asyncio.sleep(0)
            listener.should_exit = True
            assert await last
            async with asyncio.timeout(10):
                await task
            await channel.close()
        assert fast_path.grpc.inferred == 3

    run(serve())


def test_no_call_waits_for_the_garbage_collector(storage: UPath) -> None:
    """Neither does its message, whether the call is answered, refused or given up."""
    refused = infer(1, model="zz")
    with serving() as server:
        server.run(server.endpoint.update(config(storage)))
        exchange(server.http, call(GOOD))
        exchange(server.http, call(refused))
        gc.collect()
        gc.disable()
        try:
            with Line(server.http) as line:
                for number in range(1, 41):
                    line.send(call(GOOD if number % 2 else refused, "grpc-timeout: 100S"))
                    line.read(number)
                line.send(HALF)
                wait_until(lambda: bool(busy(server)))
            wait_until(lambda: not busy(server))
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            waited = [kept for kept in gc.garbage if isinstance(kept, QueuedRequest | GrpcCall | GrpcConnection)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not waited
