"""The other pools of the endpoint, asked through Ray Serve."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import DeploymentStatusTrigger, ReplicaState
from starlette.types import Message

from app.errors import OverloadError
from app.serving.pools import application_of
from app.serving.transport.passing import CallAnswer, PassedCall, PassedRequest

_KNOWN_S = 1.0
"""Time for which the state of the replicas is remembered."""
_LOST = RayError, RayServeException
Part = TypeVar("Part")


@dataclass(frozen=True)
class _Known:
    """The state of the pools' applications in Serve."""

    awake: frozenset[str]
    """Those with a replica that runs."""
    asleep: frozenset[str]
    """The others, unless their replicas could not start several times in a row."""


class ServePools:
    """Asks the replicas of other pools. Serve chooses one, and starts one if there is none."""

    def __init__(self) -> None:
        self._handles: dict[str, DeploymentHandle[Any]] = {}
        self._known: _Known | None = None
        self._known_s = -_KNOWN_S

    async def is_awake(self, pool: str) -> bool:
        """Return whether a pool has a replica that runs.

        Raises:
            OverloadError: it has none, and none can start, or the pool is no longer deployed.
        """
        if time.monotonic() - self._known_s > _KNOWN_S:
            with suppress(*_LOST):  # what was known before is the best guess while Serve's controller restarts
                self._known = await asyncio.to_thread(_known_applications)
                self._known_s = time.monotonic()
        if self._known is None:
            return False
        if application_of(pool) not in self._known.awake | self._known.asleep:
            raise OverloadError(
                f"no replica of pool {pool} can start: 'serve status' says why; deploy its models again, or try again "
                "later"
            )
        return application_of(pool) in self._known.awake

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
        """Return the first part of an answer. Raise OverloadError if a pool has no replica, and none can start.

        Serve would hold the request until one starts, however often that fails.
        """
        waiting = asyncio.ensure_future(part)
        try:
            while not (await asyncio.wait({waiting}, timeout=2 * _KNOWN_S))[0]:
                await self.is_awake(pool)
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


def _known_applications() -> _Known:
    deployments = {
        name: list(application.deployments.values()) for name, application in serve.status().applications.items()
    }
    awake = frozenset(
        name
        for name, those in deployments.items()
        if any(one.replica_states.get(ReplicaState.RUNNING) for one in those)
    )
    failed = DeploymentStatusTrigger.REPLICA_STARTUP_FAILED
    failing = frozenset(
        name for name, those in deployments.items() if any(one.status_trigger is failed for one in those)
    )
    return _Known(awake, frozenset(deployments) - failing - awake)


def _no_answer(pool: str, error: Exception) -> OverloadError:
    return OverloadError(f"no replica of pool {pool} answered ({type(error).__name__}): try again")
