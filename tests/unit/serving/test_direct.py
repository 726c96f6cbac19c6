"""Inference that is answered before Ray Serve sees the request, and all else that is left to Serve."""

import asyncio
import json
import socket
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from upath import UPath

from app.serving.access import Access
from app.serving.config import EndpointConfig
from app.serving.endpoint import Endpoint
from app.serving.protocol.infer import LIMITS
from app.serving.protocol.rest import JSON_LENGTH
from app.serving.transport import asgi
from app.serving.transport.http import HttpApi
from app.serving.transport.inference_call import Admission
from app.serving.transport.middleware import answer_directly, middleware
from tests.engine_contract import exported, rows
from tests.serving import serving
from tests.toy import body, config, expected, is_right, publish

INFER = "/v2/models/toy/infer"
SERVE, LEFT_TO_SERVE = PlainTextResponse("", 418), 418


def client(app: ASGIApp = SERVE) -> httpx.AsyncClient:
    """Return a client of Serve's application, behind the middleware in Serve's order."""
    for layer in middleware():
        app = layer.cls(app, *layer.args, **layer.kwargs)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replica")


def answered(endpoint: Endpoint, room_bytes: int = 2**32) -> Admission:
    """By this endpoint, on the event loop that runs."""
    admission = Admission(endpoint, room_bytes)
    answer_directly(HttpApi(admission).in_front_of)
    return admission


def test_a_replica_answers_inference_itself_and_leaves_the_rest_to_serve(tmp_path: Path) -> None:
    async def run() -> None:
        publish(UPath(tmp_path), exported())
        endpoint = Endpoint()
        await endpoint.update(config(UPath(tmp_path)))
        answered(endpoint)
        async with client() as replica:
            answer = await replica.post(INFER, json=body(rows(2)))
            assert is_right(answer.json(), expected(rows(2)))
            for method, path in [("GET", INFER), ("GET", "/-/healthz"), ("POST", "/v1/models/toy/predict")]:
                assert (await replica.request(method, path)).status_code == LEFT_TO_SERVE
        await endpoint.update(EndpointConfig())

    asyncio.run(run())


def test_where_no_replica_of_ours_listens_all_is_left_to_serve() -> None:
    async def replica() -> None:
        answered(Endpoint())

    async def other() -> int:
        async with client() as proxy:
            return (await proxy.post(INFER)).status_code

    asyncio.run(replica())
    assert asyncio.run(other()) == LEFT_TO_SERVE, "on another event loop than the endpoint's"


def test_a_request_that_serve_leaves_unanswered_may_be_sent_again() -> None:
    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        """What a proxy of Serve's does when the replica dies."""

    async def run() -> None:
        async with client(silent) as proxy:
            answer = await proxy.post(INFER)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json() == {"error": "no replica could answer: try again"}

    asyncio.run(run())


def test_the_token_is_asked_for_directly_too() -> None:
    async def run() -> None:
        endpoint = Endpoint()
        await endpoint.update(EndpointConfig(access=Access.by_token("open sesame")))
        answered(endpoint)
        async with client() as replica:
            assert (await replica.post(INFER)).status_code == 401
            shown = {"authorization": "Bearer open sesame"}
            assert (await replica.post(INFER, content=b"{}", headers=shown)).status_code == 404, "no such model"

    asyncio.run(run())


@pytest.mark.parametrize("path", [INFER, "/v1/models/toy/predict"])
def test_clients_that_send_no_body_take_no_place(path: str) -> None:
    """A new client replaces the one that has waited longest."""

    async def run() -> None:
        endpoint, rest = Endpoint(), asyncio.Event()
        admission, most, places = answered(endpoint), endpoint.config.max_requests, 0
        api = HttpApi(admission)

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            """Stand in for Serve, which counts a request as long as this runs."""
            nonlocal places
            places += 1
            await api(scope, receive, send)
            places -= 1

        async def slowly() -> AsyncIterator[bytes]:
            yield b"{"
            await rest.wait()
            yield b"}"

        async with client(serve) as replica:
            slow = [asyncio.create_task(replica.post(path, content=slowly())) for _ in range(most + 1)]
            given_up = await slow[0]
            assert (given_up.status_code, given_up.headers["retry-after"]) == (503, "1")
            assert "send it faster" in json.loads(given_up.content)["error"]
            assert (len(admission.awaited), admission.ongoing, places) == (most, 0, 0)
            assert (await replica.post(path, content=b"{}")).status_code == 404, "others are answered"
            rest.set()
            assert {(await reply).status_code for reply in slow[1:]} == {404}, "no such model"
            assert (len(admission.awaited), admission.ongoing, places, admission._bytes) == (0, 0, 0, 0)
        counted = {sample.labels: sample.value for sample in endpoint.traffic.samples()}
        assert counted["", "", "http" if path == INFER else "natural", "overload"] == 1

    asyncio.run(run())


def test_requests_beyond_what_a_replica_takes_are_refused() -> None:
    async def run() -> None:
        admission = answered(Endpoint())
        admission.ongoing = most = admission.endpoint.config.max_requests
        async with client() as replica:
            refused = await replica.post(INFER, content=b"{}")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert f"{most} requests" in json.loads(refused.content)["error"]
        assert "connection" not in refused.headers
        assert (admission.ongoing, admission._bytes) == (most, 0)

    asyncio.run(run())


def test_bodies_take_room_as_they_come_and_what_they_may_inflate_to_once_they_are_here() -> None:
    async def run() -> None:
        admission, rest = answered(Endpoint(), room_bytes=2**26), asyncio.Event()

        async def slowly(first: bytes) -> AsyncIterator[bytes]:
            yield first
            await rest.wait()
            yield b"}"

        async with client() as replica:

            async def begin(count: int, first: bytes, headers: dict[str, str]) -> list[asyncio.Task[httpx.Response]]:
                before = len(admission.awaited)
                began = [
                    asyncio.create_task(replica.post(INFER, content=slowly(first), headers=headers))
                    for _ in range(count)
                ]
                while len(admission.awaited) < before + count:
                    await asyncio.sleep(0)
                return began

            async def status() -> int:
                return (await replica.post(INFER, content=b"{}")).status_code

            slow = await begin(17, b"", {"content-length": str(64 * 2**20), JSON_LENGTH: "1"})
            assert await status() == 404
            slow += await begin(16, b"{" * 65_100, packed := {"content-encoding": "gzip"})
            assert await status() == 404
            refused = await replica.post(INFER, content=b"{" * 65_100, headers={**packed, JSON_LENGTH: "1"})
            assert refused.status_code == 503, "there is no room for its content"
            rest.set()
            for reply in slow:
                await reply
            assert await status() == 404, "there is room again"

    asyncio.run(run())


@pytest.mark.parametrize("path", [INFER, "/v1/models/toy/predict"])
def test_a_compressed_body_reserves_what_it_may_inflate_to(path: str) -> None:
    async def run() -> None:
        admission, content = answered(Endpoint(), room_bytes=2**20), b"{}" + b" " * 2000
        async with client() as replica:
            packed = await replica.post(path, content=content, headers={"content-encoding": "gzip"})
            assert packed.status_code == 503
            assert (await replica.post(path, content=content)).status_code != 503
        assert (admission.ongoing, admission._bytes) == (0, 0)

    asyncio.run(run())


def test_requests_without_the_token_take_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "_REST_TIMEOUT_S", 0.5)

    async def run() -> None:
        endpoint, begun = Endpoint(), 0
        await endpoint.update(EndpointConfig(access=Access.by_token("open sesame")))
        admission = answered(endpoint)

        async def unfinished() -> AsyncIterator[bytes]:
            nonlocal begun
            begun += 1
            yield b"{" * 65_100
            await asyncio.Event().wait()

        async with client() as replica:
            headers = {"content-encoding": "gzip"}
            refused = [
                asyncio.create_task(replica.post(INFER, content=unfinished(), headers=headers))
                for _ in range(endpoint.config.max_requests)
            ]
            while begun < len(refused):
                await asyncio.sleep(0)
            assert not admission.ongoing
            shown = {"authorization": "Bearer open sesame"}
            assert (await replica.post(INFER, content=b"{}", headers=shown)).status_code == 404, "no such model"
            assert {(await response).status_code for response in refused} == {401}

    asyncio.run(run())


def test_a_client_that_still_sends_reads_that_there_is_no_room() -> None:
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {32 * 2**20}\r\n{JSON_LENGTH}: 1\r\n\r\n".encode()
    with serving(room_bytes=2**20) as server, socket.create_connection(server.http.split(":"), timeout=20) as sender:
        sender.sendall(head + bytes(32 * 2**20))
        assert sender.recv(2**16).startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize("size", [60, 70])
@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large_is_read_and_not_kept(size: int, announced: bool) -> None:
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(size):
            sent += 1
            yield bytes(2**20)

    async def run() -> None:
        answered(Endpoint())
        async with client() as replica:
            headers = {"content-length": str(size * 2**20)} if announced else {}
            refused = await replica.post(INFER, content=chunks(), headers=headers)
        assert refused.status_code == 413
        assert f"larger than {LIMITS.json_bytes} bytes" in json.loads(refused.content)["error"]

    tracemalloc.start()
    try:
        asyncio.run(run())
        assert tracemalloc.get_traced_memory()[1] < (4 if announced else 12) * 2**20
    finally:
        tracemalloc.stop()
    assert sent == size  # otherwise a client that still sends might get a reset instead of a response
