"""Shadow traffic: copies of requests to a version whose answers nobody sees."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from app.errors import DeadlineError, OverloadError
from app.serving.answering import Answering
from app.serving.batching.statistics import FailureReason
from app.serving.model.served import ServedModel
from app.serving.protocol.infer import InferRequest, InferResponse
from app.serving.protocol.natural import PredictRequest, PredictResponse
from app.tensors import TensorSpec

LOG = logging.getLogger(__name__)

_MOST_BYTES = 2**30


class Shadow:
    """A version that is sent copies. One that finds its queue full is dropped, and so is one too many in bytes."""

    def __init__(self, served: ServedModel, most_bytes: int = _MOST_BYTES) -> None:
        """Send copies to a version, of ``most_bytes`` at a time: the requests that they are of have been answered."""
        self.served = served
        self._most_bytes = most_bytes
        self._bytes = 0  # of the copies that wait or run
        self._copies: dict[asyncio.Task[object], int] = {}  # and their bytes
        self._told: set[type[BaseException]] = set()

    def send(self, copy: Coroutine[Any, Any, object], num_bytes: int) -> None:
        """Let a copy of so many bytes run in the background.

        What it raises is in the version's statistics, and goes no further.
        """
        if self._bytes + num_bytes > self._most_bytes:
            copy.close()
            self.served.batching.failed(FailureReason.REJECTED, 0.0)
            return
        task: asyncio.Task[object] = asyncio.create_task(copy)
        self._copies[task] = num_bytes  # the loop alone would let go of it
        self._bytes += num_bytes
        task.add_done_callback(self._done)

    def _done(self, copy: asyncio.Task[object]) -> None:
        self._bytes -= self._copies.pop(copy)
        error = None if copy.cancelled() else copy.exception()
        if error is None or isinstance(error, OverloadError | DeadlineError) or type(error) in self._told:
            return
        self._told.add(type(error))  # once for each kind: it may be so of every copy
        manifest = self.served.model.manifest
        LOG.warning("the shadow of model %r, version %s, failed", manifest.name, manifest.version, exc_info=error)


class Shadowed:
    """What answers, with a shadow that is sent what it has answered.

    So a copy never runs before its request, and what cannot be answered at all is not held against the shadow.
    """

    def __init__(self, answering: Answering, shadow: Shadow) -> None:
        self._answering = answering
        self._shadow = shadow

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What a request may hold."""
        return self._answering.inputs

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer a request of the protocol."""
        response = await self._answering.infer(request)
        self._shadow.send(self._shadow.served.infer(request), request.num_bytes)
        return response

    async def predict(self, request: PredictRequest) -> PredictResponse:
        """Answer with labels."""
        response = await self._answering.predict(request)
        self._shadow.send(self._shadow.served.predict(request), request.num_bytes)
        return response
