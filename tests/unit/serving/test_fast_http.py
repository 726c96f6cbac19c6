"""Plain requests that are answered without ASGI: as ASGI's way answers them, byte for byte, over real sockets."""

import json
import random
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from upath import UPath

from app.serving.protocol.infer import InferRequest
from app.serving.protocol.rest import read_infer
from app.serving.transport import fast_http, prepared
from app.serving.transport.fast_http import FastHttpProtocol
from app.tensors import Tensors
from tests.engine_contract import exported, rows
from tests.helpers import wait_until
from tests.hostile import GOOD, HEADERS, REQUESTS
from tests.plain import COLD, INFER, PLAIN, binary, converse, listed, post, read_reply
from tests.serving import Server, serving
from tests.toy import answering, body, config, publish

SMALL = 65_536
"""Bytes of a hostile request; larger ones are never plain."""


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> UPath:
    folder = UPath(tmp_path_factory.mktemp("fast"))
    publish(folder, exported(), answering(1))
    return folder


@pytest.fixture(scope="module")
def server(storage: UPath) -> Iterator[Server]:
    with serving() as started:
        started.run(started.endpoint.update(config(storage)))
        yield started


@pytest.fixture(scope="module")
def reference(storage: UPath) -> Iterator[Server]:
    """the same without the fast path."""
    with serving(fast=False) as started:
        started.run(started.endpoint.update(config(storage)))
        yield started


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is, requests in pieces are put together."""
    monkeypatch.setattr(fast_http, "_GATHER_S", 60)


REFUSED_LATE = {"no time": listed(rows(1), timeout=1)}
COLDER = {
    "no such model": binary(rows(1), path="/v2/models/zz/infer"),
    "no such version": binary(rows(1), path="/v2/models/toy/versions/9/infer"),
    "another type": binary(rows(1)).replace(b"INT64", b"INT32"),
    "a token that there is not": binary({**rows(1), "input_ids": rows(1)["input_ids"] + 10**6}),
    **{
        f"JSON with {text} in it": post(json.dumps(body(rows(2))).replace("[1, 1", f"[{text}", 1).encode())
        for text in ("true, 1", "1", "1], 1", "[1, 1]", "NaN, 1", "-1, 1", "1.5, 1")
    },
    "an output that there is not": post(json.dumps({**body(rows(1)), "outputs": [{"name": "y"}]}).encode()),
    "a query": listed(rows(1), path=f"{INFER}?a=b"),
    "a path in percents": listed(rows(1), path="/v2/models/%74oy/infer"),
    "chunks": b"POST /v2/models/toy/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n\r\n",
    "compressed": post(b"{}", "Content-Encoding: gzip"),
    "no body": post(b""),
    "a header twice": listed(rows(1), "X: 1", "X: 2"),
    "a request to wait for": listed(rows(1), "Expect: 100-continue"),
    "metadata": COLD,
}


MALFORMED = {
    "line ends of another kind": listed(rows(1)).replace(b"Host: x\r\n", b"Host: x\n"),
    "a head that ends by another kind of line": b"POST /v2/models/toy/infer HTTP/1.1\nContent-Length: 4\n\n\r\n\r\n",
    "no HTTP": b"POST /v2/models/toy/infer\r\n\r\n",
    "no length": b"POST /v2/models/toy/infer HTTP/1.1\r\nContent-Length: x\r\n\r\n",
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_request_is_answered_here_and_as_asgi_does(server: Server, reference: Server, name: str) -> None:
    before, request = server.fast_path.answered, PLAIN[name]
    said = converse(server, [request, request], 2)
    assert said == converse(reference, [request, request], 2)
    assert said[0].startswith(b"HTTP/1.1 200 ")
    assert server.fast_path.answered == before + 2
    assert not reference.fast_path.answered


@pytest.mark.parametrize("name", [*COLDER, *HEADERS])
def test_what_is_not_plain_is_left_to_asgi_which_goes_on(server: Server, reference: Server, name: str) -> None:
    request = COLDER.get(name) or listed(rows(1), name)
    parts = [PLAIN["bytes"] + request + PLAIN["JSON"], request, PLAIN["an id"]]
    expected = converse(reference, parts, 5)
    assert converse(server, parts, 5) == expected
    wait_until(lambda: not server.fast_path.admission.ongoing)


@pytest.mark.parametrize("seed", range(6))
def test_requests_in_pieces_and_pipelined_are_answered_in_order(server: Server, reference: Server, seed: int) -> None:
    rng = random.Random(seed)
    kinds = [*PLAIN.values(), *PLAIN.values(), *COLDER.values()]
    sent = [rng.choice(kinds) for _ in range(15)]
    stream, parts = b"".join(sent), []
    while stream:
        size = rng.choice([1, 50, rng.randint(1, 700), 5000])
        parts.append(stream[:size])
        stream = stream[size:]
    said = converse(server, parts, len(sent), pause_s=0.0005)
    assert said == converse(reference, parts, len(sent), pause_s=0.0005)
    assert len(said) >= len(sent) - sent.count(COLDER["a request to wait for"])


@pytest.mark.parametrize("cut", [1, 20, 60, 100, 130, 200, 300])
def test_a_request_in_two_pieces_is_put_together(server: Server, reference: Server, cut: int) -> None:
    request, fast_path = PLAIN["bytes"], server.fast_path
    before = fast_path.answered
    parts = [request, request[:cut], request[cut:]]
    assert converse(server, parts, 2) == converse(reference, parts, 2)
    is_head_whole = cut > request.index(b"\r\n\r\n") + 4
    assert before + 1 + is_head_whole <= fast_path.answered <= before + 2, "a slow machine may see it in one piece"


def test_what_is_hostile_is_told_the_same(server: Server, reference: Server) -> None:
    for name, (sent, _) in REQUESTS.items():
        if len(sent) < SMALL:
            parts = [PLAIN["bytes"], sent.replace(b"Connection: close\r\n", b""), PLAIN["JSON"]]
            assert converse(server, parts, 3) == converse(reference, parts, 3), name


def test_a_request_that_is_refused_after_it_has_waited_is_told_the_same(server: Server, reference: Server) -> None:
    request, before = REFUSED_LATE["no time"], server.fast_path.answered
    (here,), (there,) = (converse(listener, [request], 1) for listener in (server, reference))
    here, there = (re.sub(rb"[0-9.e-]+ s\b|(?<=content-length: )[0-9]+", b"N", said) for said in (here, there))
    assert here == there
    assert here.startswith(b"HTTP/1.1 504 ")
    assert b"cannot be answered within" in here
    assert server.fast_path.answered == before + 1
    assert server.endpoint.find("toy").batching.failures["deadline"] >= 1


def test_what_is_answered_here_is_counted(server: Server) -> None:
    served = server.endpoint.find("toy")
    before, answered = served.statistics, len(served.latencies._answered)
    converse(server, [PLAIN["bytes of three rows"], PLAIN["JSON"]], 2)
    after = served.statistics
    assert after.inference_count == before.inference_count + 5
    assert after.inference_stats.success.count == before.inference_stats.success.count + 2
    assert after.last_inference >= before.last_inference
    assert len(served.latencies._answered) == answered + 2
    assert not served.health.is_stale


def test_half_a_request_is_left_to_asgi_after_a_moment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_http, "_GATHER_S", 0.01)
    request, before = PLAIN["bytes"], server.fast_path.answered
    host, _, port = server.http.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        connection.sendall(request[:-1])
        wait_until(lambda: len(server.fast_path.admission.awaited) == 1)
        connection.sendall(request[-1:])
        assert read_reply(connection).startswith(b"HTTP/1.1 200 ")
    assert server.fast_path.answered == before


def test_what_is_large_is_left_to_asgi(server: Server, reference: Server) -> None:
    before, large = server.fast_path.answered, post(GOOD + b" " * 300_000)
    announced = post(b"{", f"Content-Length: {10**17}").replace(b"Content-Length: 1\r\n", b"")
    for request in (large, announced + bytes(2**20)):
        assert converse(server, [request], 1) == converse(reference, [request], 1)
    assert server.fast_path.answered == before


def test_what_is_pipelined_is_read_no_faster_than_it_is_answered(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, before, most, received = post(GOOD + b" " * 30_000), server.fast_path.answered, 0, 0
    plain = FastHttpProtocol.data_received

    def receive(self: FastHttpProtocol, data: bytes) -> None:
        nonlocal most, received
        plain(self, data)
        received += len(data)
        most = max(most, received - (server.fast_path.answered - before) * len(request))

    monkeypatch.setattr(FastHttpProtocol, "data_received", receive)
    said = converse(server, [request * 150], 150)
    assert len(said) == 150
    assert set(said) == set(converse(server, [request], 1))
    one_read = 256 * 2**10
    assert one_read < most <= fast_http._MAX_BYTES + one_read + len(request)


def test_a_long_head_behind_plain_requests_is_read_to_its_end(server: Server, reference: Server) -> None:
    line = b"X: " + b"x" * 400_000
    parts = [PLAIN["bytes"] * 50 + COLD[:-2] + line[:300_000], line[300_000:] + b"\r\n\r\n"]
    said = converse(server, parts, 51, pause_s=0.1)
    assert len(said) == 51
    assert said == converse(reference, parts, 51, pause_s=0.1)


@pytest.mark.parametrize("write", [binary, listed])
def test_json_around_tensors_is_parsed_once(
    server: Server, monkeypatch: pytest.MonkeyPatch, write: Callable[[Tensors], bytes]
) -> None:
    parsed: list[str] = []

    def read(*given: Any) -> InferRequest:
        parsed.append(given[2])
        return read_infer(*given)

    monkeypatch.setattr(prepared, "read_infer", read)
    sent = [write({name: tensor + number % 2 for name, tensor in rows(7).items()}) for number in range(4)]
    said = converse(server, sent, 4)
    assert parsed == ["toy"]
    assert said[0] == said[2] != said[1] == said[3]


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_malformed_is_told_the_same(server: Server, reference: Server, name: str) -> None:
    (said,) = converse(server, [MALFORMED[name]], 1)
    assert [said] == converse(reference, [MALFORMED[name]], 1)
    assert said.startswith(b"HTTP/1.1 400 ")


def test_what_is_malformed_does_not_take_away_the_answer_to_the_request_before_it(server: Server) -> None:
    good, bad = converse(server, [PLAIN["bytes"] + b"nonsense\r\n\r\n"], 2)
    assert good.startswith(b"HTTP/1.1 200 ")
    assert bad.startswith(b"HTTP/1.1 400 ")
