"""A request that waits for the answer of one version, without an asyncio task."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable

from app.errors import DeadlineError, EngineError
from app.serving.batching.groups import QueuedRequest
from app.serving.model.served import ServedModel
from app.serving.protocol.infer import RequestParameters
from app.telemetry.tracing import RequestTrace
from app.tensors import Tensors


class Exchange(ABC):
    """The receiver of the batcher's answer. A subclass sends the answer to the client."""

    __slots__ = ("_diagnosis", "_is_done", "_request", "_served", "trace")

    def __init__(self) -> None:
        self._is_done = False
        self._served: ServedModel | None = None
        self._request: QueuedRequest | None = None
        self._diagnosis: asyncio.Task[None] | None = None
        self.trace: RequestTrace | None = None
        """The span of the request, if it is traced. A subclass ends it."""

    def submit(
        self, served: ServedModel, tensors: Tensors, rows: int, shape: Hashable, parameters: RequestParameters
    ) -> None:
        """Submit the request to a version. Raises OverloadError, as ``Batcher.submit`` does."""
        self._served = served
        priority, timeout_s = parameters.priority, parameters.timeout_s
        self._request = served.batcher.submit(tensors, rows, shape, self, priority, timeout_s, self.trace)

    def give_up(self) -> None:
        """Stop waiting. A request that is not running yet will not run."""
        if self._served and self._request and not self._is_done:
            self._is_done = True
            self._served.batcher.cancel(self._request)
        # These are cycles. Only the garbage collector would free the request's body.
        self._request = self._diagnosis = None

    @abstractmethod
    def answer(self, outputs: Tensors) -> None:
        """Send the answer. Any exception raised here goes to ``refuse``."""

    @abstractmethod
    def refuse(self, error: Exception) -> None:
        """Send an error to the client."""

    def done(self) -> bool:
        return self._is_done

    def set_result(self, outputs: Tensors, /) -> None:
        assert self._served is not None
        # Done and counted before the answer is written, because writing takes time of its own.
        self._is_done = True
        self._note_latency()
        self._served.record_answer()
        try:
            self.answer(outputs)
        except Exception as error:
            self.refuse(error)

    def set_exception(self, error: Exception, /) -> None:
        self._is_done = True
        if isinstance(error, EngineError):
            # Find out first whether the engine is broken, or only this request is bad.
            self._diagnosis = asyncio.get_running_loop().create_task(self._diagnose(error))
            return
        if isinstance(error, DeadlineError):
            self._note_latency()
        self.refuse(error)

    async def _diagnose(self, error: EngineError) -> None:
        assert self._served is not None
        try:
            reported: Exception = await self._served.diagnose(error)
        except Exception as worse:
            reported = worse
        self.refuse(reported)

    def _note_latency(self) -> None:
        assert self._served is not None
        assert self._request is not None
        self._served.latencies.add(time.monotonic() - self._request.arrived_s)
