"""Plain requests that are answered without ASGI: as ASGI's way answers them, byte for byte, over real sockets."""

import asyncio
import gc
import http.client
import json
import random
import re
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import tritonclient.http
import uvicorn
from ray.serve._private.http_util import start_asgi_http_server
from ray.serve.config import HTTPOptions
from upath import UPath
from uvicorn.config import HTTP_PROTOCOLS

from app.errors import DeadlineError, OverloadError
from app.serving.access import Access
from app.serving.batching.groups import QueuedRequest
from app.serving.config import CandidateConfig, DeployedModel, EndpointConfig
from app.serving.endpoint import Endpoint
from app.serving.protocol.infer import InferRequest
from app.serving.protocol.rest import JSON_LENGTH, read_infer
from app.serving.transport import hot, prepared
from app.serving.transport.grpc import GrpcMethods
from app.serving.transport.hot import HotProtocol, HotRoute, listen_hot
from app.serving.transport.http import DirectInference, HttpApi
from app.tensors import OUTPUT, Tensors
from serve_deployments.model_server import ModelServer, freeze_loaded_objects
from tests.engine_contract import exported, rows
from tests.helpers import wait_until
from tests.hostile import GOOD, HEADERS, REQUESTS
from tests.serving import Server, serving
from tests.toy import answering, asked, body, config, endpoint_config, publish, version_config

INFER = "/v2/models/toy/infer"
COLD = b"GET /v2/models/toy HTTP/1.1\r\nHost: x\r\n\r\n"
SMALL = 65_536
"""Bytes of a hostile request; larger ones are never plain."""


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> UPath:
    folder = UPath(tmp_path_factory.mktemp("hot"))
    publish(folder, exported(), answering(1))
    return folder


@pytest.fixture(scope="module")
def server(storage: UPath) -> Iterator[Server]:
    with serving() as started:
        started.run(started.endpoint.update(config(storage)))
        yield started


@pytest.fixture(scope="module")
def reference(storage: UPath) -> Iterator[Server]:
    """The same without the route."""
    with serving(hot=False) as started:
        started.run(started.endpoint.update(config(storage)))
        yield started


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is, requests in pieces are put together."""
    monkeypatch.setattr(hot, "_GATHER_S", 60)


def post(content: bytes, *lines: str, path: str = INFER) -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(content)}", *lines, "", ""]
    return "\r\n".join(head).encode("latin-1") + content


def binary(tensors: Tensors, *lines: str, path: str = INFER, wants_bytes: bool = True, **options: object) -> bytes:
    wanted = [tritonclient.http.InferRequestedOutput(OUTPUT, binary_data=wants_bytes)]
    content, length = tritonclient.http.InferenceServerClient.generate_request_body(
        asked(tritonclient.http, tensors), outputs=wanted, **options
    )
    return post(content, f"{JSON_LENGTH}: {length}", *lines, path=path)


def listed(tensors: Tensors, *lines: str, path: str = INFER, **parameters: object) -> bytes:
    return post(json.dumps(body(tensors, **parameters)).encode(), *lines, path=path)


def _nested(tensors: Tensors) -> bytes:
    entries = [{**entry, "data": tensors[entry["name"]].tolist()} for entry in body(tensors)["inputs"]]
    return json.dumps({"inputs": entries}, separators=(",", ":")).encode()


PLAIN = {
    "bytes": binary(rows(1)),
    "other bytes with the same JSON": binary({name: tensor[:, ::-1] for name, tensor in rows(1).items()}),
    "bytes of three rows": binary(rows(3)),
    "more rows than a call": binary(rows(20)),
    "bytes in, JSON out": binary(rows(2), wants_bytes=False),
    "an id": binary(rows(2), request_id="a7"),
    "a version": binary(rows(2), path="/v2/models/toy/versions/1/infer"),
    "a priority": binary(rows(2), priority=1),
    "classes": post(
        json.dumps({**body(rows(2)), "outputs": [{"name": OUTPUT, "parameters": {"classification": 2}}]}).encode()
    ),
    "JSON": listed(rows(2)),
    "JSON with other numbers": listed({name: tensor[::-1] for name, tensor in rows(2).items()}),
    "JSON of another shape": listed(rows(3)),
    "JSON with an id": post(json.dumps({**body(rows(2)), "id": '"data": [1]'}).encode()),
    "nested JSON": post(_nested(rows(2))),
    "JSON in, bytes out": listed(rows(2), binary_data_output=True),
    "an answer to compress": listed(rows(200, 8), "Accept-Encoding: gzip, deflate"),
    "nothing to compress": binary(rows(1), "Accept-Encoding: gzip, deflate"),
    "a trace": binary(rows(1), "Traceparent: 00-1-2-01", "X-QueuedRequest-ID: 1"),
    "another trace": binary(rows(1), "Traceparent: 00-3-4-01", "X-QueuedRequest-ID: \xff"),
}
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


def converse(server: Server, parts: Sequence[bytes], replies: int, pause_s: float = 0.002) -> list[bytes]:
    """Send the parts, and return so many replies without their dates, fewer if the server closes before."""
    host, _, port = server.http.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            try:
                connection.sendall(part)
            except OSError:  # it has said all that it wants to
                break
            time.sleep(pause_s)
        return [reply for reply in (_reply(connection) for _ in range(replies)) if reply]


def _reply(connection: socket.socket) -> bytes:
    response = http.client.HTTPResponse(connection)
    stream = response.fp = connection.makefile("rb", buffering=0)
    try:
        lines = []
        while (line := stream.readline()) not in (b"\r\n", b""):
            lines.append(line)
    except ConnectionError:
        return b""
    length = sum(int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:"))
    content = b""
    while len(content) < length and (more := stream.read(length - len(content))):
        content += more
    return b"".join(line for line in lines if not line.startswith(b"date:")) + b"\r\n" + content


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_request_is_answered_here_and_as_asgi_does(server: Server, reference: Server, name: str) -> None:
    before, request = server.route.answered, PLAIN[name]
    said = converse(server, [request, request], 2)
    assert said == converse(reference, [request, request], 2)
    assert said[0].startswith(b"HTTP/1.1 200 ")
    assert server.route.answered == before + 2
    assert not reference.route.answered


@pytest.mark.parametrize("name", [*COLDER, *HEADERS])
def test_what_is_not_plain_is_left_to_asgi_which_goes_on(server: Server, reference: Server, name: str) -> None:
    request = COLDER.get(name) or listed(rows(1), name)
    parts = [PLAIN["bytes"] + request + PLAIN["JSON"], request, PLAIN["an id"]]
    expected = converse(reference, parts, 5)
    assert converse(server, parts, 5) == expected
    wait_until(lambda: not server.route.direct.ongoing)


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
    request, before = PLAIN["bytes"], server.route.answered
    parts = [request, request[:cut], request[cut:]]
    assert converse(server, parts, 2) == converse(reference, parts, 2)
    is_head_whole = cut > request.index(b"\r\n\r\n") + 4
    assert before + 1 + is_head_whole <= server.route.answered <= before + 2, "a slow machine may see it in one piece"


def test_what_is_hostile_is_told_the_same(server: Server, reference: Server) -> None:
    for name, (sent, _) in REQUESTS.items():
        if len(sent) < SMALL:
            parts = [PLAIN["bytes"], sent.replace(b"Connection: close\r\n", b""), PLAIN["JSON"]]
            assert converse(server, parts, 3) == converse(reference, parts, 3), name


def test_a_request_that_is_refused_after_it_has_waited_is_told_the_same(server: Server, reference: Server) -> None:
    request, before = REFUSED_LATE["no time"], server.route.answered
    (here,), (there,) = (converse(listener, [request], 1) for listener in (server, reference))
    here, there = (re.sub(rb"[0-9.e-]+ s\b|(?<=content-length: )[0-9]+", b"N", said) for said in (here, there))
    assert here == there
    assert here.startswith(b"HTTP/1.1 504 ")
    assert b"cannot be answered within" in here
    assert server.route.answered == before + 1
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


def test_who_goes_away_is_not_run_and_leaves_nothing_behind(storage: UPath) -> None:
    with serving() as server:
        server.run(server.endpoint.update(config(storage, max_batch_size=1)))
        served, direct = server.endpoint.find("toy"), server.route.direct
        host, _, port = server.http.rpartition(":")
        clients = [socket.create_connection((host, int(port))) for _ in range(8)]
        request = binary(rows(300, 32))
        for client in clients:
            client.sendall(request[: len(request) // 2])
            client.sendall(request[len(request) // 2 :])
        wait_until(lambda: direct.ongoing == len(clients))
        for client in clients:
            client.close()
        wait_until(lambda: not direct.ongoing and not served.waiting)
        wait_until(lambda: served.batching.failures["cancelled"] == len(clients))
        assert direct._bytes == 0
        assert converse(server, [PLAIN["bytes"]], 1)


def test_half_a_request_is_left_to_asgi_after_a_moment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot, "_GATHER_S", 0.01)
    request, before = PLAIN["bytes"], server.route.answered
    host, _, port = server.http.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        connection.sendall(request[:-1])
        wait_until(lambda: server.route.direct.ongoing == 1)
        connection.sendall(request[-1:])
        assert _reply(connection).startswith(b"HTTP/1.1 200 ")
    assert server.route.answered == before


def test_what_is_large_is_left_to_asgi(server: Server, reference: Server) -> None:
    before, large = server.route.answered, post(GOOD + b" " * 300_000)
    announced = post(b"{", f"Content-Length: {10**17}").replace(b"Content-Length: 1\r\n", b"")
    for request in (large, announced + bytes(2**20)):
        assert converse(server, [request], 1) == converse(reference, [request], 1)
    assert server.route.answered == before


def test_what_is_pipelined_is_read_no_faster_than_it_is_answered(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, before, most, received = post(GOOD + b" " * 30_000), server.route.answered, 0, 0
    plain = HotProtocol.data_received

    def receive(self: HotProtocol, data: bytes) -> None:
        nonlocal most, received
        plain(self, data)
        received += len(data)
        most = max(most, received - (server.route.answered - before) * len(request))

    monkeypatch.setattr(HotProtocol, "data_received", receive)
    said = converse(server, [request * 150], 150)
    assert len(said) == 150
    assert set(said) == set(converse(server, [request], 1))
    one_read = 256 * 2**10
    assert one_read < most <= hot._MAX_BYTES + one_read + len(request)


def test_a_long_head_behind_plain_requests_is_read_to_its_end(server: Server, reference: Server) -> None:
    line = b"X: " + b"x" * 400_000
    parts = [PLAIN["bytes"] * 50 + COLD[:-2] + line[:300_000], line[300_000:] + b"\r\n\r\n"]
    said = converse(server, parts, 51, pause_s=0.1)
    assert len(said) == 51
    assert said == converse(reference, parts, 51, pause_s=0.1)


def test_the_token_is_asked_for_and_a_new_one_at_once(storage: UPath) -> None:
    with serving() as server:
        for token, other in (("open sesame", "shut"), ("shut", "open sesame")):
            toy = config(storage).model_copy(update={"access": Access.by_token(token)})
            server.run(server.endpoint.update(toy))
            shown = [binary(rows(1), f"Authorization: Bearer {secret}") for secret in (token, other)]
            right, wrong, none = converse(server, [*shown, PLAIN["bytes"]], 3)
            assert right.startswith(b"HTTP/1.1 200 ")
            assert wrong.startswith(b"HTTP/1.1 401 ")
            assert none.startswith(b"HTTP/1.1 401 ")
        assert server.route.answered == 2


def test_a_version_that_changes_is_asked_at_once(storage: UPath) -> None:
    with serving() as server:
        for version in (1, 2, 1):
            server.run(server.endpoint.update(config(storage, version)))
            (said,) = converse(server, [PLAIN["bytes"]], 1)
            assert f'"model_version":"{version}"'.encode() in said
        assert server.route.answered == 3


@pytest.mark.parametrize(("beside", "is_plain"), [("canary", True), ("shadow", False)])
def test_what_a_shadow_follows_is_left_to_asgi_and_what_a_canary_answers_is_not(
    storage: UPath, beside: str, is_plain: bool
) -> None:
    share = CandidateConfig(version=version_config(storage, 2), percent=100)
    toy = DeployedModel(production=version_config(storage, 1), **{beside: share})
    with serving() as server:
        server.run(server.endpoint.update(endpoint_config(toy)))
        (said,), (named,) = (converse(server, [PLAIN[name]], 1) for name in ("bytes", "a version"))
        assert f'"model_version":"{2 if is_plain else 1}"'.encode() in said
        assert b'"model_version":"1"' in named
        assert server.route.answered == 1 + is_plain
        copies = server.endpoint.find("toy", "2").batching
        wait_until(lambda: copies.success.count == 1)


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


def test_too_many_requests_and_too_large_ones_are_refused_here(storage: UPath) -> None:
    with serving() as server:
        server.run(server.endpoint.update(config(storage)))
        direct, before = server.route.direct, server.route.answered
        direct.ongoing = server.endpoint.config.max_requests
        (many,) = converse(server, [PLAIN["bytes"]], 1)
        direct.ongoing, direct._room_bytes = 0, 100
        (large,) = converse(server, [PLAIN["bytes"]], 1)
        for said in (many, large):
            assert said.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1\r\n" in said
        assert direct.ongoing == 0
        assert server.route.answered == before + 2


@pytest.mark.parametrize("stops", ["keep-alive", "shutdown"])
def test_a_listener_of_serves_takes_the_route_and_closes_what_is_idle(
    storage: UPath, stops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a replica's own listener: uvicorn's timer closes idle connections, and its shutdown lets requests end."""
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])

    async def run() -> None:
        endpoint = Endpoint()
        await endpoint.update(config(storage))
        route = HotRoute(DirectInference(endpoint, HttpApi(endpoint)), GrpcMethods(endpoint))
        listen_hot(route)
        options = HTTPOptions(host="127.0.0.1", port=0, keep_alive_timeout_s=1 if stops == "keep-alive" else 60)
        task, listener = await start_asgi_http_server(HttpApi(endpoint), options, event_loop=asyncio.get_running_loop())
        while not listener.started:
            await asyncio.sleep(0.01)
        (address,) = (socket_.getsockname() for socket_ in listener.servers[0].sockets)
        reader, writer = await asyncio.open_connection(*address)
        (connection,) = await _connections(listener)
        assert isinstance(connection, HotProtocol)
        for answered in (1, 2):
            writer.write(PLAIN["bytes"])
            if answered == 2 and stops == "shutdown":
                await asyncio.sleep(0)
                while not route.direct.ongoing:
                    await asyncio.sleep(0)
                listener.should_exit = True
                connection.shutdown()
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert (b"connection: close" in head) == (answered == 2 and stops == "shutdown")
            await reader.readexactly(int(head.split(b"\r\ncontent-length: ")[1].split(b"\r\n")[0]))
            assert route.answered == answered
        began_s = time.monotonic()
        assert await reader.read() == b"", "closed"
        assert time.monotonic() - began_s < 5
        listener.should_exit = True
        await task

    asyncio.run(run())


@pytest.mark.parametrize("is_hot", [True, False])
def test_no_request_waits_for_the_garbage_collector(storage: UPath, is_hot: bool) -> None:
    """With its body: answered, refused because the queue is full, or too late."""
    with serving(hot=is_hot) as server:
        server.run(server.endpoint.update(config(storage)))
        late = listed(rows(1), timeout=1)
        converse(server, [PLAIN["bytes"], late], 2)
        gc.collect()
        gc.disable()
        try:
            converse(server, [PLAIN["bytes"], late] * 20, 40, pause_s=0)
            server.endpoint.find("toy").batcher._scheduler.queue.requests = 10**6
            assert converse(server, [PLAIN["bytes"]] * 20, 20, pause_s=0)[-1].startswith(b"HTTP/1.1 503 ")
            server.endpoint.find("toy").batcher._scheduler.queue.requests = 0
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            waited = [kept for kept in gc.garbage if isinstance(kept, QueuedRequest | OverloadError | DeadlineError)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not waited


def test_the_garbage_collector_leaves_alone_what_a_replica_has_loaded() -> None:
    thresholds = gc.get_threshold()
    try:
        freeze_loaded_objects()
        assert gc.get_freeze_count() > 10_000
        assert gc.get_threshold() > thresholds
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def test_a_replica_frees_the_model_that_it_lets_go_of(storage: UPath) -> None:
    """Nothing frozen holds it, and nothing that was read for it, though no other request comes."""
    thresholds = gc.get_threshold()

    async def run() -> None:
        server = ModelServer.func_or_class.__base__()  # type: ignore[attr-defined] # without what Serve adds
        endpoint, route = server._endpoint, server._hot
        await server.reconfigure(config(storage, 1).model_dump(mode="json"))
        old = [weakref.ref(held) for held in (endpoint.find("toy"), endpoint.find("toy").batcher)]
        lines, _, content = PLAIN["bytes"].partition(b"\r\n\r\n")
        head = route.head(lines + b"\r\n\r\n")
        assert head
        assert route.read(head, content)
        await server.reconfigure(config(storage, 2).model_dump(mode="json"))
        async with asyncio.timeout(10):
            while any(held() for held in old):
                await asyncio.sleep(0.01)
        await endpoint.update(EndpointConfig())
        await endpoint.wait_closed()

    try:
        asyncio.run(run())
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


async def _connections(listener: uvicorn.Server) -> list[object]:
    while not listener.server_state.connections:
        await asyncio.sleep(0.01)
    return list(listener.server_state.connections)
