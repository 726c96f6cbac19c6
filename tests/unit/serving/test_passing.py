"""Requests for models of other pools, and pools whose replicas cannot start."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray.serve.schema import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from starlette.types import Message
from tritonclient.grpc import service_pb2 as pb
from upath import UPath

from app.errors import OverloadError
from app.serving.config import EndpointConfig
from app.serving.endpoint import Endpoint
from app.serving.transport.grpc import GrpcMethods, Origin
from app.serving.transport.http import HttpApi
from app.serving.transport.inference_call import Admission
from app.serving.transport.passing import CallAnswer, PassedCall, PassedRequest, PoolState, messages_of
from serve_deployments import pools
from serve_deployments.pools import ServePools
from tests.engine_contract import exported
from tests.toy import config, publish


class Pools:
    """One other pool, in this process."""

    def __init__(self, api: HttpApi) -> None:
        self.api = api

    async def state_of(self, _: str) -> PoolState:
        return PoolState.AWAKE

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


class MeetingPools(Pools):
    """Other pools, which tell their states once all have been asked."""

    def __init__(self, pools: int) -> None:
        self.asked = asyncio.Barrier(pools)

    async def state_of(self, _: str) -> PoolState:
        await self.asked.wait()
        return PoolState.STARTING


def test_a_list_waits_for_the_states_of_all_pools_at_once() -> None:
    async def run() -> None:
        shared = Endpoint()
        await shared.update(EndpointConfig(elsewhere={"toy": "rare", "other": "tiny"}))
        pools = MeetingPools(2)
        api = httpx.ASGITransport(HttpApi(Admission(shared), pools))
        async with asyncio.timeout(30), httpx.AsyncClient(transport=api, base_url="http://replica") as client:
            listed = (await client.post("/v2/repository/index", json={})).json()
            assert [model["name"] for model in listed] == ["toy", "other"]
            index = await GrpcMethods(Admission(shared), pools).answer_passed(
                PassedCall("RepositoryIndex", b"", (), "")
            )
        assert [model.name for model in pb.RepositoryIndexResponse.FromString(index.message).models] == ["toy", "other"]

    asyncio.run(run())


class SleepingPools(Pools):
    """One other pool, which has no replica until it is asked something."""

    asked = 0

    async def state_of(self, _: str) -> PoolState:
        return PoolState.AWAKE if self.asked else PoolState.ASLEEP

    def ask(self, pool: str, request: PassedRequest) -> AsyncGenerator[Message, None]:
        self.asked += 1
        return super().ask(pool, request)

    async def call(self, _: str, call: PassedCall) -> CallAnswer:
        raise AssertionError(call)


def test_a_question_for_the_state_of_a_model_does_not_wake_its_pool() -> None:
    async def run() -> None:
        shared = Endpoint()
        await shared.update(EndpointConfig(elsewhere={"toy": "rare"}))
        pools = SleepingPools(HttpApi(Admission(Endpoint())))
        methods, origin = GrpcMethods(Admission(shared), pools), Origin((), "")
        ready = await methods.answer_passed(PassedCall("ModelReady", b"\n\x03toy", *origin))
        assert ready.message == pb.ModelReadyResponse(ready=True).SerializeToString()
        counted = await methods.answer_passed(PassedCall("ModelStatistics", b"\n\x03toy", *origin))
        assert (counted.code, counted.message) == (0, b"")

        api = httpx.ASGITransport(HttpApi(Admission(shared), pools))
        async with httpx.AsyncClient(transport=api, base_url="http://replica") as client:
            assert (await client.get("/v2/models/toy/ready")).json() == {"name": "toy", "ready": True}
            assert (await client.get("/v2/models/toy/stats")).json() == {"model_stats": []}
            assert not pools.asked
            assert (await client.get("/v2/models/toy")).status_code == 404  # the pool's own answer
            assert (await client.get("/v2/models/toy/ready")).status_code == 404
            assert pools.asked == 2

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


@pytest.mark.parametrize(
    ("is_deployed", "words"),
    [(True, "pool rare has no replica, and none can start"), (False, "pool rare is no longer deployed")],
)
def test_a_request_does_not_wait_for_a_pool_whose_replicas_will_not_start(
    monkeypatch: pytest.MonkeyPatch, is_deployed: bool, words: str
) -> None:
    serve = Serve()
    if not is_deployed:  # any longer, since the request came
        serve.applications.clear()
    monkeypatch.setattr(pools, "_KNOWN_S", 0.01)
    monkeypatch.setattr(pools.serve, "status", lambda: serve)
    monkeypatch.setattr(pools.serve, "get_app_handle", lambda _: serve)

    async def run() -> None:
        asked = ServePools()
        request = PassedRequest("GET", "/v2/models/toy", b"", (), b"")
        for answer in (anext(asked.ask("rare", request)), asked.call("rare", PassedCall("ModelReady", b"", (), ""))):
            with pytest.raises(OverloadError, match=words):
                await answer
        assert serve.cancelled == 2, "they no longer hold a place in Serve's queue"

    began_s = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - began_s < 30


@pytest.mark.parametrize(
    ("replicas", "status", "state"),
    [
        ({ReplicaState.STOPPING: 1}, DeploymentStatus.DOWNSCALING, PoolState.ASLEEP),
        ({ReplicaState.RUNNING: 0}, DeploymentStatus.HEALTHY, PoolState.ASLEEP),
        ({ReplicaState.STARTING: 1}, DeploymentStatus.UPDATING, PoolState.STARTING),
        ({ReplicaState.STOPPING: 1}, DeploymentStatus.UNHEALTHY, PoolState.STARTING),
        ({ReplicaState.RECOVERING: 1}, DeploymentStatus.HEALTHY, PoolState.STARTING),
        ({ReplicaState.STARTING: 1, ReplicaState.RUNNING: 1}, DeploymentStatus.UPSCALING, PoolState.AWAKE),
    ],
)
def test_only_a_pool_that_wants_no_replica_is_asleep(
    monkeypatch: pytest.MonkeyPatch, replicas: dict[ReplicaState, int], status: DeploymentStatus, state: PoolState
) -> None:
    trigger = DeploymentStatusTrigger.UNSPECIFIED
    deployment = SimpleNamespace(replica_states=replicas, status=status, status_trigger=trigger)
    application = SimpleNamespace(deployments={"ModelServer": deployment})
    status_of_all = SimpleNamespace(applications={"rayloom-rare": application})
    monkeypatch.setattr(pools.serve, "status", lambda: status_of_all)
    assert asyncio.run(ServePools().state_of("rare")) is state


def test_the_last_state_is_told_while_the_controller_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, asked = threading.Event(), 0

    def status() -> Any:
        nonlocal asked
        asked += 1
        if asked > 1:
            answers.wait(60)
        deployment = SimpleNamespace(replica_states={}, status=DeploymentStatus.HEALTHY, status_trigger=None)
        return SimpleNamespace(applications={"rayloom-rare": SimpleNamespace(deployments={"ModelServer": deployment})})

    monkeypatch.setattr(pools, "_KNOWN_S", 0.01)
    monkeypatch.setattr(pools.serve, "status", status)

    async def run() -> None:
        told = ServePools()
        assert await told.state_of("rare") is PoolState.ASLEEP
        await asyncio.sleep(0.02)
        try:
            states = await asyncio.wait_for(asyncio.gather(*(told.state_of("rare") for _ in range(50))), 30)
            assert set(states) == {PoolState.ASLEEP}
            assert await told.state_of("other") is PoolState.STARTING, "it may have been deployed since"
            assert asked <= 2, "all of them share one question"
        finally:
            answers.set()

    asyncio.run(run())
