"""Requests for models of other pools, and pools whose replicas cannot start."""

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray.serve.schema import DeploymentStatusTrigger
from starlette.types import Message
from upath import UPath

from app.errors import OverloadError
from app.serving.config import EndpointConfig
from app.serving.endpoint import Endpoint
from app.serving.transport.http import HttpApi
from app.serving.transport.inference_call import Admission
from app.serving.transport.passing import CallAnswer, PassedCall, PassedRequest, messages_of
from serve_deployments import pools
from serve_deployments.pools import ServePools
from tests.engine_contract import exported
from tests.toy import config, publish


class Pools:
    """One other pool, in this process."""

    def __init__(self, api: HttpApi) -> None:
        self.api = api

    async def is_awake(self, _: str) -> bool:
        return True

    def ask(self, _: str, request: PassedRequest) -> AsyncGenerator[Message, None]:
        return messages_of(self.api, request)

    async def call(self, _: str, __: PassedCall) -> CallAnswer:
        raise NotImplementedError


def test_the_repository_of_a_model_is_that_of_its_pool(tmp_path: Path) -> None:
    async def run() -> None:
        publish(UPath(tmp_path), exported())
        other, shared = Endpoint(), Endpoint()
        await other.update(config(UPath(tmp_path)))
        await shared.update(EndpointConfig(elsewhere={"toy": "tiny"}))
        api = HttpApi(Admission(shared), Pools(HttpApi(Admission(other))))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://replica") as client:
            assert (await client.post("/v2/repository/models/toy/load", json={})).status_code == 200
            refused = await client.post("/v2/repository/models/toy/unload", json={})
            assert refused.json() == {"error": "model 'toy' cannot be unloaded by a client: run jobs.undeploy"}
            unknown = await client.post("/v2/repository/models/other/load", json={})
            assert unknown.json() == {"error": "model 'other' is not deployed: deployed are toy"}
        await other.update(EndpointConfig())

    asyncio.run(run())


class Serve:
    """Stands in for Ray Serve, whose requests wait for a replica that never starts."""

    def __init__(self) -> None:
        self.cancelled = 0
        deployment = SimpleNamespace(replica_states={}, status_trigger=DeploymentStatusTrigger.REPLICA_STARTUP_FAILED)
        self.applications = {"rayloom-rare": SimpleNamespace(deployments={"ModelServer": deployment})}

    def options(self, **_: Any) -> "Serve":
        return self

    def remote(self, _: Any) -> "Serve":
        return self

    def cancel(self) -> None:
        self.cancelled += 1

    async def __anext__(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    def __await__(self) -> Any:
        return self.__anext__().__await__()


def test_a_request_does_not_wait_for_a_pool_whose_replicas_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Serve()
    monkeypatch.setattr(pools, "_KNOWN_S", 0.01)
    monkeypatch.setattr(pools.serve, "status", lambda: serve)
    monkeypatch.setattr(pools.serve, "get_app_handle", lambda _: serve)

    async def run() -> None:
        asked = ServePools()
        request = PassedRequest("GET", "/v2/models/toy", b"", (), b"")
        for answer in (anext(asked.ask("rare", request)), asked.call("rare", PassedCall("ModelReady", b"", (), ""))):
            with pytest.raises(OverloadError, match="no replica of pool rare can start: 'serve status' says why"):
                await answer
        assert serve.cancelled == 2, "they no longer hold a place in Serve's queue"

    began_s = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - began_s < 30
