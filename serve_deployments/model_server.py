"""The model server: an endpoint in a replica of Ray Serve."""

import asyncio
import gc
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray import serve
from starlette.types import Message

from app.best_effort import BestEffort
from app.serving.config import EndpointConfig
from app.serving.endpoint import Endpoint
from app.serving.pools import pool_of, prefix_of
from app.serving.transport.fast_http import FastPath, use_fast_path
from app.serving.transport.grpc import GrpcMethods
from app.serving.transport.http import HttpApi
from app.serving.transport.inference_call import Admission
from app.serving.transport.middleware import answer_directly
from app.serving.transport.passing import CallAnswer, PassedCall, PassedRequest, messages_of
from serve_deployments.autoscaling import DIRECT, ENDED, LATENCY
from serve_deployments.metrics import ReplicaMetrics
from serve_deployments.pools import ServePools
from serve_deployments.tensor_parallel import open_version

_GC_THRESHOLDS = 10_000, 20, 50
"""Thresholds of Python's garbage collector. With the default of 700, it would run several times per second."""


def freeze_loaded_objects() -> None:
    """Exclude all existing objects from garbage collection. Otherwise a full collection would visit each of them."""
    gc.unfreeze()  # so that objects of closed models can be freed
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


@serve.deployment(
    # New replicas start before old ones stop: a version that fails to load leaves the old one serving.
    max_surge_percent=100,
    logging_config={"enable_access_log": False},
    # A replica that fails three checks in a row is replaced: within 8 s, and the new one answers within another 8 s.
    health_check_period_s=1,
    health_check_timeout_s=2,
)
@serve.ingress()
class ModelServer(GrpcMethods):
    """A replica, which holds all models of its pool. Serve calls the gRPC methods by their names."""

    def __init__(self) -> None:
        super().__init__(Admission(Endpoint(open_version=open_version)), ServePools())
        self._api = HttpApi(self._admission, self._pools)
        self._fast_path = FastPath(self._admission, self)
        self._freezing: asyncio.Task[None] | None = None
        self._metrics: ReplicaMetrics | None = None
        self._reporting = BestEffort("metrics cannot be reported", "the replica")

    def __serve_build_asgi_app__(self) -> HttpApi:
        """Return the application for HTTP requests. Serve calls this before it listens."""
        self._api.prefix = prefix_of(pool_of(serve.get_replica_context().app_name))
        answer_directly(self._api.in_front_of)
        use_fast_path(self._fast_path)
        return self._api

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Switch to a new configuration. On an error nothing changes."""
        await self._endpoint.update(EndpointConfig.model_validate(user_config))
        self._freezing = asyncio.create_task(self._freeze_once_closed())

    async def _freeze_once_closed(self) -> None:
        """Freeze objects once removed models are closed. Frozen before that, they would never be freed."""
        await self._endpoint.wait_closed()
        freeze_loaded_objects()

    async def check_health(self) -> None:
        """Check that this event loop and every engine answer. Serve's default check needs neither.

        Serve calls this every second, so metrics are reported here.
        """
        if self._metrics is None:
            self._metrics = ReplicaMetrics(self._endpoint, serve.get_replica_context().app_name)
        self._reporting(self._metrics.report)
        await self._endpoint.check()

    async def answer_request(self, request: PassedRequest) -> AsyncGenerator[Message, None]:
        """Yield the messages of the answer to a request that a replica of the shared pool has passed on."""
        async with aclosing(messages_of(self._api, request)) as messages:
            async for message in messages:
                yield message

    async def answer_call(self, call: PassedCall) -> CallAnswer:
        """Return the answer to a gRPC call that a replica of the shared pool has passed on."""
        return await self.answer_passed(call)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return this replica's values for ``serve_deployments.autoscaling``. Serve adds the requests that it sees."""
        return {
            DIRECT: self.unseen_by_serve,
            ENDED: self._endpoint.traffic.take_new(),
            LATENCY: self._endpoint.latency_to_target,
        }
