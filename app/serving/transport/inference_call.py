"""One request for inference, however it came: admission, access, trace, count and refusal.

HTTP and gRPC only frame bytes. Each of their paths makes an ``InferenceCall`` of a request, and goes through the same
steps in the same order: access by the headers, a bounded body, a slot once the body is here, the model, one count.
"""

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self, TypeVar

from starlette.types import Message, Receive

from app.errors import DeadlineError, DisconnectedError, EngineError, OverloadError
from app.serving.access import Caller
from app.serving.batching.scheduler import QueuedRequest
from app.serving.endpoint import Endpoint
from app.serving.model.served import ServedModel
from app.serving.protocol.compression import MAX_INFLATION, is_compressed
from app.serving.rollout import InferenceTarget
from app.serving.traffic import Protocol, outcome_of
from app.serving.transport.prepared import PreparedRequest
from app.telemetry.tracing import RequestTrace, within_request
from app.tensors import Tensors, TensorSpec

Request = TypeVar("Request")
Result = TypeVar("Result")

ROOM_BYTES = 4 * 2**30
"""Default limit on the total size of all bodies in a replica."""
_GRACE_S = 0.05
"""Time to read what has arrived before a body is given up."""
_MAX_CALLERS, _MAX_CALLER_BYTES = 1024, 1024
_GIVEN_UP = DisconnectedError("the connection was closed before the answer")


class AwaitedBodies:
    """Bodies whose next part has not arrived. Their number is limited, and a new body replaces the oldest."""

    def __init__(self) -> None:
        self._waits: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._waits)

    def number(self) -> int:
        """Return the number of a new request. The body with the lowest is given up first."""
        return next(self._numbers)

    def add(self, number: int, give_up: Callable[[], None], limit: int) -> None:
        """Note that a body is awaited. If more than ``limit`` stay so, give up the oldest.

        So clients that send nothing cannot block those that send. What has arrived is read first.
        """
        self._waits[number] = give_up
        if len(self._waits) > limit:
            asyncio.get_running_loop().call_later(_GRACE_S, self._shrink, limit)

    def discard(self, number: int) -> None:
        """Note that a body is not awaited any more."""
        self._waits.pop(number, None)

    def _shrink(self, limit: int) -> None:
        for number in sorted(self._waits)[: max(0, len(self._waits) - limit)]:
            self._waits.pop(number)()


class Admission:
    """Who and how much a replica admits: callers, requests at a time, and the total size of bodies.

    Ray Serve limits requests, too, but does not see those that a replica answers itself.
    """

    def __init__(self, endpoint: Endpoint, room_bytes: int = ROOM_BYTES) -> None:
        """Admit requests to an endpoint.

        Args:
            room_bytes: limit on the total size of all bodies; a compressed one counts as its largest possible content.
        """
        self.endpoint = endpoint
        self.ongoing = 0
        """Number of requests that wait or run. Their bodies have arrived."""
        self.awaited = AwaitedBodies()
        self._bytes = 0  # of all bodies
        self._room_bytes = room_bytes
        self._callers: set[tuple[Caller, str | None]] = set()
        self._update()
        endpoint.on_update(self._update)

    def _update(self) -> None:
        """Follow the endpoint's configuration: its limit, and maybe another token."""
        self.max_requests = self.endpoint.config.max_requests
        self._callers.clear()

    def require_access(self, caller: Caller, peer: str | None = None) -> None:
        """Raise UnauthorizedError if the endpoint does not answer a caller.

        Args:
            peer: the caller's address over gRPC, whose ports listen on all interfaces.
        """
        # Callers are remembered, because the check hashes the token.
        if (caller, peer) in self._callers:
            return
        access = self.endpoint.access
        # The address first, because without a token it is the only check.
        if peer is not None:
            access.check_peer(peer)
        access.check(caller)
        # Long headers are checked each time and not kept, so that callers cannot fill the memory.
        if sum(map(len, filter(None, caller))) <= _MAX_CALLER_BYTES:
            if len(self._callers) >= _MAX_CALLERS:
                self._callers.clear()
            self._callers.add((caller, peer))

    def enter(self) -> None:
        """Count a request until it leaves. Raises OverloadError if there are too many."""
        if self.ongoing >= self.max_requests:
            raise self._overload()
        self.ongoing += 1

    def hold(self, num_bytes: int) -> None:
        """Count more bytes, or fewer. Raises OverloadError if there is no room for them."""
        if self._bytes + num_bytes > self._room_bytes:
            raise self._overload()
        self._bytes += num_bytes

    def leave(self, num_bytes: int, has_entered: bool) -> None:
        """Stop counting a request, if it has entered, and its bytes."""
        self._bytes -= num_bytes
        self.ongoing -= has_entered

    def _overload(self) -> OverloadError:
        return OverloadError(f"{self.ongoing} requests hold {self._bytes} bytes in total already: try again later")


class InferenceCall:
    """A request for inference, from its headers to the end of its answer."""

    __slots__ = (
        "_has_entered", "_held", "_is_counted", "_number", "_protocol", "admission", "model", "received", "sent",
        "trace", "version",
    )  # fmt: skip

    def __init__(self, admission: Admission, protocol: Protocol | None) -> None:
        """Begin a call by ``protocol``; None for a request that is not for inference, and so is not counted."""
        self.admission = admission
        self.model = self.version = ""
        self.received = self.sent = 0
        """The bytes of its body as it was sent, and of its answer's."""
        self.trace: RequestTrace | None = None
        """Its span, if it is traced."""
        self._protocol: Protocol = protocol or "http"
        self._is_counted = protocol is None
        self._held = 0
        self._has_entered = False
        self._number = -1  # of its body, while it is awaited

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    @property
    def traceparent(self) -> str | None:
        """The span of the request, for its client; None if it is not traced."""
        return self.trace.traceparent if self.trace else None

    def begin_trace(self, traceparent: str | None) -> None:
        """Begin its span, which ``count`` ends. ``traceparent`` is the client's. Only for who has access."""
        if tracer := self.admission.endpoint.traffic.tracer:
            self.trace = tracer.begin(self._protocol, traceparent)

    def await_body(self, give_up: Callable[[], None]) -> None:
        """Note that a part of the body is awaited. ``give_up`` is called if too many others wait, too."""
        if self._number < 0:
            self._number = self.admission.awaited.number()
        self.admission.awaited.add(self._number, give_up, self.admission.max_requests)

    def arrived(self) -> None:
        """Note that the awaited part has arrived."""
        self.admission.awaited.discard(self._number)

    def too_slow(self) -> OverloadError:
        """Return the error of a body that was given up for others."""
        others = self.admission.max_requests
        return OverloadError(f"the body arrived too slowly while {others} others waited: send it faster")

    def hold(self, num_bytes: int) -> None:
        """Take room for so many bytes, in place of what was taken. Raises OverloadError if there is not enough."""
        self.admission.hold(num_bytes - self._held)
        self._held = num_bytes

    def enter(self) -> None:
        """Take a slot, which only a request whose body is here may do. Raises OverloadError if none is free."""
        self.admission.enter()
        self._has_entered = True

    async def route(
        self,
        name: str,
        version: str | None,
        read: Callable[[Sequence[TensorSpec]], Awaitable[Request]],
        *,
        takes_tensors: bool = False,
    ) -> tuple[Request, InferenceTarget]:
        """Read the request for a model, and choose who answers it.

        Args:
            read: reads the request for a model with these inputs.
            takes_tensors: as in ``Rollout.route``.

        Raises:
            NotServedError: the model or version is not served.
        """
        endpoint = self.admission.endpoint
        await endpoint.load_on_demand(name)
        found = endpoint.find(name, version)
        self.model, self.version = name, found.version
        try:
            request = await read(found.inputs)
        except Exception as error:
            found.count_invalid(error)
            raise
        # Looked up only now, because a version can be replaced while a body arrives and is read.
        await endpoint.load_on_demand(name)
        target = endpoint.route(name, version, takes_tensors=takes_tensors)
        self.version = target.version
        return request, target

    async def run(self, work: Awaitable[Result]) -> Result:
        """Return the result of ``work`` on a target. Its spans belong to the request's."""
        if self.trace is None:
            return await work
        with within_request(self.trace):
            return await work

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the request when the block ends, by the error if one leaves it."""
        try:
            yield
        # A client that goes away raises ``CancelledError``, which is no ``Exception``.
        except BaseException as error:
            self.count(error)
            raise
        self.count()

    def count(self, error: BaseException | None = None) -> None:
        """Count the request once, as answered or by the first error that is told, and end its span."""
        if self._is_counted:
            return
        self._is_counted = True
        outcome = "ok" if error is None else outcome_of(error)
        traffic = self.admission.endpoint.traffic
        traffic.add(self.model, self.version, self._protocol, outcome, self.received, self.sent)
        if self.trace:
            if isinstance(error, Exception):
                self.trace.note_error(error)
            self.trace.end(self.model, self.version, outcome)

    def leave_count_to(self, model: str) -> None:
        """Leave the count to the pool that answers for a model."""
        self._is_counted = True
        if self.trace:
            self.trace.end(model, "", "ok")

    def leave(self) -> None:
        """Free its slot and its room."""
        if self._number >= 0:
            self.arrived()
        self.admission.leave(self._held, self._has_entered)
        self._held, self._has_entered = 0, False


class TasklessCall(InferenceCall, ABC):
    """A call that waits without an asyncio task: a batcher gives the answer of one version to its connection."""

    __slots__ = ("_diagnosis", "_is_done", "_queued", "_served")

    def __init__(self, admission: Admission, protocol: Protocol | None) -> None:
        super().__init__(admission, protocol)
        self._is_done = False
        self._served: ServedModel | None = None
        self._queued: QueuedRequest | None = None
        self._diagnosis: asyncio.Task[None] | None = None

    @abstractmethod
    def send_answer(self, outputs: Tensors) -> None:
        """Send the answer. Any exception raised here goes to ``refuse``."""

    @abstractmethod
    def send_error(self, error: Exception) -> None:
        """Send an error in place of the answer."""

    def submit(self, prepared: PreparedRequest, tensors: Tensors) -> None:
        """Submit a request to its version's batcher. Raises OverloadError if the queue is full."""
        served, parameters = prepared.served, prepared.request.parameters
        self._served, self.model, self.version = served, prepared.request.model, served.version
        self._queued = served.batcher.submit(
            tensors, prepared.rows, prepared.shape, self, parameters.priority, parameters.timeout_s, self.trace
        )

    def refuse(self, error: Exception) -> None:
        """Count the request, and send the error."""
        self.count(error)
        self.send_error(error)

    def leave(self) -> None:
        """Free its slot and its room. A request without an answer was given up, and will not run."""
        if not self._is_counted:
            self.count(_GIVEN_UP)
        if self._served and self._queued and not self._is_done:
            self._is_done = True
            self._served.batcher.cancel(self._queued)
        # These are cycles. Only the garbage collector would free the request's body.
        self._queued = self._diagnosis = None
        super().leave()

    def done(self) -> bool:
        return self._is_done

    def set_result(self, outputs: Tensors, /) -> None:
        # Done and counted before the answer is written, because writing takes time of its own.
        self._is_done = True
        self._record_latency()
        assert self._served is not None
        self._served.record_answer()
        self._queued = None  # so that the request's tensors are freed while its answer is sent
        try:
            self.send_answer(outputs)
        except Exception as error:
            self.refuse(error)

    def set_exception(self, error: Exception, /) -> None:
        self._is_done = True
        if isinstance(error, EngineError):
            # Find out first whether the engine is broken, or only this request is bad.
            self._diagnosis = asyncio.get_running_loop().create_task(self._diagnose(error))
            return
        if isinstance(error, DeadlineError):
            self._record_latency()
        self.refuse(error)

    async def _diagnose(self, error: EngineError) -> None:
        assert self._served is not None
        try:
            reported: Exception = await self._served.diagnose(error)
        except Exception as worse:
            reported = worse
        self.refuse(reported)

    def _record_latency(self) -> None:
        assert self._served is not None
        assert self._queued is not None
        self._served.latencies.add(time.monotonic() - self._queued.arrived_s)


def admitted(
    receive: Receive, call: InferenceCall, headers: Mapping[str, str], max_bytes: int, takes_slot: bool
) -> Receive:
    """Return a ``receive`` that takes room for a body as it arrives, for at most ``max_bytes``.

    A body that has arrived takes the room of what it may inflate to, and then may take a slot.
    """
    received, has_arrived = 0, False

    async def receive_admitted() -> Message:
        nonlocal received, has_arrived
        # The body has arrived, so this waits for the client to disconnect.
        if has_arrived:
            return await receive()
        message = await _next_part(receive, call)
        received += len(message.get("body", b""))
        has_arrived = message["type"] == "http.request" and not message.get("more_body")
        call.hold(min(received * (_inflation(headers) if has_arrived else 1), max_bytes))
        if has_arrived and takes_slot:
            call.enter()
        return message

    return receive_admitted


async def _next_part(receive: Receive, call: InferenceCall) -> Message:
    """Wait for the next part of a body. Raises OverloadError if the body was given up for others."""
    wait = asyncio.timeout(None)
    try:
        async with wait:
            call.await_body(lambda: wait.reschedule(0))
            return await receive()
    except TimeoutError:
        raise call.too_slow() from None
    finally:
        call.arrived()


def _inflation(headers: Mapping[str, str]) -> int:
    """Return the factor by which a body may expand.

    It is the worst case, because the real factor is known only after the memory is used.
    """
    encoding = headers.get("content-encoding")
    return MAX_INFLATION if encoding and is_compressed(encoding) else 1
