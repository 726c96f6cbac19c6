"""Plain requests to a replica while its versions, token and load change, and when it stops."""

import asyncio
import gc
import socket
import time
import weakref
from contextlib import ExitStack

import pytest
import uvicorn
from ray.serve._private.http_util import start_asgi_http_server
from ray.serve.config import HTTPOptions
from upath import UPath
from uvicorn.config import HTTP_PROTOCOLS

from app.errors import DeadlineError, OverloadError
from app.serving.access import Access
from app.serving.batching.scheduler import QueuedRequest
from app.serving.config import CandidateConfig, DeployedModel, EndpointConfig
from app.serving.endpoint import Endpoint
from app.serving.transport import fast_http
from app.serving.transport.fast_http import FastHttpProtocol, FastPath, use_fast_path
from app.serving.transport.grpc import GrpcMethods
from app.serving.transport.http import HttpApi
from app.serving.transport.inference_call import Admission
from serve_deployments.model_server import ModelServer, freeze_loaded_objects
from tests.engine_contract import exported, rows
from tests.helpers import wait_until
from tests.plain import PLAIN, binary, converse, listed, read_reply
from tests.serving import serving
from tests.toy import answering, config, endpoint_config, publish, version_config


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> UPath:
    folder = UPath(tmp_path_factory.mktemp("fast"))
    publish(folder, exported(), answering(1))
    return folder


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is, requests in pieces are put together."""
    monkeypatch.setattr(fast_http, "_GATHER_S", 60)


def test_who_goes_away_is_not_run_and_leaves_nothing_behind(storage: UPath) -> None:
    with serving() as server:
        server.run(server.endpoint.update(config(storage, max_batch_size=1)))
        served, admission = server.endpoint.find("toy"), server.fast_path.admission
        host, _, port = server.http.rpartition(":")
        clients = [socket.create_connection((host, int(port))) for _ in range(8)]
        request = binary(rows(300, 32))
        for client in clients:
            client.sendall(request[: len(request) // 2])
            client.sendall(request[len(request) // 2 :])
        wait_until(lambda: admission.ongoing == len(clients))
        for client in clients:
            client.close()
        wait_until(lambda: not admission.ongoing and not served.waiting)
        wait_until(lambda: served.batching.failures["cancelled"] == len(clients))
        assert admission._bytes == 0
        assert converse(server, [PLAIN["bytes"]], 1)


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
        assert server.fast_path.answered == 2


def test_a_version_that_changes_is_asked_at_once(storage: UPath) -> None:
    with serving() as server:
        for version in (1, 2, 1):
            server.run(server.endpoint.update(config(storage, version)))
            (said,) = converse(server, [PLAIN["bytes"]], 1)
            assert f'"model_version":"{version}"'.encode() in said
        assert server.fast_path.answered == 3


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
        assert server.fast_path.answered == 1 + is_plain
        copies = server.endpoint.find("toy", "2").batching
        wait_until(lambda: copies.success.count == 1)


def test_too_many_requests_and_too_large_ones_are_refused_here(storage: UPath) -> None:
    with serving() as server:
        server.run(server.endpoint.update(config(storage)))
        admission, before = server.fast_path.admission, server.fast_path.answered
        admission.ongoing = server.endpoint.config.max_requests
        (many,) = converse(server, [PLAIN["bytes"]], 1)
        admission.ongoing, admission._room_bytes = 0, 100
        (large,) = converse(server, [PLAIN["bytes"]], 1)
        for said in (many, large):
            assert said.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1\r\n" in said
        assert admission.ongoing == 0
        assert server.fast_path.answered == before + 2


def test_clients_that_send_no_body_do_not_keep_others_out(storage: UPath) -> None:
    with serving() as server, ExitStack() as stack:
        server.run(server.endpoint.update(config(storage, queue_limit=1)))
        most, awaited = server.endpoint.config.max_requests, server.fast_path.admission.awaited
        idle = [stack.enter_context(socket.create_connection(server.http.split(":"), 20)) for _ in range(most + 1)]
        for client in idle:
            client.sendall(
                b"POST /v2/models/toy/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\nX: 1\r\nX: 2\r\n\r\n"
            )
        given_up = read_reply(idle[0])
        assert given_up.startswith(b"HTTP/1.1 503 ")
        assert b"connection: close\r\n" in given_up
        assert len(awaited) == most
        slow = binary(rows(1), "X: 1", "X: 2")
        for said in converse(server, [PLAIN["bytes"], slow, slow], 3, pause_s=0.1):
            assert said.startswith(b"HTTP/1.1 200 ")
        assert len(awaited) == most, "no body is given up for one that is here"
        idle[1].sendall(b"{")
        for said in converse(server, [slow[:-10], slow[-10:]], 1, pause_s=0.1):
            assert said.startswith(b"HTTP/1.1 200 ")
        assert read_reply(idle[1]).startswith(b"HTTP/1.1 503 "), "the oldest, although it drips"


@pytest.mark.parametrize("stops", ["keep-alive", "shutdown"])
def test_a_listener_of_serves_takes_the_route_and_closes_what_is_idle(
    storage: UPath, stops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a replica's own listener: uvicorn's timer closes idle connections, and its shutdown lets requests end."""
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])

    async def run() -> None:
        endpoint = Endpoint()
        await endpoint.update(config(storage))
        admission = Admission(endpoint)
        fast_path = FastPath(admission, GrpcMethods(admission))
        use_fast_path(fast_path)
        options = HTTPOptions(host="127.0.0.1", port=0, keep_alive_timeout_s=1 if stops == "keep-alive" else 60)
        task, listener = await start_asgi_http_server(
            HttpApi(admission), options, event_loop=asyncio.get_running_loop()
        )
        while not listener.started:
            await asyncio.sleep(0.01)
        (address,) = (socket_.getsockname() for socket_ in listener.servers[0].sockets)
        reader, writer = await asyncio.open_connection(*address)
        (connection,) = await _connections(listener)
        assert isinstance(connection, FastHttpProtocol)
        for answered in (1, 2):
            writer.write(PLAIN["bytes"])
            if answered == 2 and stops == "shutdown":
                await asyncio.sleep(0)
                while not fast_path.admission.ongoing:
                    await asyncio.sleep(0)
                listener.should_exit = True
                connection.shutdown()
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert (b"connection: close" in head) == (answered == 2 and stops == "shutdown")
            await reader.readexactly(int(head.split(b"\r\ncontent-length: ")[1].split(b"\r\n")[0]))
            assert fast_path.answered == answered
        began_s = time.monotonic()
        assert await reader.read() == b"", "closed"
        assert time.monotonic() - began_s < 5
        listener.should_exit = True
        await task

    asyncio.run(run())


@pytest.mark.parametrize("is_fast", [True, False])
def test_no_request_waits_for_the_garbage_collector(storage: UPath, is_fast: bool) -> None:
    """With its body: answered, refused because the queue is full, or too late."""
    with serving(fast=is_fast) as server:
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
    thresholds, usual = gc.get_threshold(), (700, 10, 10)
    gc.set_threshold(*usual)  # other tests may have imported a job, which sets its own
    try:
        freeze_loaded_objects()
        assert gc.get_freeze_count() > 10_000
        assert gc.get_threshold() > usual
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def test_a_replica_frees_the_model_that_it_lets_go_of(storage: UPath) -> None:
    """Nothing frozen holds it, and nothing that was read for it, though no other request comes."""
    thresholds = gc.get_threshold()

    async def run() -> None:
        server = ModelServer.func_or_class.__base__()  # type: ignore[attr-defined] # without what Serve adds
        endpoint, fast_path = server._endpoint, server._fast_path
        await server.reconfigure(config(storage, 1).model_dump(mode="json"))
        old = [weakref.ref(held) for held in (endpoint.find("toy"), endpoint.find("toy").batcher)]
        lines, _, content = PLAIN["bytes"].partition(b"\r\n\r\n")
        head = fast_path.head(lines + b"\r\n\r\n")
        assert head
        assert fast_path.read(head, content)
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
