"""Unary gRPC calls on the HTTP listener: the same answers as the gRPC server's, whatever a client sends."""

import asyncio
import contextlib
import gc
import gzip
import random
import threading
import zlib
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

from app.errors import OverloadError
from app.serving.access import Access
from app.serving.batching.groups import QueuedRequest
from app.serving.endpoint import Endpoint
from app.serving.protocol.grpc import read_infer
from app.serving.protocol.infer import InferRequest
from app.serving.transport import calls, prepared_calls
from app.serving.transport.calls import CallConnection
from app.serving.transport.grpc import GrpcMethods
from app.serving.transport.hot import HotRoute, listen_hot
from app.serving.transport.http import DirectInference, HttpApi
from app.serving.transport.prepared_calls import PreparedCalls
from app.serving.transport.unary import UnaryCall
from app.tensors import OUTPUT
from tests.calls import CHUNKED, SERVICE, Line, ask, call, chunks, exchange, head, prefixed, sized
from tests.engine_contract import exported, rows
from tests.haproxy import in_front
from tests.helpers import wait_until
from tests.serving import Server, serving
from tests.toy import answering, asked, config, expected, publish


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> UPath:
    folder = UPath(tmp_path_factory.mktemp("unary"))
    publish(folder, exported())
    return folder


@pytest.fixture(scope="module")
def server(storage: UPath) -> Iterator[Server]:
    with serving() as started:
        started.run(started.endpoint.update(config(storage)))
        yield started


@pytest.fixture(autouse=True)
def _nothing_stays(server: Server) -> Iterator[None]:
    yield
    direct = server.route.direct
    wait_until(lambda: not direct.ongoing and not direct._bytes)
    assert exchange(server.http, call(GOOD))[0].status == "0"


def infer(count: int, model: str = "toy", **fields: Any) -> bytes:
    sent = pb.ModelInferRequest(model_name=model, **fields)
    for name, tensor in rows(count).items():
        sent.inputs.add(name=name, datatype="INT64", shape=tensor.shape)
        sent.raw_input_contents.append(tensor.tobytes())
    return bytes(sent.SerializeToString())


def listed() -> bytes:
    sent = pb.ModelInferRequest(model_name="toy")
    for name, tensor in rows(2).items():
        entry = sent.inputs.add(name=name, datatype="INT64", shape=tensor.shape)
        entry.contents.int64_contents.extend(tensor.ravel().tolist())
    return bytes(sent.SerializeToString())


def logits(message: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(pb.ModelInferResponse.FromString(message).raw_output_contents[0], np.float32)


def busy(server: Server) -> list[CallConnection]:
    """Return the connections that have a call."""
    connections = list(server.listener.server_state.connections)
    return [connection for connection in connections if isinstance(connection, CallConnection) and connection._call]


GOOD = infer(2)
HALF = head(CHUNKED) + chunks(prefixed(GOOD)[:-1], end=False)
"""A call whose last byte does not come."""

CALLS: dict[str, dict[str, Any]] = {
    "one row": {"content": infer(1)},
    "an id": {"content": infer(3, id="a7")},
    "a version": {"content": infer(1, model_version="1")},
    "more rows than a call": {"content": infer(20)},
    "a message of many frames": {"content": infer(3000)},
    "listed elements": {"content": listed()},
    "gzip": {"content": GOOD, "compression": grpc.Compression.Gzip},
    "deflate": {"content": GOOD, "compression": grpc.Compression.Deflate},
    "a trace": {"content": GOOD, "metadata": [("traceparent", "00-1-2-01"), ("x-bin", b"\xff\0"), ("x", "1")]},
    "time enough": {"content": GOOD, "timeout_s": 100},
    "ServerLive": {"content": b"", "method": "ServerLive"},
    "ServerMetadata": {"content": b"", "method": "ServerMetadata"},
    "ModelReady": {"content": pb.ModelReadyRequest(name="toy").SerializeToString(), "method": "ModelReady"},
    "ModelMetadata": {"content": pb.ModelMetadataRequest(name="toy").SerializeToString(), "method": "ModelMetadata"},
    "ModelConfig": {"content": pb.ModelConfigRequest(name="toy").SerializeToString(), "method": "ModelConfig"},
    "RepositoryIndex": {"content": b"", "method": "RepositoryIndex"},
    "no such model": {"content": infer(1, model="é%\n")},
    "no such version": {"content": infer(1, model_version="9")},
    "another datatype": {"content": GOOD.replace(b"INT64", b"INT32")},
    "no request": {"content": b""},
    "not a message": {"content": b"\xff" * 20},
    "not a message of another method": {"content": b"\xff", "method": "ModelConfig"},
    "not spoken": {"content": b"", "method": "SystemSharedMemoryStatus"},
    "no such method": {"content": GOOD, "method": "Nothing"},
    "another service": {"content": GOOD, "method": "/a.B/ModelInfer"},
    "a message too large": {"content": bytes(65 * 2**20)},
}
_WORDED_BY_GRPC = {"no such method", "a message too large"}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gets_the_answer_of_the_grpc_server(server: Server, name: str) -> None:
    before = server.route.unary.answered
    here, there = (ask(address, **CALLS[name]) for address in (server.grpc, server.streams))
    assert here.code == there.code
    if name not in _WORDED_BY_GRPC:
        assert here == there
    assert server.route.unary.answered - before == (name != "another service")


BODIES = {
    "a length": sized(prefixed(GOOD)),
    "a chunk": head(CHUNKED) + chunks(prefixed(GOOD)),
    "chunks of 1 byte": head(CHUNKED) + chunks(prefixed(GOOD), size=1),
    "an end with trailers": head(CHUNKED) + chunks(prefixed(GOOD))[:-2] + b"x: y\r\n\r\n",
    "gzip": head(CHUNKED, "grpc-encoding: gzip") + chunks(prefixed(gzip.compress(GOOD), is_compressed=True)),
    "deflate": sized(prefixed(zlib.compress(GOOD), is_compressed=True), "grpc-encoding: deflate"),
    "another content type of gRPC": call(GOOD, content_type="application/grpc+proto"),
    "names in capitals": call(GOOD).replace(b"content-type", b"Content-Type"),
}


@pytest.mark.parametrize("size", [1, 7, 10**6])
@pytest.mark.parametrize("name", BODIES)
def test_a_call_may_come_in_any_pieces(server: Server, name: str, size: int) -> None:
    sent = BODIES[name]
    parts = [sent[at : at + size] for at in range(0, len(sent), size)]
    (answer,) = exchange(server.http, *parts)
    assert (answer.http, answer.status, answer.lines["content-type"]) == (200, "0", "application/grpc")
    assert answer.content == prefixed(ask(server.streams, GOOD).content)


def test_calls_follow_each_other_on_a_connection(server: Server) -> None:
    with Line(server.http) as line:
        for count in range(1, 5):
            line.send(call(infer(count), f"grpc-timeout: {count}00S"))
            answer = line.read(count)[-1]
            assert np.allclose(logits(answer.content[5:]), expected(rows(count)).ravel(), atol=1e-4)


MALFORMED = {
    "no message": sized(b""),
    "half a prefix": sized(b"\0\0"),
    "half a message": sized(prefixed(GOOD)[:-3]),
    "two messages": sized(prefixed(GOOD) * 2),
    "more than a message": sized(prefixed(GOOD) + b"abc"),
    "an invalid timeout": call(GOOD, "grpc-timeout: x"),
    "compressed without an encoding": sized(prefixed(gzip.compress(GOOD), is_compressed=True)),
    "invalid gzip": sized(prefixed(b"zzz", is_compressed=True), "grpc-encoding: gzip"),
    "an unknown encoding": sized(prefixed(GOOD, is_compressed=True), "grpc-encoding: br"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_call_is_refused(server: Server, name: str) -> None:
    """The gRPC server waits for the rest of the call, or drops it."""
    with Line(server.http) as line:
        line.send(MALFORMED[name])
        (answer,) = line.read(1)
        assert answer.status == "3"
        line.send(call(GOOD))
        assert line.read(2)[1].status == "0", "the connection stays"


def test_a_decompression_bomb_is_refused(server: Server) -> None:
    bomb = sized(prefixed(gzip.compress(bytes(70 * 2**20)), is_compressed=True), "grpc-encoding: gzip")
    assert exchange(server.http, bomb)[0].status == "8"


def test_no_time_is_told(server: Server) -> None:
    assert exchange(server.http, head("grpc-timeout: 1m", CHUNKED))[0].status == "4"


def test_an_error_is_told_in_percents(server: Server) -> None:
    (answer,) = exchange(server.http, call(infer(1, model="é%\n")))
    assert answer.status == "5"
    assert "%C3%A9%25" in answer.lines["grpc-message"]


def test_a_long_path_is_shortened_in_the_error(server: Server) -> None:
    (answer,) = exchange(server.http, call(GOOD, method="x" * 2800))
    assert answer.status == "12"
    assert len(answer.lines["grpc-message"]) < 400


def test_a_long_error_passes_haproxy(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    error = OverloadError("é" * 20_000)
    monkeypatch.setattr(server.endpoint.find("toy").batcher, "submit", Mock(side_effect=error))
    answer = ask(server.grpc, GOOD)
    assert answer.code == "UNAVAILABLE"
    assert 1000 < len(answer.details) < 2000
    monkeypatch.undo()


@pytest.mark.parametrize(
    "sent", [call(GOOD, content_type="text/plain"), call(GOOD).replace(b"POST", b"PUT"), b"GET / HTTP/1.1\r\n\r\n"]
)
def test_a_request_that_is_not_grpc_gets_an_http_error(server: Server, sent: bytes) -> None:
    answers = exchange(server.http, call(GOOD), sent, call(GOOD), count=3, pause_s=0.05)
    assert [(answer.http, answer.status) for answer in answers] == [(200, "0"), (415, None), (200, "0")]


EARLY = {
    "an unknown method": (head(CHUNKED, method="Nothing"), "12"),
    "a stream": (head(CHUNKED, method="ModelStreamInfer") + chunks(prefixed(GOOD), end=False), "12"),
    "a message too large": (
        head(CHUNKED) + chunks(b"\0" + (65 * 2**20).to_bytes(4, "big") + bytes(99), end=False),
        "8",
    ),
    "more than a message": (head(CHUNKED) + chunks(prefixed(b"") + bytes(10), end=False), "3"),
}


@pytest.mark.parametrize("name", EARLY)
def test_a_call_is_refused_before_its_message_ends(server: Server, name: str) -> None:
    sent, status = EARLY[name]
    with Line(server.http) as line:
        line.send(sent)
        assert line.read(1)[0].status == status
        line.send(b"0\r\n\r\n", call(GOOD))
        assert line.read(2)[1].status == "0", "the rest of the message was ignored"


def test_a_refused_call_that_does_not_end_is_disconnected(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_RECEIVE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(calls, "_CHECK_S", 0.02)
    with Line(server.http) as line:
        line.send(EARLY["a stream"][0])
        assert [answer.status for answer in line.read()] == ["12"]


INVALID = {
    "no HTTP": head(CHUNKED)[:-2] + b"\0\r\n\r\n",
    "no length of a chunk": head(CHUNKED) + b"x\r\n",
    "two lengths": head("content-length: 5", "content-length: 6"),
    "a length and chunks": head("content-length: 5", CHUNKED),
    "an upgrade": head("connection: upgrade", "upgrade: websocket", "content-length: 0"),
    "a header without an end": head()[:-4] + b"\r\nx: " + bytes([97]) * 2**19,
    "a chunk's extension without an end": head(CHUNKED) + b"5;" + bytes([97]) * 2**19,
    "trailers without an end": head(CHUNKED) + chunks(prefixed(GOOD))[:-2] + b"x: " + bytes([97]) * 2**19,
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_http_ends_the_connection(server: Server, name: str) -> None:
    *_, answer = exchange(server.http, INVALID[name], count=None)
    assert (answer.http, answer.lines["connection"]) == (400, "close")


def test_a_second_request_before_the_answer_ends_the_connection(server: Server) -> None:
    """HAProxy sends none. What is not answered may be sent again."""
    answers = exchange(server.http, call(infer(20)) + call(GOOD), count=None)
    assert [answer.status for answer in answers] == ["0"]
    assert answers[0].lines["connection"] == "close"


@pytest.mark.parametrize("seed", range(20))
def test_noise_breaks_nothing(server: Server, seed: int) -> None:
    rng = random.Random(seed)
    sent = bytearray(rng.choice(list(BODIES.values())))
    for _ in range(rng.randint(1, 6)):
        sent[rng.randrange(len(sent))] = rng.randrange(256)
    with Line(server.http) as line:
        line.socket.settimeout(0.3)  # the server may still wait for the rest
        line.send(bytes(sent))
        with contextlib.suppress(TimeoutError):
            line.read(1)


@pytest.mark.parametrize("size", [1, 5, 20])
def test_the_first_line_may_come_in_pieces(server: Server, size: int) -> None:
    sent = call(GOOD)
    assert exchange(server.http, sent[:size], sent[size:], pause_s=0.02)[0].status == "0"


def test_a_client_that_goes_away_leaves_nothing_behind(server: Server) -> None:
    direct = server.route.direct
    part = prefixed(infer(300))[:50_000]
    with Line(server.http) as one, Line(server.http) as other:
        for line in (one, other):
            line.send(head(CHUNKED) + chunks(part, end=False))
        wait_until(lambda: direct._bytes == 2 * len(part))
        one.socket.close()
        wait_until(lambda: direct._bytes == len(part))
    wait_until(lambda: not direct._bytes)


@pytest.mark.parametrize("timeout_s", [None, 0.2])
def test_a_call_that_a_client_gives_up_is_abandoned(server: Server, timeout_s: float | None) -> None:
    """HAProxy closes its connection to the replica."""
    direct, served = server.route.direct, server.endpoint.find("toy")
    entered = threading.Event()
    gone: list[QueuedRequest] = []

    def submit(*_: object) -> QueuedRequest:
        entered.set()
        return Mock(QueuedRequest)

    with pytest.MonkeyPatch.context() as patched, grpc.insecure_channel(server.grpc) as channel:
        patched.setattr(served.batcher, "submit", submit)
        patched.setattr(served.batcher, "cancel", gone.append)
        waiting = channel.unary_unary(f"{SERVICE}ModelInfer").future(GOOD, timeout=timeout_s)
        assert entered.wait(20)
        assert direct.ongoing == 1
        if timeout_s is None:
            waiting.cancel()
        wait_until(lambda: bool(gone) and not direct.ongoing)
        if timeout_s is not None:
            assert waiting.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_real_client_sends_and_receives_large_messages(server: Server) -> None:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(server.grpc, options=options) as channel:
        model_infer = channel.unary_unary(f"{SERVICE}ModelInfer")
        codes = [model_infer.future(bytes([255]) * (size * 2**20)).code().name for size in (1, 40, 65)]
    assert codes == ["INVALID_ARGUMENT", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"]
    client = tritonclient.grpc.InferenceServerClient(server.grpc)
    result = client.infer("toy", asked(tritonclient.grpc, rows(1024, 32)), compression_algorithm="gzip")
    assert np.allclose(result.as_numpy(OUTPUT), expected(rows(1024, 32)), atol=1e-4)


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
    direct, unread = server.route.direct, _Unread(server)
    unread.answer(server)
    assert direct._bytes == 2**24
    (answer,) = unread.line.read(1)
    assert (len(answer.content), answer.status) == (2**24 + 5, "0")
    wait_until(lambda: not direct._bytes)
    unread.line.socket.close()


def test_a_client_that_does_not_read_is_disconnected(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_SEND_TIMEOUT_S", 0.1)
    monkeypatch.setattr(calls, "_MIN_BYTES_PER_S", 2**32)
    monkeypatch.setattr(calls, "_CHECK_S", 0.02)
    unread = _Unread(server)
    unread.answer(server)
    wait_until(lambda: unread.connection not in server.listener.server_state.connections)


def test_a_call_is_refused_without_room_for_its_answer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    message = pb.RepositoryIndexRequest().SerializeToString()
    with monkeypatch.context() as patched:
        patched.setattr(server.route.direct, "_room_bytes", 10)
        assert exchange(server.http, call(message, method="RepositoryIndex"))[0].status == "14"


def test_calls_of_many_clients_are_answered_and_counted(server: Server) -> None:
    served, unary = server.endpoint.find("toy"), server.route.unary
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


def test_a_message_is_read_once_whatever_its_tensors_and_id(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []

    def note(message: Any, *others: Any) -> InferRequest:
        read.append(message)
        return read_infer(message, *others)

    monkeypatch.setattr(prepared_calls, "read_infer", note)
    sent = []
    for number in range(8):
        message = pb.ModelInferRequest.FromString(infer(7, id="" if number < 4 else str(number)))
        tensors = [tensor[:, :: -1 if number % 2 else 1].tobytes() for tensor in rows(7).values()]
        message.raw_input_contents[:] = tensors
        sent.append(message.SerializeToString())
    for content in sent:
        assert ask(server.grpc, content) == ask(server.streams, content)
    assert len(read) == 1
    message.raw_input_contents[:] = [tensors[0] + tensors[1][:8], tensors[1][8:]]
    moved = exchange(server.http, call(message.SerializeToString()))
    assert moved[0].status == "3", "the same total size, but one tensor has too many bytes"


def test_a_new_version_answers_at_once(storage: UPath) -> None:
    publish(storage, answering(1))
    with serving() as server:
        for version in (1, 2, 1):
            server.run(server.endpoint.update(config(storage, version)))
            answer = ask(server.grpc, GOOD).content
            assert pb.ModelInferResponse.FromString(answer).model_version == str(version)
        assert server.route.unary.inferred == 3


def test_a_call_without_the_token_is_refused_before_its_message(storage: UPath) -> None:
    unsent = head(CHUNKED, method="ServerLive") + chunks(prefixed(bytes(5000))[:5], end=False)
    packed = prefixed(gzip.compress(bytes(5000)), is_compressed=True)
    bomb = sized(packed, "grpc-encoding: gzip", method="ServerLive")
    with serving() as server:
        access = Access.by_token("secret")
        server.run(server.endpoint.update(config(storage).model_copy(update={"access": access})))
        for method in ("ModelInfer", "ModelConfig"):
            assert exchange(server.http, head(CHUNKED, method=method))[0].status == "16"
        for sent in (unsent, bomb):
            assert exchange(server.http, sent)[0].status == "8", "everybody may call it, with a small message"
        assert exchange(server.http, call(b"", method="ServerLive"))[0].status == "0"
        for blanks, num_known in ((1, 1), (5000, 1), (2, 2)):
            (told,) = exchange(server.http, call(GOOD, "authorization: Bearer" + " " * blanks + "secret"))
            assert told.status == "0"
            assert len(server.route.unary._callers) == num_known, "a long one is not kept"


def test_too_many_calls_and_too_large_ones_are_refused(storage: UPath) -> None:
    with serving() as server:
        server.run(server.endpoint.update(config(storage)))
        direct = server.route.direct
        direct.ongoing = server.endpoint.config.max_requests
        many = ask(server.grpc, GOOD)
        direct.ongoing, direct._room_bytes = 0, 100
        large = ask(server.grpc, GOOD)
        for answer in (many, large):
            assert (answer.code, answer.trailing["retry-after"]) == ("UNAVAILABLE", "1")
        assert (direct.ongoing, direct._bytes) == (0, 0)


def test_a_message_that_arrives_too_slowly_times_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_RECEIVE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(calls, "_CHECK_S", 0.02)
    assert exchange(server.http, HALF)[0].status == "4"


def test_a_header_that_does_not_end_is_disconnected(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_RECEIVE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(calls, "_CHECK_S", 0.02)
    assert exchange(server.http, head(CHUNKED)[:-2], count=None) == []


def test_a_closing_connection_answers_its_call(server: Server) -> None:
    with Line(server.http) as idle, Line(server.http) as line:
        idle.send(call(GOOD))
        idle.read(1)
        line.send(HALF)
        wait_until(lambda: bool(busy(server)))
        connections = server.listener.server_state.connections
        for connection in [connection for connection in connections if isinstance(connection, CallConnection)]:
            server.loop.call_soon_threadsafe(connection.shutdown)
        idle.read()
        line.send(chunks(prefixed(GOOD)[-1:]))
        (answer,) = line.read()
    assert (answer.status, answer.lines["connection"]) == ("0", "close")


def test_a_connection_without_calls_is_closed(server: Server) -> None:
    async def run() -> None:
        loop, open_ones = asyncio.get_running_loop(), set[Any]()
        service = server.route.unary
        listener = await loop.create_server(lambda: CallConnection(service, open_ones, 0.05), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()
        async with asyncio.timeout(10):
            while open_ones:
                await asyncio.sleep(0.01)
        listener.close()

    asyncio.run(run())


def test_haproxy_sends_a_call_again_if_its_replica_has_gone(server: Server) -> None:
    """The replica closes an idle connection while HAProxy sends a call over it."""
    open_ones = server.listener.server_state.connections
    with grpc.insecure_channel(server.grpc) as channel:
        model_infer = channel.unary_unary(f"{SERVICE}ModelInfer")
        for _ in range(20):
            assert model_infer(GOOD)
            for connection in [connection for connection in open_ones if isinstance(connection, CallConnection)]:
                server.loop.call_soon_threadsafe(connection.shutdown)


def test_a_large_message_is_not_taken_apart(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_calls, "_MAX_WHOLE_BYTES", len(infer(2, id="a")))
    for count, kept_id, num_known in ((3, "a", 0), (2, "", 1)):
        content, calls = infer(count, id="a"), PreparedCalls()
        message = pb.ModelInferRequest.FromString(content)
        known, tensors = calls.read(server.endpoint.find("toy"), message, len(content))
        assert known.prepared.rows == count
        assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
            name: tensor.tolist() for name, tensor in rows(count).items()
        }
        assert (message.id, len(calls._known)) == (kept_id, num_known)
        assert exchange(server.http, call(content))[0].status == "0"


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_listener_of_serve_answers_calls_and_lets_them_end(
    storage: UPath, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica has such a listener, on an event loop of asyncio or uvloop."""
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])

    async def serve() -> None:
        endpoint = Endpoint()
        await endpoint.update(config(storage))
        route = HotRoute(DirectInference(endpoint, HttpApi(endpoint)), GrpcMethods(endpoint))
        listen_hot(route)
        options = HTTPOptions(host="127.0.0.1", port=0)
        task, listener = await start_asgi_http_server(HttpApi(endpoint), options, event_loop=asyncio.get_running_loop())
        while not listener.started:
            await asyncio.sleep(0.01)
        host, port = listener.servers[0].sockets[0].getsockname()
        replica = f"{host}:{port}"
        with in_front(replica, replica) as address:
            channel = grpc.aio.insecure_channel(address)
            model_infer = channel.unary_unary(f"{SERVICE}ModelInfer")
            for count in (1, 1000):
                assert np.allclose(logits(await model_infer(infer(count))), expected(rows(count)).ravel(), atol=1e-4)
            last = asyncio.ensure_future(model_infer(infer(1)))
            while not route.direct.ongoing and not last.done():
                await asyncio.sleep(0)
            listener.should_exit = True
            assert await last
            async with asyncio.timeout(10):
                await task
            await channel.close()
        assert route.unary.inferred == 3

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
            waited = [kept for kept in gc.garbage if isinstance(kept, QueuedRequest | UnaryCall | CallConnection)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not waited
