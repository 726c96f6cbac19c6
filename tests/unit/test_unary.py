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
from unittest.mock import Mock, patch

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import uvloop
from hpack import Decoder, Encoder, HeaderTuple, HPACKError, NeverIndexedHeaderTuple
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from ray.serve._private.http_util import start_asgi_http_server
from ray.serve.config import HTTPOptions
from tritonclient.grpc import service_pb2 as pb
from upath import UPath
from uvicorn.config import HTTP_PROTOCOLS

from app.serving.access import Access
from app.serving.batching.queue import Request
from app.serving.endpoint import Endpoint
from app.serving.protocol.grpc import read_infer
from app.serving.protocol.infer import InferRequest
from app.serving.transport import http2, http2_frames, http2_stream, prepared_calls
from app.serving.transport.call_head import CallHead, HeadReader
from app.serving.transport.direct import DirectInference
from app.serving.transport.grpc import GrpcMethods
from app.serving.transport.hot import HotRoute, listen_hot
from app.serving.transport.http import HttpApi
from app.serving.transport.http2 import Http2Protocol
from app.serving.transport.http2_stream import FIRST_WINDOW, Code, Sender, Stream
from app.serving.transport.prepared_calls import PreparedCalls
from app.serving.transport.unary import UnaryCall
from app.tensors import OUTPUT
from tests.engine_contract import exported, rows
from tests.helpers import wait_until
from tests.http2 import HELLO, PREFACE, SERVICE, Said, Talk, call, data, head, prefixed
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
    assert exchange(server.grpc, call(1, GOOD)).status(1) == "0"


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


GOOD = infer(2)


def exchange(address: str, *parts: bytes, streams: tuple[int, ...] = (1,), pause_s: float = 0.0) -> Said:
    with Talk(address) as talk:
        talk.send(HELLO, *parts, pause_s=pause_s)
        return talk.read_until(streams)


def encoded(encoding: str, content: bytes) -> bytes:
    return head(1, grpc_encoding=encoding) + data(1, prefixed(content, is_compressed=True))


CALLS = {
    "one row": call(1, infer(1)),
    "an id": call(1, infer(3, id="a7")),
    "a version": call(1, infer(1, model_version="1")),
    "more rows than a call": call(1, infer(20)),
    "listed elements": call(1, listed()),
    "gzip": encoded("gzip", gzip.compress(GOOD)),
    "deflate": encoded("deflate", zlib.compress(GOOD)),
    "frames of 7 bytes": head(1) + data(1, prefixed(GOOD), size=7),
    "frames of 1 byte": head(1) + data(1, prefixed(infer(1)), size=1),
    "trailers": head(1) + data(1, prefixed(GOOD), end=False) + head(1, end=True),
    "an end by itself": head(1) + data(1, prefixed(GOOD), end=False) + data(1, b""),
    "a trace": call(1, GOOD, ("traceparent", "00-1-2-01"), ("x-request-id", "é")),
    "time enough": call(1, GOOD, grpc_timeout="100S"),
    "another content type of gRPC": call(1, GOOD, content_type="application/grpc+proto"),
    "ServerLive": call(1, b"", method="ServerLive"),
    "ServerMetadata": call(1, b"", method="ServerMetadata"),
    "ModelReady": call(1, pb.ModelReadyRequest(name="toy").SerializeToString(), method="ModelReady"),
    "ModelMetadata": call(1, pb.ModelMetadataRequest(name="toy").SerializeToString(), method="ModelMetadata"),
    "ModelConfig": call(1, pb.ModelConfigRequest(name="toy").SerializeToString(), method="ModelConfig"),
    "RepositoryIndex": call(1, b"", method="RepositoryIndex"),
    "no such model": call(1, infer(1, model="é%\n")),
    "no such version": call(1, infer(1, model_version="9")),
    "another datatype": call(1, GOOD.replace(b"INT64", b"INT32")),
    "no time": head(1, grpc_timeout="1m"),
    "no request": call(1, b""),
    "not a message": call(1, b"\xff" * 20),
    "not a message of another method": call(1, b"\xff", method="ModelConfig"),
    "not spoken": call(1, b"", method="SystemSharedMemoryStatus"),
    "no such method": call(1, GOOD, method="Nothing"),
    "another service": call(1, GOOD, **{":path": "/a.B/ModelInfer"}),
    "a message too large": head(1) + data(1, b"\0" + (65 * 2**20).to_bytes(4, "big") + bytes(100), end=False),
}
_WORDED_BY_GRPC = {"no time", "no such method", "another service", "a message too large"}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gets_the_answer_of_the_grpc_server(server: Server, name: str) -> None:
    here, there = (exchange(address, CALLS[name]) for address in (server.grpc, server.streams))
    assert here.headers[1][":status"] == there.headers[1][":status"] == "200"
    assert here.headers[1]["content-type"] == there.headers[1]["content-type"]
    assert here.status(1) == there.status(1)
    if name not in _WORDED_BY_GRPC:
        assert here.headers[1].get("grpc-message", "") == there.headers[1].get("grpc-message", "")
    if here.status(1) == "0":
        assert here.data[1] == there.data[1]


def padded(sent: bytes, kind: type[DataFrame | HeadersFrame], flags: list[str]) -> bytes:
    """Return a frame with padding and more flags."""
    plain, _ = Frame.parse_frame_header(memoryview(sent[:9]))
    return kind(1, sent[9:], pad_length=7, flags=["PADDED", *plain.flags, *flags]).serialize()


def reserved(sent: bytes) -> bytes:
    """Return a frame with the bit set that a receiver ignores."""
    return sent[:5] + bytes([sent[5] | 0x80]) + sent[6:]


UNUSUAL = {
    "padding": padded(head(1), HeadersFrame, []) + padded(data(1, prefixed(GOOD)), DataFrame, []),
    "a priority": padded(head(1), HeadersFrame, ["PRIORITY"]) + data(1, prefixed(GOOD)),
    "reserved bits": reserved(head(1))
    + reserved(WindowUpdateFrame(1, 1).serialize())
    + reserved(data(1, prefixed(GOOD))),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_frame_is_read_as_a_plain_one(server: Server, name: str) -> None:
    """gRPC's own server does not take padded data."""
    assert exchange(server.grpc, UNUSUAL[name]).told == exchange(server.grpc, call(1, GOOD)).told


def test_padding_takes_room_in_the_window(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    content, padding = prefixed(GOOD)[:5], 200
    for window, code in ((5 + 1 + padding, None), (5 + padding, Code.FLOW_CONTROL_ERROR)):
        sent = DataFrame(1, content, pad_length=padding, flags=["PADDED"]).serialize()
        with Talk(server.grpc) as talk, monkeypatch.context() as patched:
            patched.setattr(http2, "STREAM_WINDOW", window)
            talk.send(HELLO, head(1) + sent + PingFrame().serialize())
            assert talk.read_until(kind=PingFrame).resets.get(1) == code


MALFORMED = {
    "no message": head(1, end=True),
    "no byte": head(1) + data(1, b""),
    "half a prefix": head(1) + data(1, b"\0\0"),
    "half a message": head(1) + data(1, prefixed(GOOD)[:-3]),
    "two messages": head(1) + data(1, prefixed(GOOD) * 2),
    "an invalid timeout": head(1, grpc_timeout="x") + data(1, prefixed(GOOD)),
    "more than a message": head(1) + data(1, prefixed(GOOD) + b"abc"),
    "compressed without an encoding": head(1) + data(1, prefixed(gzip.compress(GOOD), is_compressed=True)),
    "invalid gzip": encoded("gzip", b"zzz"),
    "an unknown encoding": encoded("br", GOOD),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_call_is_refused(server: Server, name: str) -> None:
    """The gRPC server waits for the rest of the call, or drops it."""
    said = exchange(server.grpc, MALFORMED[name] + call(3, GOOD), streams=(1, 3))
    assert (said.status(1), said.status(3)) == ("3", "0")


def test_a_decompression_bomb_is_refused(server: Server) -> None:
    assert exchange(server.grpc, encoded("gzip", gzip.compress(bytes(70 * 2**20)))).status(1) == "8"


def test_a_long_path_is_shortened_in_the_error(server: Server) -> None:
    said = exchange(server.grpc, head(1, method="\xff" * 2800))
    assert said.status(1) == "12"
    assert len(said.headers[1]["grpc-message"]) < 400


def test_a_long_error_fits_into_a_frame(server: Server) -> None:
    said = exchange(server.grpc, call(1, infer(1, model="é" * 20_000)))
    assert said.status(1) == "5"
    assert max(frame.body_len for frame in said.frames) < 2**14


def test_a_request_that_is_not_grpc_gets_an_http_error(server: Server) -> None:
    said = exchange(server.grpc, call(1, GOOD, content_type="text/plain") + call(3, GOOD), streams=(1, 3))
    assert said.headers[1] == {":status": "415"}
    assert said.status(3) == "0"


def test_a_call_with_more_than_a_message_is_refused_before_it_ends(server: Server) -> None:
    said = exchange(server.grpc, head(1) + data(1, prefixed(b"") + bytes(10), end=False))
    assert (said.status(1), said.resets) == ("3", {1: Code.NO_ERROR})


def test_a_streaming_call_is_refused_before_it_ends(server: Server) -> None:
    said = exchange(server.grpc, head(1, method="ModelStreamInfer") + data(1, prefixed(GOOD), end=False))
    assert (said.status(1), said.resets) == ("12", {1: Code.NO_ERROR})


@pytest.mark.parametrize("line", [("X-A", "b"), ("connection", "close"), (":path", "/twice")])
def test_an_invalid_header_ends_only_its_stream(server: Server, line: tuple[str, str]) -> None:
    said = exchange(server.grpc, head(1, line) + data(1, prefixed(GOOD)) + call(3, GOOD), streams=(1, 3))
    assert said.resets == {1: Code.PROTOCOL_ERROR}
    assert said.status(3) == "0"


@pytest.mark.parametrize("seed", range(4))
def test_calls_in_pieces_get_the_answers_of_the_grpc_server(server: Server, seed: int) -> None:
    rng = random.Random(seed)
    numbers = range(1, 121, 2)
    waiting = {number: rng.choice([infer(rng.randint(1, 3)), listed(), infer(1, model="zz")]) for number in numbers}
    opened, frames = [], []
    rest = {number: prefixed(message) for number, message in waiting.items()}
    unopened = list(numbers)
    while unopened or rest:
        if unopened and rng.random() < 0.3:
            opened.append(unopened.pop(0))
            frames.append(head(opened[-1]))
        elif left := [number for number in opened if number in rest]:
            number = rng.choice(left)
            size = rng.choice([1, 60, 700, 5000])
            part, rest[number] = rest[number][:size], rest[number][size:]
            frames.append(data(number, part, end=not rest[number]))
            if not rest[number]:
                del rest[number]
    stream, parts = b"".join(frames), []
    while stream:
        size = rng.choice([1, 9, 50, 700, 20_000])
        parts.append(stream[:size])
        stream = stream[size:]
    here, there = (exchange(address, *parts, streams=tuple(numbers)) for address in (server.grpc, server.streams))
    assert {number: status for number, (status, _) in here.told.items()} == {
        number: status for number, (status, _) in there.told.items()
    }
    for number, (status, message) in here.told.items():
        if status == "0":
            assert np.allclose(logits(message), logits(there.data[number]), atol=1e-5), "others shared its batch"


def logits(content: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(pb.ModelInferResponse.FromString(content[5:]).raw_output_contents[0], np.float32)


def raw(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


_LONG = [("x", "y" * 4000)] * 20
HOSTILE = {
    "data of no stream": (raw(0, 0, 0, b"x"), Code.PROTOCOL_ERROR),
    "data of an idle stream": (data(5, b"x"), Code.PROTOCOL_ERROR),
    "a reset of an idle stream": (RstStreamFrame(5).serialize(), Code.PROTOCOL_ERROR),
    "a window of an idle stream": (WindowUpdateFrame(5, 1).serialize(), Code.PROTOCOL_ERROR),
    "a frame too long": (raw(0, 0, 1, bytes(2**14 + 1)), Code.FRAME_SIZE_ERROR),
    "an even stream": (head(2), Code.PROTOCOL_ERROR),
    "a stream that goes back": (head(5) + data(7, b"x"), Code.PROTOCOL_ERROR),
    "a continuation of nothing": (ContinuationFrame(1, b"").serialize(), Code.PROTOCOL_ERROR),
    "a header that is not continued": (HeadersFrame(1, b"\x82").serialize() + head(3), Code.PROTOCOL_ERROR),
    "a header without an end": (
        HeadersFrame(1, b"").serialize() + ContinuationFrame(1, b"").serialize() * 100, Code.ENHANCE_YOUR_CALM),
    "an invalid header": (HeadersFrame(1, b"\xff" * 30, flags=["END_HEADERS"]).serialize(), Code.COMPRESSION_ERROR),
    "an unknown header index": (HeadersFrame(1, b"\xc6", flags=["END_HEADERS"]).serialize(), Code.COMPRESSION_ERROR),
    "a header too large": (
        HeadersFrame(1, Encoder().encode(_LONG), flags=["END_HEADERS"]).serialize(), Code.COMPRESSION_ERROR),
    "padding too long": (raw(0, 8, 1, b"\xff"), Code.PROTOCOL_ERROR),
    "half a priority": (raw(2, 0, 1, b"\0"), Code.PROTOCOL_ERROR),
    "no window": (raw(8, 0, 0, bytes(4)), Code.PROTOCOL_ERROR),
    "a window too wide": (WindowUpdateFrame(0, 2**31 - 1).serialize(), Code.FLOW_CONTROL_ERROR),
    "a first window too wide": (SettingsFrame(settings={4: 2**31}).serialize(), Code.FLOW_CONTROL_ERROR),
    "frames too small": (SettingsFrame(settings={5: 1}).serialize(), Code.PROTOCOL_ERROR),
    "half a setting": (raw(4, 0, 0, b"\0\0\0"), Code.PROTOCOL_ERROR),
    "a short ping": (raw(6, 0, 0, b"x"), Code.PROTOCOL_ERROR),
    "a push": (PushPromiseFrame(1, 2, flags=["END_HEADERS"]).serialize(), Code.PROTOCOL_ERROR),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_invalid_http_2_ends_the_connection(server: Server, name: str) -> None:
    sent, code = HOSTILE[name]
    with Talk(server.grpc, answers=False) as talk:
        talk.send(HELLO + sent + call(101, GOOD))
        said = talk.read_until(kind=PushPromiseFrame)  # never comes: read until the server closes
    assert said.goaways == [code]
    assert 101 not in said.headers


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_preface_may_come_in_pieces(server: Server, size: int) -> None:
    with Talk(server.grpc) as talk:
        talk.send(PREFACE[:size], PREFACE[size:4], pause_s=0.02)
        talk.send(HELLO[4:], call(1, GOOD))
        assert talk.read_until((1,)).status(1) == "0"


@pytest.mark.parametrize("sent", [PREFACE[:10] + b"x" * 20, PREFACE + head(1), PREFACE + PingFrame().serialize()])
def test_a_connection_that_begins_wrongly_is_closed(server: Server, sent: bytes) -> None:
    with Talk(server.grpc, answers=False) as talk:
        talk.send(sent)
        assert talk.read_until().goaways == [Code.PROTOCOL_ERROR]


@pytest.mark.parametrize("seed", range(20))
def test_noise_breaks_nothing(server: Server, seed: int) -> None:
    rng = random.Random(seed)
    sent = bytearray(b"".join(call(number, GOOD) for number in (1, 3, 5)))
    for _ in range(rng.randint(1, 6)):
        sent[rng.randrange(len(sent))] = rng.randrange(256)
    with Talk(server.grpc) as talk:
        talk.socket.settimeout(0.3)  # the server may still wait for the rest
        talk.send(HELLO + bytes(sent))
        with contextlib.suppress(TimeoutError):
            talk.read_until((1, 3, 5))


FLOODS: dict[str, Frame] = {
    "pings": PingFrame(),
    "settings": SettingsFrame(),
    "priorities": PriorityFrame(1, depends_on=3),
    "data of nothing": DataFrame(1),
}


@pytest.mark.parametrize("name", [*FLOODS, "resets"])
def test_a_flood_ends_its_connection(server: Server, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(http2_frames, "_MAX_IDLE_FRAMES", 50)
    monkeypatch.setattr(http2_frames, "_IDLE_FRAMES_PER_S", 1)
    numbers = range(3, 1003, 2)
    resets = b"".join(head(number) + RstStreamFrame(number, Code.CANCEL).serialize() for number in numbers)
    with Talk(server.grpc, answers=False) as talk:
        talk.send(HELLO + head(1) + (resets if name == "resets" else FLOODS[name].serialize() * 500))
        said = talk.read_until()
    assert said.goaways[0] == Code.NO_ERROR
    assert said.goaways[-1] == Code.ENHANCE_YOUR_CALM


def test_calls_that_end_with_an_empty_frame_are_not_a_flood(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_frames, "_MAX_IDLE_FRAMES", 10)
    monkeypatch.setattr(http2_frames, "_IDLE_FRAMES_PER_S", 0)
    numbers = range(1, 51, 2)
    sent = [head(number) + data(number, prefixed(GOOD), end=False) + data(number, b"") for number in numbers]
    said = exchange(server.grpc, *sent, streams=tuple(numbers))
    assert (said.goaways, {said.status(number) for number in numbers}) == ([], {"0"})


class _CountingStream(Stream):
    """A stream that counts how often its window is read. In ``Stream`` the window is a slot."""

    looks = 0

    @property
    def window(self) -> int:  # type: ignore[override]
        type(self).looks += 1
        return self._room

    @window.setter
    def window(self, size: int) -> None:
        self._room = size


def test_a_new_first_window_is_set_in_one_pass_over_the_streams() -> None:
    sender = Sender(lambda _: None, lambda _: None)
    streams = []
    for number in range(1, 201, 2):
        stream = _CountingStream(None, number, 0, "")  # type: ignore[arg-type]
        sender.respond(stream, b"", b"answer", b"")
        streams.append(stream)
    _CountingStream.looks = 0
    sender.set_first_window(FIRST_WINDOW - 1, streams)
    assert {stream._room for stream in streams} == {-1}
    assert _CountingStream.looks <= 3 * len(streams)


def test_more_streams_than_allowed_are_refused(server: Server) -> None:
    numbers = range(1, 2 * http2.MAX_STREAMS + 3, 2)
    with Talk(server.grpc) as talk:
        talk.send(HELLO, *[head(number) for number in numbers], data(1, prefixed(GOOD)))
        said = talk.read_until((1, numbers[-1]))
        assert said.resets == {numbers[-1]: Code.REFUSED_STREAM}
        assert said.status(1) == "0"


def test_a_client_that_goes_away_leaves_nothing_behind(server: Server) -> None:
    direct = server.route.direct
    part = prefixed(infer(300))[:50_000]
    with Talk(server.grpc) as talk:
        talk.send(HELLO, *[head(number) + data(number, part, end=False) for number in (1, 3, 5)])
        wait_until(lambda: direct._bytes == 3 * len(part))
        talk.send(RstStreamFrame(1, Code.CANCEL).serialize())
        wait_until(lambda: direct._bytes == 2 * len(part))
    wait_until(lambda: not direct._bytes)


def test_an_answer_that_waits_for_room_does_not_block_others(server: Server) -> None:
    numbers = (1, 3)
    with Talk(server.grpc) as talk:
        talk.send(PREFACE + SettingsFrame(settings={SettingsFrame.INITIAL_WINDOW_SIZE: 10}).serialize())
        talk.send(*[call(number, infer(500)) for number in numbers])
        wait_until(lambda: all(len(talk.said.data.get(number, b"")) == 10 for number in numbers) or talk.read_some())
        talk.send(WindowUpdateFrame(3, 2**20).serialize())
        talk.read_until((3,))
        assert len(talk.said.data[1]) == 10
        talk.send(SettingsFrame(settings={SettingsFrame.INITIAL_WINDOW_SIZE: 5}).serialize())  # 5 less
        talk.send(WindowUpdateFrame(1, 5).serialize(), call(5, infer(1)), PingFrame().serialize())
        talk.read_until(kind=PingFrame)
        assert len(talk.said.data[1]) == 10
        talk.send(SettingsFrame(settings={SettingsFrame.INITIAL_WINDOW_SIZE: 2**16}).serialize())
        said = talk.read_until((1, 5))
    for number in numbers:
        assert np.allclose(logits(said.data[number]), expected(rows(500)).ravel(), atol=1e-4)
    assert max(len(frame.data) for frame in said.frames if isinstance(frame, DataFrame)) <= 2**14


def test_a_real_client_sends_and_receives_large_messages(server: Server) -> None:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(server.grpc, options=options) as channel:
        ask = channel.unary_unary(f"{SERVICE}ModelInfer")
        codes = [ask.future(bytes([255]) * (size * 2**20)).code().name for size in (1, 40, 65)]
    assert codes == ["INVALID_ARGUMENT", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"]
    client = tritonclient.grpc.InferenceServerClient(server.grpc)
    result = client.infer("toy", asked(tritonclient.grpc, rows(1024, 32)), compression_algorithm="gzip")
    assert np.allclose(result.as_numpy(OUTPUT), expected(rows(1024, 32)), atol=1e-4)


def test_nothing_is_read_from_a_client_that_does_not_read() -> None:
    """Otherwise its answers would pile up in the server."""

    async def run() -> None:
        transport, connection = Mock(asyncio.Transport), Http2Protocol(_no_call, set[Any](), 90)
        transport.is_closing.return_value = False
        connection.connection_made(transport)
        connection.data_received(HELLO)
        num_written = transport.write.call_count
        transport.write.side_effect = lambda _: connection.pause_writing()
        connection.data_received(PingFrame().serialize() * 10)
        assert transport.write.call_count == num_written + 1
        transport.write.side_effect = None
        connection.resume_writing()
        assert transport.write.call_count == num_written + 10
        connection.connection_lost(None)

    asyncio.run(run())


def test_a_client_that_does_not_read_is_disconnected(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "_SEND_TIMEOUT_S", 0.1)
    monkeypatch.setattr(http2, "_LOOK_S", 0.02)
    with Talk(server.grpc) as talk:
        talk.send(HELLO, head(1))
        wait_until(lambda: bool(_busy(server)))
        (connection,) = _busy(server)
        server.loop.call_soon_threadsafe(connection._transport.write, bytes(2**23))
        wait_until(lambda: connection not in server.listener.server_state.connections)


def test_a_closing_connection_does_not_wait_for_its_reader(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "_LEAVE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(http2, "_LOOK_S", 0.02)
    with Talk(server.grpc) as talk:
        talk.send(HELLO, head(1))
        wait_until(lambda: bool(_busy(server)))
        (connection,) = _busy(server)
        server.loop.call_soon_threadsafe(connection._transport.write, bytes(2**23))
        wait_until(lambda: connection._transport.get_write_buffer_size() > 0)
        server.loop.call_soon_threadsafe(connection._fail, Code.NO_ERROR, "")
        wait_until(lambda: connection not in server.listener.server_state.connections)


def test_connections_take_turns(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "_MAX_FRAMES_AT_A_TIME", 3)
    turns: list[int] = []
    take = Http2Protocol._take_some_frames

    def note(connection: Http2Protocol) -> None:
        before = server.route.unary.answered
        take(connection)
        turns.append(server.route.unary.answered - before)

    monkeypatch.setattr(Http2Protocol, "_take_some_frames", note)
    numbers = tuple(range(1, 41, 2))
    said = exchange(server.grpc, b"".join(call(number, GOOD) for number in numbers), streams=numbers)
    assert {said.status(number) for number in numbers} == {"0"}
    assert max(turns) <= 3


def test_an_answer_takes_room_until_it_is_sent(server: Server) -> None:
    direct, sent = server.route.direct, infer(500)
    with Talk(server.grpc) as talk:
        talk.send(PREFACE + SettingsFrame(settings={SettingsFrame.INITIAL_WINDOW_SIZE: 0}).serialize(), call(1, sent))
        wait_until(lambda: 1 in talk.said.headers or talk.read_some())
        size = len(exchange(server.grpc, call(1, sent)).data[1])
        assert (direct.ongoing, direct._bytes) == (1, size - 5)
        talk.send(WindowUpdateFrame(1, size).serialize())
        assert len(talk.read_until((1,)).data[1]) == size


def test_a_call_is_refused_without_room_for_its_answer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    message = pb.RepositoryIndexRequest().SerializeToString()
    with monkeypatch.context() as patched:
        patched.setattr(server.route.direct, "_room_bytes", 10)
        assert exchange(server.grpc, call(1, message, method="RepositoryIndex")).status(1) == "14"


def test_a_client_that_takes_an_answer_in_small_parts_gains_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(http2_stream.time, "monotonic", lambda: now_s)
    sender, stream = Sender(lambda _: None, lambda _: None), Stream(None, 1, 0, "")  # type: ignore[arg-type]
    sender.respond(stream, b"", bytes(1000), b"")
    for _ in range(100):
        now_s += 50
        sender.widen(stream, 1)
    assert stream.moved_s < 1


def _busy(server: Server) -> list[Http2Protocol]:
    """Return the HTTP/2 connections that have calls."""
    connections = list(server.listener.server_state.connections)
    return [connection for connection in connections if isinstance(connection, Http2Protocol) and connection._streams]


def test_calls_of_many_clients_are_answered_and_counted(server: Server) -> None:
    served, unary = server.endpoint.find("toy"), server.route.unary
    before, inferred, answered = served.statistics, unary.inferred, len(served.latencies._answered)
    inputs = [asked(tritonclient.grpc, rows(count)) for count in (1, 2, 3)]
    wrong: list[str] = []

    def ask() -> None:
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            for tensors, count in zip(inputs, (1, 2, 3), strict=True):
                result = client.infer("toy", tensors, request_id=str(count), client_timeout=30)
                if not np.allclose(result.as_numpy(OUTPUT), expected(rows(count)), atol=1e-4):
                    wrong.append(str(count))

    threads = [threading.Thread(target=ask) for _ in range(8)]
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
        here, there = (exchange(address, call(1, content)) for address in (server.grpc, server.streams))
        assert here.data[1] == there.data[1]
    assert len(read) == 1
    message.raw_input_contents[:] = [tensors[0] + tensors[1][:8], tensors[1][8:]]
    moved = exchange(server.grpc, call(1, message.SerializeToString()))
    assert moved.status(1) == "3", "the same total size, but one tensor has too many bytes"


def test_a_new_version_answers_at_once(storage: UPath) -> None:
    publish(storage, answering(1))
    with serving() as server:
        for version in (1, 2, 1):
            server.run(server.endpoint.update(config(storage, version)))
            answer = exchange(server.grpc, call(1, GOOD)).data[1][5:]
            assert pb.ModelInferResponse.FromString(answer).model_version == str(version)
        assert server.route.unary.inferred == 3


def test_a_call_without_the_token_is_refused_before_its_message(storage: UPath) -> None:
    unsent = data(1, prefixed(bytes(5000))[:5], end=False)
    bomb = data(1, prefixed(gzip.compress(bytes(5000)), is_compressed=True))
    with serving() as server:
        access = Access.by_token("secret")
        server.run(server.endpoint.update(config(storage).model_copy(update={"access": access})))
        for method in ("ModelInfer", "ModelConfig"):
            assert exchange(server.grpc, head(1, method=method)).status(1) == "16"
        for sent in (head(1, method="ServerLive") + unsent, head(1, method="ServerLive", grpc_encoding="gzip") + bomb):
            assert exchange(server.grpc, sent).status(1) == "8", "everybody may call it, with a small message"
        assert exchange(server.grpc, call(1, b"", method="ServerLive")).status(1) == "0"
        for blanks, num_known in ((1, 1), (5000, 1), (2, 2)):
            told = exchange(server.grpc, call(1, GOOD, authorization="Bearer" + " " * blanks + "secret"))
            assert told.status(1) == "0"
            assert len(server.route.unary._callers) == num_known, "a long one is not kept"


def test_too_many_calls_and_too_large_ones_are_refused(storage: UPath) -> None:
    with serving() as server:
        server.run(server.endpoint.update(config(storage)))
        direct = server.route.direct
        direct.ongoing = server.endpoint.config.most_requests
        many = exchange(server.grpc, call(1, GOOD))
        direct.ongoing, direct._room_bytes = 0, 100
        large = exchange(server.grpc, call(1, GOOD))
        for said in (many, large):
            assert said.status(1) == "14"
            assert said.headers[1]["retry-after"] == "1"
        assert (direct.ongoing, direct._bytes) == (0, 0)


def test_a_message_that_arrives_too_slowly_times_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "_RECEIVE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(http2, "_LOOK_S", 0.02)
    said = exchange(server.grpc, head(1) + data(1, prefixed(GOOD)[:-1], end=False))
    assert said.status(1) == "4"
    assert said.resets == {1: Code.NO_ERROR}


def test_a_closing_connection_answers_calls_on_their_way(server: Server) -> None:
    with Talk(server.grpc) as talk:
        talk.send(HELLO, head(1))
        wait_until(lambda: bool(_busy(server)))
        (connection,) = _busy(server)
        server.loop.call_soon_threadsafe(connection.shutdown)
        talk.read_until(kind=GoAwayFrame)
        (farewell,) = (frame for frame in talk.said.frames if isinstance(frame, GoAwayFrame))
        assert farewell.last_stream_id == 2**31 - 1
        talk.send(call(3, GOOD), data(1, prefixed(GOOD)))  # after the client has read GOAWAY and answered the ping
        said = talk.read_until()
    assert said.is_closed
    assert said.status(1) == "0"
    assert said.status(3) == "0"
    assert said.goaways == [Code.NO_ERROR, Code.NO_ERROR]


_NEEDED = [(":method", "POST"), (":scheme", "http"), (":path", "/x")]


@pytest.mark.parametrize("seed", range(10))
def test_heads_are_read_as_hpack_decodes_them(seed: int) -> None:
    rng = random.Random(seed)
    reader, plain, encoder = HeadReader(), Decoder(), Encoder()
    seen: list[bytes] = []
    for _ in range(400):
        if rng.random() < 0.05:
            encoder.header_table_size = rng.choice([0, 100, 4096])
        kind = rng.choice([HeaderTuple, NeverIndexedHeaderTuple])
        others = [kind(f"x-{rng.randrange(3)}", "v" * rng.randrange(50)) for _ in range(rng.randrange(3))]
        if seen and rng.random() < 0.02:
            block = rng.choice(seen)  # it may have another meaning now, or none
        elif rng.random() < 0.5:
            block = _independent(encoder, rng.choice(["a", "b" * 500, "c" * 5000]))
        else:
            block = bytes(encoder.encode([*_NEEDED, *others]))
        seen.append(block)
        try:
            read = CallHead.read(plain.decode(block, raw=True))
        except HPACKError:
            with pytest.raises(HPACKError):
                reader.read(block)
            break
        assert reader.read(block) == read


def _independent(encoder: Encoder, agent: str) -> bytes:
    """Return a block that adds entries to the table that ``encoder`` keeps, and refers to none."""
    other = Encoder()
    block = bytes(other.encode([*_NEEDED, ("user-agent", agent)]))
    for entry in reversed(other.header_table.dynamic_entries):
        encoder.header_table.add(*entry)
    return block


def test_a_block_that_comes_again_is_decoded_once() -> None:
    reader, encoder = HeadReader(), Encoder()
    first, again = (bytes(encoder.encode([*_NEEDED, ("x", "y")])) for _ in range(2))
    independent = bytes(Encoder().encode([*_NEEDED, ("user-agent", "z")]))
    assert reader.read(first) == reader.read(again)
    other = reader.read(independent)
    with patch.object(reader._decoder, "decode") as decode:
        assert [reader.read(independent) for _ in range(1000)] == [other] * 1000
        decode.assert_not_called()
    assert reader.read(again) == other, "it refers to the newest entries"


def test_heads_that_are_large_when_decoded_are_not_kept() -> None:
    reader, encoder = HeadReader(), Encoder()
    lines = [(":method", "POST"), (":scheme", "http"), (":path", "/x"), ("x", "y" * 2000)]
    for num_copies, num_known in ((0, 1), (0, 2), (9, 2), (1, 3)):
        assert reader.read(bytes(encoder.encode(lines + lines[3:] * num_copies)))
        assert len(reader._independent) + len(reader._dependent) == num_known


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
        assert exchange(server.grpc, call(1, content)).status(1) == "0"


def test_a_connection_without_calls_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "_FAREWELL_S", 0.05)

    async def run() -> None:
        loop, open_ones = asyncio.get_running_loop(), set[Any]()
        listener = await loop.create_server(lambda: Http2Protocol(_no_call, open_ones, 0.05), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        writer.write(HELLO)
        async with asyncio.timeout(10):
            said = await reader.read()
        assert GoAwayFrame(last_stream_id=0).serialize() in said
        writer.close()
        async with asyncio.timeout(10):
            while open_ones:
                await asyncio.sleep(0.01)
        listener.close()

    asyncio.run(run())


def _no_call(*_: object) -> UnaryCall:
    raise AssertionError


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
        async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
            ask = channel.unary_unary(f"{SERVICE}ModelInfer")
            for count in (1, 1000):
                assert np.allclose(logits(prefixed(await ask(infer(count)))), expected(rows(count)).ravel(), atol=1e-4)
            last = asyncio.ensure_future(ask(infer(1)))
            while not route.direct.ongoing and not last.done():
                await asyncio.sleep(0)
            listener.should_exit = True
            assert await last
            async with asyncio.timeout(10):
                await task
        assert route.unary.inferred == 3

    run(serve())


def test_no_call_waits_for_the_garbage_collector(storage: UPath) -> None:
    """Neither does its message, whether the call is answered, refused or reset."""
    with serving() as server, Talk(server.grpc) as talk:
        server.run(server.endpoint.update(config(storage)))
        talk.send(HELLO, call(1, GOOD), call(3, infer(1, model="zz")))
        talk.read_until((1, 3))
        gc.collect()
        gc.disable()
        try:
            numbers = range(5, 85, 2)
            for number in numbers:
                sent = GOOD if number % 4 == 1 else infer(1, model="zz")
                talk.send(call(number, sent, grpc_timeout="100S"))
                talk.read_until((number,))
            talk.send(head(301), data(301, prefixed(GOOD)[:9], end=False), RstStreamFrame(301, Code.CANCEL).serialize())
            talk.send(call(303, GOOD))
            talk.read_until((303,))
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            waited = [kept for kept in gc.garbage if isinstance(kept, Request | UnaryCall)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not waited
