"""Joining requests into calls of an engine."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count

from app.errors import OverloadError
from app.serving.batching.alarm import Alarm
from app.serving.batching.latency import LatencyModel
from app.serving.batching.policy import BatchingPolicy
from app.serving.batching.queue import Group, Request, WaitingQueue
from app.serving.batching.release import Batch, GiveUp, Hold, Part, release
from app.serving.batching.rows import cut, rows_of, shape_of
from app.serving.batching.statistics import BatchingStatistics, ComputeTime, FailureReason, ReleaseReason
from app.serving.batching.threads import EngineThreads, Infer, Outcome, Slots
from app.tensors import Tensors

_UNMEASURED_RETRY_S = 1.0
"""When to come back if no call has ended yet."""
_SHORT_S = 5e-3
"""Between calls that take less, an engine that waits for the event loop, tenths of a millisecond, is idle for much."""


def _will_do(_: Tensors) -> None:
    """Any answer."""


class Batcher:
    """Joins the requests that wait into one call whenever a slot of the engine is free.

    While calls are short, one that is full is given to the slots before: it would be of the same requests a moment
    later, unless an urgent one came, and the engine need not wait for it.

    All of it runs on one event loop, but for the engine's calls, which run in a thread for each slot. Arrivals of one
    turn of the loop are joined even if the engine is idle.
    """

    def __init__(
        self,
        infer: Infer,
        policy: BatchingPolicy,
        slots: int = 1,
        *,
        check: Callable[[Tensors], object] = _will_do,
        threads: Callable[[Infer, int], Slots] = EngineThreads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a batcher, for whichever loop uses it first.

        Args:
            infer: runs one batch; called from ``slots`` threads at once, with 1 to ``policy.max_batch_size`` rows.
            slots: calls that the engine runs at once, its streams.
            check: looks at the answer of each request; what it raises is that request's failure.
            threads: makes what runs ``infer``.
            clock: in seconds.
        """
        self._policy = policy
        self._check = check
        self._clock = clock
        self._threads = threads(infer, slots)
        self._slots = slots
        self._queue = WaitingQueue(policy)
        self._retries: deque[Batch] = deque()
        self._running: dict[Batch, float] = {}  # and when each was started
        self._latency = LatencyModel()  # of all shapes
        self._statistics = BatchingStatistics()
        self._numbers = count()
        self._dispatching = False
        self._held_s: float | None = None  # since when a free slot is kept idle
        self._expiry_s = math.inf  # no request that waits is late before
        self._alarm = Alarm(self._dispatch)
        self._closed = False
        self._drained = asyncio.Event()

    @property
    def statistics(self) -> BatchingStatistics:
        """What was counted so far; it goes on counting."""
        return self._statistics

    @property
    def waiting(self) -> int:
        """Requests of which some rows are in no call yet."""
        return self._queue.requests

    @property
    def running_s(self) -> float:
        """How long the engine has been at work on what it does; 0 if it is free."""
        return max((self._clock() - started_s for started_s in self._running.values()), default=0.0)

    @property
    def backlog_s(self) -> float:
        """How long the engine needs for what runs and what waits, as recent calls went; 0 if none has ended yet."""
        now_s, most = self._clock(), self._policy.max_batch_size
        running = sum(
            max(0.0, self._latency.seconds(batch.rows) - (now_s - started_s))
            for batch, started_s in self._running.items()
        )
        calls, rest = divmod(self._queue.rows, most)
        waiting = calls * self._latency.seconds(most) + (self._latency.seconds(rest) if rest else 0.0)
        return (running + waiting) / self._slots

    async def infer(self, tensors: Tensors, *, priority: int = 0, timeout_s: float | None = None) -> Tensors:
        """Run the rows of one request, together with others where that is possible.

        A request that an engine's call has begun for is answered, be it late. Cancelling gives the place free at once.

        Args:
            tensors: of one row or more; a request with more than a call takes is cut, and its answer joined again.
            priority: 1 is the most urgent; 0 and levels that there are not mean the default.
            timeout_s: until the answer, from now on.

        Raises:
            RequestError: the tensors do not have the same rows.
            OverloadError: the queue is full, or the batcher closed.
            DeadlineError: the engine cannot run the request in time; it has not seen it.
            Exception: what the engine raised for this request alone, or ``check`` for its answer.
        """
        request = self._admit(tensors, priority, timeout_s)
        try:
            return await request.answer
        except asyncio.CancelledError:
            if request.answer.cancelled():
                self._let_go(request)
                self._count_failure(request, FailureReason.CANCELLED)
            raise

    async def close(self) -> None:
        """Refuse new requests, and return when all that were admitted have been answered."""
        self._closed = True
        self._dispatch()
        await self._drained.wait()
        self._threads.close()
        self._alarm.cancel()

    def _admit(self, tensors: Tensors, priority: int, timeout_s: float | None) -> Request:
        if self._closed:
            raise self._refusal("the model is being unloaded: ask again, or another server", 0.0)
        if (waiting := self._queue.requests) >= self._policy.queue_limit:
            retry_after_s = self.backlog_s or _UNMEASURED_RETRY_S
            raise self._refusal(f"{waiting} requests wait already: try again in {retry_after_s:.3g} s", retry_after_s)
        rows, group, now_s = rows_of(tensors), self._queue.group(shape_of(tensors)), self._clock()
        loop = asyncio.get_running_loop()
        request = Request(
            tensors,
            rows,
            self._policy.level(priority),
            next(self._numbers),
            now_s,
            self._policy.deadline_s(now_s, timeout_s),
            group,
            loop.create_future(),
        )
        group.arrivals.arrived(now_s)
        self._queue.put(request)
        self._expiry_s = min(self._expiry_s, self._start_by_s(request))
        if self._is_busy and not self._may_start_ahead:
            self._alarm.set(self._expiry_s, now_s)
        elif not self._dispatching:
            self._dispatching = True
            loop.call_soon(self._dispatch)
        return request

    def _refusal(self, message: str, retry_after_s: float) -> OverloadError:
        self._statistics.failed(FailureReason.REJECTED, 0.0)
        return OverloadError(message, retry_after_s)

    def _dispatch(self, due_s: float = 0.0) -> None:
        """Give every free slot what it should run now. Times until ``due_s`` have come, whatever the clock says."""
        self._dispatching = False
        now_s = max(self._clock(), due_s)
        self._expire(now_s)
        wake_s = math.inf
        while not self._is_busy and (chosen := self._next(now_s)) is not None:
            if isinstance(chosen, Hold):
                wake_s = chosen.until_s
                if self._held_s is None:
                    self._held_s = now_s
                break
            self._start(chosen, now_s)
        if self._may_start_ahead:
            self._start_ahead(now_s)
        self._alarm.set(min(wake_s, self._expiry_s), now_s)
        if self._closed and not (self._running or self._queue.requests or self._retries):
            self._drained.set()

    @property
    def _is_busy(self) -> bool:
        """Whether no slot is free."""
        return len(self._running) >= self._slots

    @property
    def _may_start_ahead(self) -> bool:
        """Whether a call may follow on one that runs without the way to here: one that is full, between short ones."""
        return (
            len(self._running) == self._slots
            and not self._retries
            and self._queue.rows >= self._policy.max_batch_size
            and all(_is_short(batch.group, batch.rows) for batch in self._running)
        )

    def _start_ahead(self, now_s: float) -> None:
        group = self._queue.next()
        if group is not None and _is_short(group, self._policy.max_batch_size):
            chosen = release(group, self._policy, now_s, -math.inf)
            if isinstance(chosen, Batch) and chosen.reason is ReleaseReason.FULL and not _cancelled(chosen):
                self._start(chosen, now_s)

    def _next(self, now_s: float) -> Batch | Hold | None:
        """What a free slot runs, whose rows wait no more; when to ask again; or None if there is nothing."""
        while self._retries:
            batch = self._retries.popleft()
            if parts := [part for part in batch.parts if self._still_wanted(part.request, now_s)]:
                return Batch(batch.group, parts, ReleaseReason.RETRY)
        while (group := self._queue.next()) is not None:
            group.arrivals.slot_free(now_s)
            chosen = release(group, self._policy, now_s, self._hold_until_s(group, now_s))
            if isinstance(chosen, GiveUp):
                for request in chosen.requests:
                    self._fail(request, request.late(now_s), FailureReason.DEADLINE)
            elif isinstance(chosen, Batch) and (gone := _cancelled(chosen)):
                for request in gone:
                    self._let_go(request)
            else:
                return chosen
        return None

    def _hold_until_s(self, group: Group, now_s: float) -> float:
        """How long a slot may be kept idle for a group: not at all while others wait, too."""
        if self._closed or not self._policy.max_queue_delay_s or group.requests < self._queue.requests:
            return -math.inf
        return (now_s if self._held_s is None else self._held_s) + self._policy.max_queue_delay_s

    def _still_wanted(self, request: Request, now_s: float) -> bool:
        if request.deadline_s <= now_s:
            self._fail(request, request.late(now_s), FailureReason.DEADLINE)
        return not request.answer.done()

    def _start(self, batch: Batch, now_s: float) -> None:
        self._statistics.releases[batch.reason] += 1
        self._running[batch] = now_s
        self._held_s = None
        if batch.reason is not ReleaseReason.RETRY:
            for part in batch.parts:
                if part.start == 0:
                    part.request.queue_s = now_s - part.request.arrived_s
                self._queue.take(part.request, part.rows)
        self._threads.start([part.tensors for part in batch.parts], partial(self._finish, batch))

    def _finish(self, batch: Batch, outcome: Outcome) -> None:
        """Free the slot of a call that has ended, and fill it again before the answers are given out."""
        self._expire(self._clock())
        del self._running[batch]
        if not isinstance(outcome.answer, Exception):
            self._learn(batch, outcome.time.total_s)
            self._dispatch()
            self._give_out(batch, outcome.answer, outcome.time)
        elif len(batch.parts) > 1:
            half = len(batch.parts) // 2
            for parts in (batch.parts[:half], batch.parts[half:]):
                self._retries.append(Batch(batch.group, parts, ReleaseReason.RETRY))
            self._dispatch()
        else:
            self._fail(batch.parts[0].request, outcome.answer, FailureReason.ENGINE)
            self._dispatch()

    def _give_out(self, batch: Batch, outputs: Tensors, time: ComputeTime) -> None:
        """Give each request its own rows."""
        began_s, start = self._clock(), 0
        for part in batch.parts:
            stop = start + part.rows
            if not part.request.answer.done():
                part.request.compute.add(time)
                self._answer(part, outputs if len(batch.parts) == 1 else cut(outputs, start, stop), began_s)
            start = stop
        time.output_s += self._clock() - began_s
        self._statistics.batches[batch.rows].add(time)

    def _answer(self, part: Part, outputs: Tensors, began_s: float) -> None:
        """Answer a request if these rows were its last. ``began_s`` is when the batcher began to split the outputs."""
        request = part.request
        answer = request.collect(part.start, part.rows, outputs)
        if answer is None:
            request.compute.output_s += self._clock() - began_s
            return
        try:
            self._check(answer)
        except Exception as error:
            self._fail(request, error, FailureReason.ENGINE)
            return
        request.answer.set_result(answer)
        now_s = self._clock()
        request.compute.output_s += now_s - began_s
        self._statistics.success.add(now_s - request.arrived_s)
        self._statistics.queue.add(request.queue_s)
        self._statistics.compute.add(request.compute)
        self._statistics.inferences += request.rows

    def _fail(self, request: Request, error: Exception, reason: FailureReason) -> None:
        """Give up a request, and the rest of its rows; somebody else may have, or its client gone in this turn."""
        self._let_go(request)
        if not request.answer.done():
            request.answer.set_exception(error)
            self._count_failure(request, reason)

    def _let_go(self, request: Request) -> None:
        """Run no more of a request. A slot that was kept idle for the last that waits is just idle from then on."""
        self._queue.remove(request)
        if not self._queue.requests:
            self._held_s = None

    def _count_failure(self, request: Request, reason: FailureReason) -> None:
        self._statistics.failed(reason, self._clock() - request.arrived_s)

    def _learn(self, batch: Batch, seconds: float) -> None:
        self._latency.observe(batch.rows, seconds)
        batch.group.latency.observe(batch.rows, seconds)
        batch.group.arrivals.answered(sum(part.stop == part.request.rows for part in batch.parts))

    def _start_by_s(self, request: Request) -> float:
        """When a call for this request alone would have to start, at the latest."""
        rows = min(request.rows - request.taken, self._policy.max_batch_size)
        return request.deadline_s - request.group.latency.seconds(rows)

    def _expire(self, now_s: float) -> None:
        """Fail what can no longer be answered in time.

        While a slot is free that is only what is late already: the rest is tried, so that an engine which has become
        faster is noticed.
        """
        if now_s < self._expiry_s:
            return
        busy = self._is_busy
        for request in list(self._queue):
            if now_s >= (self._start_by_s(request) if busy else request.deadline_s):
                self._fail(request, request.late(now_s), FailureReason.DEADLINE)
        self._expiry_s = min(map(self._start_by_s, self._queue), default=math.inf)


def _is_short(group: Group, rows: int) -> bool:
    """Whether a call of so many rows of a shape is known to be."""
    return 0.0 < group.latency.seconds(rows) < _SHORT_S


def _cancelled(batch: Batch) -> list[Request]:
    """Whose tasks were cancelled in this turn of the loop, and have not run since."""
    return [part.request for part in batch.parts if part.request.answer.done()]
