"""The other pools of the endpoint, asked through Ray Serve."""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ReplicaState
from starlette.types import Message

from app.errors import OverloadError
from app.serving.pools import application_of
from app.serving.transport.passing import CallAnswer, PassedCall, PassedRequest

_AWAKE_S = 1.0
"""Time for which the state of the replicas is remembered."""
_LOST = RayError, RayServeException


class ServePools:
    """Asks the replicas of other pools. Serve chooses one, and starts one if there is none."""

    def __init__(self) -> None:
        self._handles: dict[str, DeploymentHandle[Any]] = {}
        self._awake: tuple[float, frozenset[str]] = (-_AWAKE_S, frozenset())

    async def is_awake(self, pool: str) -> bool:
        """Return whether a pool has a replica that runs."""
        asked_s, awake = self._awake
        if time.monotonic() - asked_s > _AWAKE_S:
            try:
                awake = await asyncio.to_thread(_awake_applications)
            except _LOST:  # what was known before is the best guess while Serve's controller restarts
                return application_of(pool) in awake
            self._awake = time.monotonic(), awake
        return application_of(pool) in awake

    async def ask(self, pool: str, request: PassedRequest) -> AsyncGenerator[Message, None]:
        """Yield the messages of a pool's answer.

        Raises:
            OverloadError: no replica answers.
        """
        handle = await self._handle(pool)
        answer = handle.options(method_name="answer_request", stream=True).remote(request)
        try:
            async for message in answer:
                yield message
        except _LOST as error:
            raise _no_answer(pool, error) from error
        finally:
            answer.cancel()

    async def call(self, pool: str, call: PassedCall) -> CallAnswer:
        """Return a pool's answer to a gRPC call.

        Raises:
            OverloadError: no replica answers.
        """
        handle = await self._handle(pool)
        answer = handle.options(method_name="answer_call").remote(call)
        try:
            answered: CallAnswer = await answer
        except _LOST as error:
            raise _no_answer(pool, error) from error
        except asyncio.CancelledError:
            answer.cancel()
            raise
        return answered

    async def _handle(self, pool: str) -> DeploymentHandle[Any]:
        if pool not in self._handles:
            try:
                # In a thread, because it asks Serve's controller.
                self._handles[pool] = await asyncio.to_thread(serve.get_app_handle, application_of(pool))
            except _LOST as error:
                raise _no_answer(pool, error) from error
        return self._handles[pool]


def _awake_applications() -> frozenset[str]:
    applications = serve.status().applications
    return frozenset(
        name
        for name, application in applications.items()
        if any(deployment.replica_states.get(ReplicaState.RUNNING) for deployment in application.deployments.values())
    )


def _no_answer(pool: str, error: Exception) -> OverloadError:
    return OverloadError(f"no replica of pool {pool} answered ({type(error).__name__}): try again")
