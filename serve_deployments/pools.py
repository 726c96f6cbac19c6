"""The other pools of the endpoint, asked through Ray Serve."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Collection
from contextlib import suppress
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import DeploymentStatus, DeploymentStatusOverview, DeploymentStatusTrigger, ReplicaState
from starlette.types import Message

from app.errors import OverloadError
from app.serving.pools import application_of
from app.serving.transport.passing import CallAnswer, PassedCall, PassedRequest, PoolState

_KNOWN_S = 1.0
"""Time for which the state of the replicas is remembered."""
_LOST = RayError, RayServeException
_ENDING = {ReplicaState.STOPPING, ReplicaState.STOPPED}
_AS_WANTED = DeploymentStatus.HEALTHY, DeploymentStatus.DOWNSCALING
"""Statuses of a deployment that wants no more replicas than it has."""
_CANNOT_ANSWER = PoolState.FAILING, PoolState.UNDEPLOYED
Part = TypeVar("Part")


class ServePools:
    """Asks the replicas of other pools. Serve chooses one, and starts one if there is none."""

    def __init__(self) -> None:
        self._handles: dict[str, DeploymentHandle[Any]] = {}
        self._known: dict[str, PoolState] | None = None
        self._known_s = -_KNOWN_S
        self._asking: asyncio.Task[None] | None = None

    async def state_of(self, pool: str) -> PoolState:
        """Return a pool's state. While Serve's controller does not answer, return the last state that it reported."""
        if time.monotonic() - self._known_s > _KNOWN_S:
            # One task for all, because each takes a thread for as long as the controller restarts.
            self._asking = self._asking or asyncio.create_task(self._learn())
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._asking), None if self._known is None else _KNOWN_S)
        if self._known is None:
            return PoolState.STARTING
        state = self._known.get(application_of(pool), PoolState.UNDEPLOYED)
        is_old = time.monotonic() - self._known_s > _KNOWN_S
        # A pool that could not start may have been deployed again since.
        return PoolState.STARTING if is_old and state in _CANNOT_ANSWER else state

    async def _learn(self) -> None:
        try:
            with suppress(*_LOST):
                self._known = await asyncio.to_thread(_states)
                self._known_s = time.monotonic()
        finally:
            self._asking = None

    async def ask(self, pool: str, request: PassedRequest) -> AsyncGenerator[Message, None]:
        """Yield the messages of a pool's answer.

        Raises:
            OverloadError: no replica answers, or none can start.
        """
        handle = await self._handle(pool)
        answer = handle.options(method_name="answer_request", stream=True).remote(request)
        try:
            if (first := await self._unless_failing(pool, anext(answer, None))) is not None:
                yield first
            async for message in answer:
                yield message
        except _LOST as error:
            raise _no_answer(pool, error) from error
        finally:
            answer.cancel()

    async def call(self, pool: str, call: PassedCall) -> CallAnswer:
        """Return a pool's answer to a gRPC call.

        Raises:
            OverloadError: no replica answers, or none can start.
        """
        handle = await self._handle(pool)
        answer = handle.options(method_name="answer_call").remote(call)
        try:
            answered: CallAnswer = await self._unless_failing(pool, answer)
        except _LOST as error:
            raise _no_answer(pool, error) from error
        except (asyncio.CancelledError, OverloadError):
            answer.cancel()
            raise
        return answered

    async def _unless_failing(self, pool: str, part: Awaitable[Part]) -> Part:
        """Return the first part of an answer. Raise OverloadError if a pool has no replica, and none will start.

        Serve would hold the request forever.
        """
        waiting = asyncio.ensure_future(part)
        try:
            while not (await asyncio.wait({waiting}, timeout=2 * _KNOWN_S))[0]:
                if (state := await self.state_of(pool)) in _CANNOT_ANSWER:
                    raise OverloadError(f"pool {pool} {state}")
            return waiting.result()
        finally:
            waiting.cancel()

    async def _handle(self, pool: str) -> DeploymentHandle[Any]:
        if pool not in self._handles:
            try:
                # In a thread, because it asks Serve's controller.
                self._handles[pool] = await asyncio.to_thread(serve.get_app_handle, application_of(pool))
            except _LOST as error:
                raise _no_answer(pool, error) from error
        return self._handles[pool]


def _states() -> dict[str, PoolState]:
    """Return the state of each application in Serve."""
    applications = serve.status().applications.items()
    return {name: _state_of(application.deployments.values()) for name, application in applications}


def _state_of(deployments: Collection[DeploymentStatusOverview]) -> PoolState:
    living = {state for one in deployments for state, number in one.replica_states.items() if number} - _ENDING
    if ReplicaState.RUNNING in living:
        return PoolState.AWAKE
    if any(one.status_trigger is DeploymentStatusTrigger.REPLICA_STARTUP_FAILED for one in deployments):
        return PoolState.FAILING
    if deployments and not living and all(one.status in _AS_WANTED for one in deployments):
        return PoolState.ASLEEP
    return PoolState.STARTING


def _no_answer(pool: str, error: Exception) -> OverloadError:
    return OverloadError(f"no replica of pool {pool} answered ({type(error).__name__}): try again")
