"""Batches requests into calls of an engine: the event loop that requests come on, and the threads that calls run in."""

import asyncio
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Protocol

from app.best_effort import BestEffort
from app.errors import EngineError, OverloadError
from app.serving.batching.scheduler import Answer, BatchingPolicy, Hold, QueuedRequest, RequestBatch, Scheduler
from app.serving.batching.statistics import BatchingStatistics, ComputeTime, FailureReason, ReleaseReason
from app.telemetry.tracing import RequestTrace, current_request
from app.tensors import Tensors, concat_rows, count_rows, shape_key, slice_rows

Infer = Callable[[Tensors], Tensors]
Check = Callable[[Tensors], object]

_MAX_ON_LOOP_S = 1e-3
"""A call that is expected to be shorter runs on the event loop, and delays what else waits there by as much.

Handing one to a thread and back takes 0.1 ms, and more on busy cores: ``benchmarks/serving/RESULTS_TRITON.md``.
"""


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call, and its duration."""

    answer: Tensors | Exception
    time: ComputeTime
    ended_s: float
    """On the clock ``time.monotonic``."""
    is_checked: bool = False
    """Whether the answer passed the check as a whole. If not, some of its rows may pass."""


class CallSource(Protocol):
    """The source of the slots' calls. Any thread may call its methods."""

    def next(self) -> RequestBatch | Hold | None:
        """Start the next call of a free slot. Without one, return when to ask again; None means once woken."""
        ...

    def ended(self, batch: RequestBatch, outcome: CallResult) -> None:
        """Take the outcome of a call."""
        ...


class Slots(Protocol):
    """The slots that run calls, one for each stream of the engine."""

    def wake(self) -> None:
        """Let a free slot ask for its next call."""
        ...

    def run(self, batch: RequestBatch) -> None:
        """Let a free slot run a call that was started for it, and then ask for its next call."""
        ...

    async def close(self) -> None:
        """Ask for no more calls."""
        ...


def call(infer: Infer, check: Check, batch: RequestBatch) -> CallResult:
    """Run a batch in one call, and check its answer.

    Nothing is raised. The result contains the error of ``infer``, or an EngineError if the number of rows is wrong.
    """
    # All three are set, because a failed call has a time, too.
    began_s = batched_s = inferred_s = time.perf_counter()
    try:
        inputs = concat_rows([part.tensors for part in batch.parts])
        batched_s = time.perf_counter()
        try:
            outputs = _run(infer, inputs)
        finally:
            inferred_s = time.perf_counter()
        _check_rows(outputs, batch.rows)
    except Exception as error:  # the batcher passes it to the requests
        return CallResult(error, ComputeTime(batched_s - began_s, inferred_s - batched_s), time.monotonic())
    is_checked = False
    with suppress(Exception):  # the batcher checks the rows of each request
        check(outputs)
        is_checked = True
    time_taken = ComputeTime(batched_s - began_s, inferred_s - batched_s, time.perf_counter() - inferred_s)
    return CallResult(outputs, time_taken, time.monotonic(), is_checked)


def _run(infer: Infer, inputs: Tensors) -> Tensors:
    try:
        return infer(inputs)
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        # KeyboardInterrupt and the like would end the event loop, and its futures refuse a StopIteration.
        raise EngineError(f"the engine failed on a batch: it raised {type(error).__name__}").of(
            "engine.fails"
        ) from error


def _check_rows(outputs: Tensors, rows: int) -> None:
    for name, output in outputs.items():
        if output.shape[:1] != (rows,):
            raise EngineError(
                f"output {name!r} has shape {list(output.shape)} for {rows} rows: expected {rows} first"
            ).of("engine.rows")


class EngineThreads:
    """One thread per slot. A thread takes its next call itself, so the event loop need not be free for that."""

    def __init__(self, calls: CallSource, infer: Infer, check: Check, slots: int) -> None:
        self._calls = calls
        self._infer = infer
        self._check = check
        self._closed = False
        # This queue is several times as fast as a condition.
        self._wakes: SimpleQueue[RequestBatch | None] = SimpleQueue()
        # Daemons: a call that never returns must not keep a replica's process alive.
        self._threads = [Thread(target=self._run, name=f"engine-{slot}", daemon=True) for slot in range(slots)]
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        if self._wakes.qsize() < len(self._threads):
            # Otherwise every thread will ask again anyway.
            self._wakes.put(None)

    def run(self, batch: RequestBatch) -> None:
        self._wakes.put(batch)

    async def close(self) -> None:
        """End the threads, which run no calls now. A thread that stayed would keep its model in memory."""
        # First the flag, then the wakes: a thread that wakes has to see it.
        self._closed = True
        for _ in self._threads:
            self.wake()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _run(self) -> None:
        chosen: RequestBatch | Hold | None = None
        while not self._closed:
            if isinstance(chosen, RequestBatch):
                # This frees the slot, so that ``next`` may fill it again.
                self._calls.ended(chosen, call(self._infer, self._check, chosen))
                chosen = self._calls.next()
            else:
                chosen = self._wait(chosen) or self._calls.next()

    def _wait(self, hold: Hold | None) -> RequestBatch | None:
        """Return the call that the slot was given; None if the slot has to ask for one."""
        with suppress(Empty):
            return self._wakes.get(timeout=max(0.0, hold.until_s - time.monotonic()) if hold else None)
        return None


class Alarm:
    """A timer on the event loop that fires once, at the earliest of the times that were set."""

    def __init__(self, ring: Callable[[float], None]) -> None:
        """Call ``ring`` with the time that was set."""
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = math.inf

    def set(self, due_s: float, now_s: float) -> None:
        """Ring at ``due_s``, unless the alarm rings before."""
        if due_s >= self._due_s:
            return
        self.cancel()
        self._due_s = due_s
        # The delay is a difference, because the clock of the batcher need not be the loop's.
        self._timer = asyncio.get_running_loop().call_later(due_s - now_s, self._on_timer)

    def cancel(self) -> None:
        """Forget the time that was set."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due_s = None, math.inf

    def _on_timer(self) -> None:
        due_s, self._timer, self._due_s = self._due_s, None, math.inf
        self._ring(due_s)


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
        self._has_failed = False
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
            try:
                group = self._scheduler.room_for(shape, tensors, now_s)
            except OverloadError:
                self._statistics.count_failure(FailureReason.REJECTED, 0.0)
                raise
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
        # After a failed call, an engine may have to load its model again. 0 means that no call of this shape was
        # measured yet, so it may be a long one.
        return not self._has_failed and 0 < batch.group.latency.seconds(batch.rows) < self._max_on_loop_s

    def _free_slot(self, batch: RequestBatch, outcome: CallResult) -> bool:
        """Return whether the free slot may find a call to make."""
        with self._lock:
            self._has_failed = isinstance(outcome.answer, Exception)
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


class BatchSpans:
    """Makes the spans of a batcher. If that fails, its requests are answered all the same."""

    def __init__(self, attributes: Mapping[str, str]) -> None:
        """``attributes`` of each batch name the model."""
        self._attributes = attributes
        self._try = BestEffort("spans cannot be made", "serving")
        self.traced = 0
        """Traced requests that are not answered yet."""

    def called(self, batch: RequestBatch, outcome: CallResult) -> None:
        """Make the spans of a call that has ended, if a traced request is in it."""
        traces = [part.request.trace for part in batch.parts if part.request.trace]
        if not traces:
            return
        for part in batch.parts:
            # A retry's requests got the span of their queue with the failed call.
            if part.request.trace and part.start == 0 and batch.reason is not ReleaseReason.RETRY:
                self._try(partial(_record_queue, part.request, part.request.queue_s))
        self._try(partial(self._record_call, batch, outcome, traces))

    def refused(self, request: QueuedRequest) -> None:
        """Make the span of a request that was refused late, if it is traced and no call has begun for it."""
        if request.trace and not request.queue_s:
            self._try(partial(_record_queue, request, time.monotonic() - request.arrived_s))

    def _record_call(self, batch: RequestBatch, outcome: CallResult, traces: Sequence[RequestTrace]) -> None:
        """Make a span of the batch with links to all requests, and one of the engine in it.

        The batch belongs to the trace of its first traced request.
        """
        # Imported here, because opentelemetry is in the optional extra ``tracing``.
        from opentelemetry.trace import Link, StatusCode, set_span_in_context

        # A call has one point in time, its end, and three durations. Work back from the end.
        inferred_s = outcome.ended_s - outcome.time.output_s
        engine_s = inferred_s - outcome.time.infer_s
        tracer = traces[0].tracer
        span = tracer.start_span(
            "batch",
            set_span_in_context(traces[0].span),
            attributes={**self._attributes, "rows": batch.rows, "reason": batch.reason},
            links=[Link(trace.span.get_span_context()) for trace in traces],
            start_time=_moment_ns(engine_s - outcome.time.input_s),
        )
        engine = tracer.start_span("engine", set_span_in_context(span), start_time=_moment_ns(engine_s))
        if isinstance(outcome.answer, Exception):
            engine.set_status(StatusCode.ERROR, str(outcome.answer))
        engine.end(_moment_ns(inferred_s))
        span.end()


def _record_queue(request: QueuedRequest, waited_s: float) -> None:
    """Make the span of a request's time in the queue."""
    from opentelemetry.trace import set_span_in_context

    assert request.trace is not None
    arrived_ns = _moment_ns(request.arrived_s)
    span = request.trace.tracer.start_span("queue", set_span_in_context(request.trace.span), start_time=arrived_ns)
    span.end(arrived_ns + round(waited_s * 1e9))


def _moment_ns(monotonic_s: float) -> int:
    """Return a time of the clock ``time.monotonic``, which the batcher has, as nanoseconds since 1970."""
    return time.time_ns() - round((time.monotonic() - monotonic_s) * 1e9)
