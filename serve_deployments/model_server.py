"""The model server: an endpoint in a replica of Ray Serve."""

import asyncio
import gc
from typing import Any

from ray import serve

from app.serving.config import EndpointConfig
from app.serving.endpoint import Endpoint
from app.serving.transport.grpc import GrpcMethods
from app.serving.transport.hot import HotRoute, listen_hot
from app.serving.transport.http import DirectInference, HttpApi
from app.serving.transport.middleware import answer_directly
from serve_deployments.autoscaling import DIRECT, LATENCY
from serve_deployments.metrics import BatchingMetrics
from serve_deployments.tensor_parallel import open_version

_GC_THRESHOLDS = 10_000, 20, 50
"""Of Python's collector. By its own of 700, it would run several times in each second of many small requests."""


def freeze_loaded_objects() -> None:
    """Keep the garbage collector from all objects that exist now: a full collection would visit every one of them."""
    gc.unfreeze()  # what was loaded before and is not needed any more
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


@serve.deployment(
    # New replicas start before old ones stop: a version that fails to load leaves the old one serving.
    max_surge_percent=100,
    logging_config={"enable_access_log": False},
    # One that has missed three looks in a row is replaced: after 8 s at most, and as many until the next one answers.
    health_check_period_s=1,
    health_check_timeout_s=2,
)
@serve.ingress()
class ModelServer(GrpcMethods):
    """A replica; each holds every deployed model. Serve calls the methods of gRPC by their names."""

    def __init__(self) -> None:
        super().__init__(Endpoint(open_version=open_version))
        self._api = HttpApi(self._endpoint)
        self._direct = DirectInference(self._endpoint, self._api)
        self._hot = HotRoute(self._direct, self)
        self._sparing: asyncio.Task[None] | None = None
        self._metrics = BatchingMetrics(self._endpoint)

    def __serve_build_asgi_app__(self) -> HttpApi:
        """What Serve sends HTTP requests to; asked for before Serve listens."""
        answer_directly(self._direct.before)
        listen_hot(self._hot)
        return self._api

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve what is wanted now; on an error, everything stays as it was."""
        await self._endpoint.update(EndpointConfig.model_validate(user_config))
        self._hot.forget_replaced()
        self._sparing = asyncio.create_task(self._spare_once_closed())

    async def _spare_once_closed(self) -> None:
        """Wait for models that were let go of, which may still answer: the collector would never free them."""
        await self._endpoint.wait_closed()
        freeze_loaded_objects()

    async def check_health(self) -> None:
        """Whether this event loop and every engine answer: where Serve itself looks, neither needs to.

        Asked every second, so that metrics are reported as often.
        """
        self._metrics.report()
        await self._endpoint.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What ``serve_deployments.autoscaling`` is told of this replica, beside how many requests Serve sees in it."""
        return {DIRECT: self._direct.ongoing + self.beside_streams, LATENCY: self._endpoint.latency_to_target}
