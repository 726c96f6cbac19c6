"""Batches requests into calls of an engine."""

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from threading import Lock

from app.errors import OverloadError
from app.serving.batching.groups import Answer, BatchingPolicy, Group, QueuedRequest
from app.serving.batching.release import Hold, RequestBatch
from app.serving.batching.scheduler import Scheduler
from app.serving.batching.spans import BatchSpans
from app.serving.batching.statistics import BatchingStatistics, ComputeTime, FailureReason
from app.serving.batching.threads import Alarm, CallResult, CallSource, Check, EngineThreads, Infer, Slots, call
from app.telemetry.tracing import RequestTrace, current_request
from app.tensors import Tensors, count_rows, shape_key, slice_rows

_UNMEASURED_RETRY_S = 1.0
"""Advice to a refused client while no call has ended yet."""
_MAX_ON_LOOP_S = 0.3e-3
"""A call that is expected to be shorter runs on the event loop. Handing one to a thread and back takes 0.1 ms."""


class Batcher:
    """Batch the waiting requests into one call whenever a slot of the engine is free.

    Requests arrive and are answered on one event loop. A slot is a thread that takes its next call itself, so a busy
    engine never waits for the loop. Arrivals of one turn of the loop are batched even if the engine is idle. The loop
    starts that call, and runs it itself if it is short.
    """

    def __init__(
        self,
        infer: Infer,
        policy: BatchingPolicy,
        slots: int = 1,
        *,
        check: Check = lambda _: None,
        max_on_loop_s: float = _MAX_ON_LOOP_S,
        span_attributes: Mapping[str, str] | None = None,
        threads: Callable[[CallSource, Infer, Check, int], Slots] = EngineThreads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a batcher. It belongs to the event loop that uses it first.

        Args:
            infer: runs one batch of 1 to ``policy.max_batch_size`` rows; called from ``slots`` threads at once.
            slots: concurrent calls, the engine's streams.
            check: checks the answer of a call and, if that raises, of each of its requests, which fail with its error.
            max_on_loop_s: calls that are expected to take less run on the event loop.
            span_attributes: name the model in the spans of batches.
            threads: creates the slots that run the other calls.
            clock: returns seconds.
        """
        self._policy = policy
        self._infer = infer
        self._check = check
        self._max_on_loop_s = max_on_loop_s
        self._clock = clock
        self._lock = Lock()
        # The lock guards the scheduler. Only the event loop uses what follows.
        self._scheduler = Scheduler(policy, slots)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._statistics = BatchingStatistics()
        self._numbers = count()
        self._unanswered = 0
        self._spans = BatchSpans(span_attributes or {})
        self._waking = False
        self._alarm = Alarm(self._expire)
        self._drained = asyncio.Event()

        # This is last, because the threads ask for calls at once.
        self._slots = threads(self, infer, check, slots)

    @property
    def statistics(self) -> BatchingStatistics:
        """The live counters."""
        return self._statistics

    @property
    def waiting(self) -> int:
        """The number of requests with rows that are in no call yet."""
        return self._scheduler.queue.requests

    @property
    def in_flight(self) -> int:
        """Requests that were admitted and are not answered yet."""
        return self._unanswered

    @property
    def running_s(self) -> float:
        """The time for which the oldest running call has run; 0 if the engine is free."""
        with self._lock:
            return self._scheduler.running_s(self._clock())

    async def infer(self, tensors: Tensors, *, priority: int = 0, timeout_s: float | None = None) -> Tensors:
        """Run the rows of one request, batched with other requests where possible.

        Once a call has begun for it, a request is answered even if it is late. Cancelling frees its place at once.

        Args:
            tensors: one row or more. A request with more rows than a call takes is split, and its answer reassembled.
            priority: 1 is the most urgent; 0 and unknown levels mean the default.
            timeout_s: time until the answer, from now on.

        Raises:
            RequestError: the tensors differ in their number of rows.
            OverloadError: the queue is full, or the batcher closed.
            DeadlineError: the engine could not start the request in time.
            Exception: the error of the engine for this request alone, or of ``check`` for its answer.
        """
        answer: asyncio.Future[Tensors] = asyncio.get_running_loop().create_future()
        trace = current_request()
        request = self.submit(tensors, count_rows(tensors), shape_key(tensors), answer, priority, timeout_s, trace)
        try:
            return await answer
        except asyncio.CancelledError:
            # If the answer came in the same turn of the loop, the request is counted already.
            if answer.cancelled():
                self.cancel(request)
            raise
        finally:
            # They refer to an error, whose traceback refers to this frame.
            del answer, request

    def submit(
        self,
        tensors: Tensors,
        rows: int,
        shape: Hashable,
        answer: Answer,
        priority: int = 0,
        timeout_s: float | None = None,
        trace: RequestTrace | None = None,
    ) -> QueuedRequest:
        """Queue a request, as ``infer`` does, and deliver its answer to ``answer``.

        Args:
            rows, shape: the results of ``count_rows`` and ``shape_key`` for ``tensors``.

        Raises:
            OverloadError: the queue is full, or the batcher closed.
        """
        now_s, policy = self._clock(), self._policy
        with self._lock:
            group = self._scheduler.queue.group(shape, tensors)
            self._check_room(group, now_s)
            request = QueuedRequest(
                tensors,
                rows,
                policy.level(priority),
                next(self._numbers),
                now_s,
                policy.deadline_s(now_s, timeout_s),
                group,
                answer,
                trace=trace,
            )
            self._scheduler.put(request)
            expiry_s, has_work = self._scheduler.expiry_s, self._scheduler.has_work

        self._unanswered += 1
        self._spans.traced += trace is not None
        self._alarm.set(expiry_s, now_s)
        # If every slot is busy, an engine's thread takes the request when its call ends.
        if has_work:
            self._start_soon()
        return request

    def cancel(self, request: QueuedRequest) -> None:
        """Drop a request whose client has gone. Its ``answer`` must be done already."""
        with self._lock:
            self._scheduler.remove(request)
        self._count_failure(request, FailureReason.CANCELLED)
        self._check_drained()

    async def close(self) -> None:
        """Refuse new requests, and return once all admitted ones have been answered."""
        self._scheduler.closing = True
        self._slots.wake()  # one may be held idle for more requests
        # If nothing is open, no answer will set the event.
        self._check_drained()
        await self._drained.wait()
        await self._slots.close()
        self._alarm.cancel()

    def next(self) -> RequestBatch | Hold | None:
        """Implement ``CallSource.next``."""
        with self._lock:
            chosen = self._scheduler.next(self._clock())
            late, self._scheduler.late = self._scheduler.late, []
            has_work = self._scheduler.has_work
        # An engine's thread may be the caller, and only the loop touches answers.
        if late:
            self._call_on_loop(self._refuse_late, late)
        if has_work and isinstance(chosen, RequestBatch):
            self._slots.wake()  # another free one, if there is one
        return chosen

    def ended(self, batch: RequestBatch, outcome: CallResult) -> None:
        """Implement ``CallSource.ended``."""
        # Free the slot here, not on the loop: the thread's next call must not wait for a busy loop.
        self._free_slot(batch, outcome)
        self._call_on_loop(self._answer, batch, outcome)

    def _check_room(self, group: Group, now_s: float) -> None:
        """Raise OverloadError if the queue is full for a group, or the batcher is closed."""
        if self._scheduler.closing:
            raise self._refusal("the model is being unloaded: ask again, or another server", 0.0)
        if self._scheduler.is_full(group):
            waiting, retry_after_s = self.waiting, self._scheduler.backlog_s(now_s) or _UNMEASURED_RETRY_S
            raise self._refusal(f"{waiting} requests wait already: try again in {retry_after_s:.3g} s", retry_after_s)

    def _refusal(self, message: str, retry_after_s: float) -> OverloadError:
        self._statistics.count_failure(FailureReason.REJECTED, 0.0)
        return OverloadError(message, retry_after_s)

    def _start_soon(self) -> None:
        """Start a call once the loop has read all requests that have arrived."""
        if not self._waking:
            self._waking, self._loop = True, asyncio.get_running_loop()
            self._loop.call_soon(self._start)

    def _start(self) -> None:
        self._waking = False
        chosen = self.next()
        if not isinstance(chosen, RequestBatch):
            if chosen is not None:
                self._slots.wake()  # one of them waits until the hold ends
        elif self._runs_on_loop(chosen):
            outcome = call(self._infer, self._check, chosen)
            # The next call starts from the event loop, which reads what has arrived before.
            if self._free_slot(chosen, outcome):
                self._start_soon()
            self._answer(chosen, outcome)
        else:
            self._slots.run(chosen)

    def _runs_on_loop(self, batch: RequestBatch) -> bool:
        # 0 means that no call of this shape was measured yet, so it may be a long one.
        return 0 < batch.group.latency.seconds(batch.rows) < self._max_on_loop_s

    def _free_slot(self, batch: RequestBatch, outcome: CallResult) -> bool:
        """Return whether the free slot may find a call to make."""
        with self._lock:
            if isinstance(outcome.answer, Exception):
                self._scheduler.failed(batch, self._clock())
            else:
                self._scheduler.succeeded(batch, outcome.time.total_s, self._clock())
            return self._scheduler.has_work

    def _call_on_loop(self, function: Callable[..., None], *args: object) -> None:
        """Call a function on the event loop. If the loop is closed, no client waits any more."""
        assert self._loop is not None
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    def _expire(self, due_s: float) -> None:
        """Refuse late requests. The loop's timer may fire a moment early, so ``due_s`` counts as past."""
        now_s = max(self._clock(), due_s)
        with self._lock:
            self._scheduler.expire(now_s)
            late, self._scheduler.late = self._scheduler.late, []
            expiry_s = self._scheduler.expiry_s
        self._alarm.set(expiry_s, now_s)
        self._refuse_late(late)

    def _refuse_late(self, late: Sequence[QueuedRequest]) -> None:
        for request in late:
            self._spans.refused(request)
            self._fail(request, request.deadline_error(self._clock()), FailureReason.DEADLINE)
        self._check_drained()

    def _answer(self, batch: RequestBatch, outcome: CallResult) -> None:
        """Deliver the outcome of a call. If it failed for several requests, the scheduler retries its halves."""
        self._statistics.releases[batch.reason] += 1
        if self._spans.traced:
            self._spans.called(batch, outcome)
        if not isinstance(outcome.answer, Exception):
            self._give_out(batch, outcome.answer, outcome)
        elif len(batch.parts) == 1:
            self._fail(batch.parts[0].request, outcome.answer, FailureReason.ENGINE)
        self._check_drained()

    def _give_out(self, batch: RequestBatch, outputs: Tensors, outcome: CallResult) -> None:
        """Deliver the rows of each request. Count all requests first, because writing to clients takes time."""
        began_s, start = self._clock(), 0
        given: list[tuple[QueuedRequest, Tensors | None]] = []
        for part in batch.parts:
            stop = start + part.rows
            if not part.request.answer.done():
                rows = outputs if len(batch.parts) == 1 else slice_rows(outputs, start, stop)
                if self._passes(part.request, rows, outcome.is_checked):
                    given.append((part.request, part.request.collect(part.start, part.rows, rows)))
            start = stop
        outcome.time.output_s += self._clock() - began_s
        self._statistics.called(batch.rows, outcome.time)
        self._count([request for request, _ in given], outcome.time)
        for request, answer in given:
            if answer is not None and not request.answer.done():
                request.answer.set_result(answer)

    def _count(self, given: Sequence[QueuedRequest], time: ComputeTime) -> None:
        """Count the requests that a call, which took ``time``, has completed."""
        for request in given:
            if request.collected:
                request.collected.compute.add(time)

        # A request that was split has summed the times of its own calls.
        complete = [request for request in given if not request.collected or request.collected.is_complete]
        several = [request.collected for request in complete if request.collected]
        now_s, counted = self._clock(), self._statistics
        counted.answered([now_s - request.arrived_s for request in complete], [request.queue_s for request in complete])
        counted.compute.add(time, len(complete) - len(several))
        for collected in several:
            counted.compute.add(collected.compute)
        counted.inferences += sum([request.rows for request in complete])
        self._unanswered -= len(complete)
        if self._spans.traced:
            self._spans.traced -= sum(request.trace is not None for request in complete)

    def _passes(self, request: QueuedRequest, outputs: Tensors, is_checked: bool) -> bool:
        """Return whether some rows of a request pass the check; if not, refuse it."""
        try:
            if not is_checked:
                self._check(outputs)
        except Exception as error:
            self._fail(request, error, FailureReason.ENGINE)
            return False
        return True

    def _fail(self, request: QueuedRequest, error: Exception, reason: FailureReason) -> None:
        """Refuse a request, and run no more of it. It may be done already, if its client has just gone."""
        with self._lock:
            self._scheduler.remove(request)
        if not request.answer.done():
            request.answer.set_exception(error)
            self._count_failure(request, reason)

    def _count_failure(self, request: QueuedRequest, reason: FailureReason) -> None:
        self._statistics.count_failure(reason, self._clock() - request.arrived_s)
        self._unanswered -= 1
        self._spans.traced -= request.trace is not None

    def _check_drained(self) -> None:
        """Wake ``close`` once no request waits and no call runs."""
        if self._scheduler.closing and not self._unanswered and not self._scheduler.is_running:
            self._drained.set()
