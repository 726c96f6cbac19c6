"""Unary calls that are refused: malformed, early, too large, or not HTTP."""

import contextlib
import gzip
import random
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle
from unittest.mock import Mock

import pytest
from upath import UPath

from app.errors import OverloadError
from app.serving.access import Access
from app.serving.transport import fast_grpc, fast_http
from tests.calls import CHUNKED, Line, ask, call, chunks, exchange, head, prefixed, sized
from tests.plain import COLD, PLAIN
from tests.serving import Server, serving
from tests.toy import config
from tests.unary import BODIES, GOOD, infer, require_idle, toy_server


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> UPath:
    return UPath(tmp_path_factory.mktemp("unary"))


@pytest.fixture(scope="module")
def server(storage: UPath) -> Iterator[Server]:
    with toy_server(storage) as started:
        yield started


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the first bytes of requests to be joined, however busy this machine is."""
    monkeypatch.setattr(fast_http, "_GATHER_S", 60)


@pytest.fixture(autouse=True)
def _nothing_stays(server: Server) -> Iterator[None]:
    yield
    require_idle(server)


MALFORMED = {
    "no message": sized(b""),
    "half a prefix": sized(b"\0\0"),
    "half a message": sized(prefixed(GOOD)[:-3]),
    "two messages": sized(prefixed(GOOD) * 2),
    "more than a message": sized(prefixed(GOOD) + b"abc"),
    "an invalid timeout": call(GOOD, "grpc-timeout: x"),
    "compressed without an encoding": sized(prefixed(gzip.compress(GOOD), is_compressed=True)),
    "invalid gzip": sized(prefixed(b"zzz", is_compressed=True), "grpc-encoding: gzip"),
    "a flag that there is not": sized(b"\7" + prefixed(gzip.compress(GOOD))[1:], "grpc-encoding: gzip"),
    "two timeouts": call(GOOD, "grpc-timeout: 10S", "grpc-timeout: 20S"),
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


@pytest.mark.parametrize("encoding", ["snappy", "br", "gzip, gzip"])
def test_an_unknown_compression_is_told_what_there_is(server: Server, encoding: str) -> None:
    (answer,) = exchange(server.http, head(CHUNKED, f"grpc-encoding: {encoding}"))
    assert (answer.status, answer.lines["grpc-accept-encoding"]) == ("12", "identity,gzip,deflate")
    assert "expected identity, gzip, deflate" in answer.lines["grpc-message"]


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


NO_GRPC = ["text/plain", "", *(f"application/grpc{more}" for more in ("-web", "-web+proto", "foo", "+json", ", x"))]


@pytest.mark.parametrize("content_type", NO_GRPC)
def test_a_request_that_is_not_grpc_gets_an_http_error(server: Server, content_type: str) -> None:
    sent = call(GOOD, content_type=content_type)
    answers = exchange(server.http, call(GOOD), sent, call(GOOD), count=3, pause_s=0.05)
    assert [(answer.http, answer.status) for answer in answers] == [(200, "0"), (415, None), (200, "0")]


@pytest.mark.parametrize("size", [1, 10**6])
def test_each_request_of_a_connection_is_decided_by_itself(server: Server, size: int) -> None:
    """HAProxy sends all clients' requests over the same connections."""
    sent = [call(GOOD), PLAIN["bytes"], sized(b""), COLD, call(GOOD).replace(b"POST", b"PUT"), call(GOOD), COLD, COLD]
    with Line(server.http) as line:
        for number, request in enumerate(sent):
            line.send(*(request[at : at + size] for at in range(0, len(request), size)))
            line.read(number + 1)
        answers = line.answers
    assert [(answer.http, answer.status) for answer in answers] == [
        (200, "0"), (200, None), (200, "3"), (200, None), (404, None), (200, "0"), (200, None), (200, None)
    ]  # fmt: skip


def test_calls_by_http_do_not_turn_http_off_for_others(server: Server) -> None:
    """Send requests through HAProxy, which keeps its connections to the replica open for all clients."""
    with ExitStack() as stack:
        lines = [stack.enter_context(Line(server.front)) for _ in range(64)]
        for line in lines:
            line.send(sized(b"", content_type="text/plain"))
        assert [line.read(1)[0].http for line in lines] == [415] * len(lines)
    with ExitStack() as stack:
        others = [stack.enter_context(Line(server.front)) for _ in range(100)]
        for line, request in zip(others, cycle([PLAIN["bytes"], COLD]), strict=False):
            line.send(request)
        assert [line.read(1)[0].http for line in others] == [200] * len(others)


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
    monkeypatch.setattr(fast_grpc, "_RECEIVE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(fast_grpc, "_CHECK_S", 0.02)
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
            assert len(server.fast_path.admission._callers) == num_known, "a long one is not kept"


def test_too_many_calls_and_too_large_ones_are_refused(storage: UPath) -> None:
    with serving() as server:
        server.run(server.endpoint.update(config(storage)))
        admission = server.fast_path.admission
        admission.ongoing = server.endpoint.config.max_requests
        many = ask(server.grpc, GOOD)
        admission.ongoing, admission._room_bytes = 0, 100
        large = ask(server.grpc, GOOD)
        for answer in (many, large):
            assert (answer.code, answer.trailing["retry-after"]) == ("UNAVAILABLE", "1")
        assert (admission.ongoing, admission._bytes) == (0, 0)


def test_calls_that_send_no_message_do_not_keep_others_out(storage: UPath) -> None:
    with serving() as server, ExitStack() as stack:
        server.run(server.endpoint.update(config(storage, queue_limit=1)))
        most, awaited = server.endpoint.config.max_requests, server.fast_path.admission.awaited
        idle = [stack.enter_context(Line(server.http)) for _ in range(most + 1)]
        for line in idle:
            line.send(head("content-length: 500"), prefixed(GOOD)[:10])
        (given_up,) = idle[0].read(1)
        assert given_up.status == "14"
        assert "send it faster" in given_up.lines["grpc-message"]
        assert len(awaited) == most
        assert [exchange(server.http, call(GOOD))[0].status for _ in range(2)] == ["0", "0"]
        assert len(awaited) == most, "no message is given up for one that is here"
