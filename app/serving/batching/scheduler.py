"""Chooses the next call of a free slot, from the requests that wait, and the calls that run or have run.

From the bottom up: the settings of batching, what is learnt of latencies and arrivals, and the requests that wait, by
shape. ``release`` decides for one shape which requests a call takes, and whether it starts now. ``Scheduler`` keeps all
of this. Nothing here knows threads or the event loop.
"""

import math
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

from app.errors import DeadlineError, OverloadError
from app.serving.batching.statistics import ComputeTime, ReleaseReason
from app.telemetry.tracing import RequestTrace
from app.tensors import Tensors, concat_rows, slice_rows

_RECENT_CALLS = 16
"""A call of this age, in calls, weighs a third of the newest."""
_SETTLED = 8
"""The number of calls after which outliers can be recognized."""
_OUTLIER = 4.0
"""Limit on a call, as a multiple of its expected time, plus 1 ms. Longer calls mean that the machine was busy."""
_MIN_VARIANCE = 1e-3
"""Below this variance of rows, calls have one size and tell nothing about the cost of a row."""
_RECENT_GAPS = 8
"""A gap of this age, in gaps, weighs a third of the newest."""
_MIN_HOLD_S = 0.1e-3
"""The minimum hold of a free slot: waking its thread takes as long."""
_UNMEASURED_RETRY_S = 1.0
"""Advice to a refused client while no call has ended yet."""
_MAX_GROUPS = 64
"""The number of shapes whose latency is remembered while none of their requests waits."""


@dataclass(frozen=True)
class RowsByLength:
    """The maximum rows of a call, by their length."""

    input: str
    axis: int
    """The size of ``input`` along this axis is the length."""
    sizes: tuple[tuple[int, int], ...]
    """Pairs of a length and its maximum rows, shortest length first."""

    def max_rows(self, length: int) -> int:
        """Return the maximum rows of a call.

        A length that is not listed counts as the next longer one. Beyond the longest, it counts as the longest.
        """
        return next((rows for longest, rows in self.sizes if length <= longest), self.sizes[-1][1])


@dataclass(frozen=True)
class BatchingPolicy:
    """The policy for combining waiting requests into calls, with the settings of Triton's dynamic batcher.

    Raises:
        ValueError: a number is out of its range; it is named.
    """

    max_batch_size: int
    """The maximum rows of a call."""
    preferred_batch_sizes: tuple[int, ...] = ()
    """Numbers of rows at which a call does not wait for more. Rows beyond the largest are left for the next call."""
    max_queue_delay_s: float = 0.0
    """The maximum time that a free engine holds a request back for others to share its call."""
    priority_levels: int = 1
    """Level 1 is the most urgent. Less urgent requests run only with or after all more urgent ones."""
    default_priority: int = 1
    """The level of a request without a priority."""
    queue_limit: int = 256
    """The maximum number of waiting requests. Further ones are refused."""
    default_timeout_s: float | None = None
    """Limit on the time from arrival to answer. A request may ask for less, not for more. None: no limit."""
    by_length: RowsByLength | None = None
    """The maximum rows of a call at each length. None: ``max_batch_size`` at every length."""

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "priority_levels", "queue_limit"):
            if (given := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {given}: expected 1 or more")
        if not all(1 <= size <= self.max_batch_size for size in self.preferred_batch_sizes):
            raise ValueError(
                f"preferred_batch_sizes are {list(self.preferred_batch_sizes)}: expected 1 to max_batch_size, "
                f"{self.max_batch_size}"
            )
        if self.by_length and not all(1 <= rows <= self.max_batch_size for _, rows in self.by_length.sizes):
            raise ValueError(
                f"rows in by_length are {dict(self.by_length.sizes)}: expected 1 to max_batch_size, "
                f"{self.max_batch_size}"
            )
        if not 1 <= self.default_priority <= self.priority_levels:
            raise ValueError(
                f"default_priority is {self.default_priority}: expected 1 to priority_levels, {self.priority_levels}"
            )
        if not 0 <= self.max_queue_delay_s < math.inf:
            raise ValueError(f"max_queue_delay_s is {self.max_queue_delay_s}: expected 0 or more")
        if self.default_timeout_s is not None and not self.default_timeout_s > 0:
            raise ValueError(f"default_timeout_s is {self.default_timeout_s}: expected more than 0, or None")

    def max_rows(self, tensors: Tensors) -> int:
        """Return the maximum rows of a call for requests with the shape of these tensors."""
        if self.by_length is None:
            return self.max_batch_size
        return self.by_length.max_rows(tensors[self.by_length.input].shape[self.by_length.axis])

    @property
    def full_batches(self) -> tuple[tuple[int | None, int], ...]:
        """Pairs of a length and the rows of a full call; None stands for the longest length."""
        if self.by_length is None:
            return ((None, self.max_batch_size),)
        *shorter, (_, rows) = self.by_length.sizes
        return (*shorter, (None, rows))

    def level(self, priority: int) -> int:
        """Return the level of a request: the default for 0 and for unknown levels, as in Triton."""
        return priority if 1 <= priority <= self.priority_levels else self.default_priority

    def deadline_s(self, arrived_s: float, timeout_s: float | None) -> float:
        """Return the deadline of a request: the earlier of its own and the server's; inf without either."""
        timeouts = [timeout for timeout in (timeout_s, self.default_timeout_s) if timeout is not None]
        return arrived_s + min(timeouts, default=math.inf)


class LatencyModel:
    """Model of a call's latency: n rows take ``row_s * n + call_s`` seconds. Learnt from recent calls.

    This is least squares with exponential weights. Only mean, variance and covariance are kept, so that an update takes
    constant time. Neither number is negative. Until calls differ in size, a row is assumed to cost nothing.
    """

    def __init__(self) -> None:
        self.row_s = 0.0
        self.call_s = 0.0
        self._calls = 0
        self._mean_rows = 0.0
        self._mean_s = 0.0
        self._variance = 0.0
        self._covariance = 0.0

    def seconds(self, rows: int) -> float:
        """Return the expected time of a call; 0 before the first call."""
        return self.row_s * rows + self.call_s

    def seconds_in_calls(self, rows: int, max_rows: int) -> float:
        """Return the expected time of ``rows`` in consecutive calls of at most ``max_rows``."""
        return self.row_s * rows + self.call_s * math.ceil(rows / max_rows)

    def observe(self, rows: int, seconds: float) -> None:
        """Update the model with a call."""
        if self._calls >= _SETTLED:
            # Clip instead of dropping, so that an engine that became slower for good is still learnt.
            seconds = min(seconds, _OUTLIER * self.seconds(rows) + 1e-3)
        self._calls += 1
        # The exponentially weighted mean, variance and covariance, updated incrementally.
        # The first 16 calls have equal weights. After that, old calls fade.
        weight = 1 / min(self._calls, _RECENT_CALLS)
        more_rows, more_s = rows - self._mean_rows, seconds - self._mean_s
        self._mean_rows += weight * more_rows
        self._mean_s += weight * more_s
        self._variance = (1 - weight) * (self._variance + weight * more_rows * more_rows)
        self._covariance = (1 - weight) * (self._covariance + weight * more_rows * more_s)
        # Calls of one size say nothing about a row's cost, so the last slope stays.
        slope = self._covariance / self._variance if self._variance > _MIN_VARIANCE else self.row_s
        # The upper limit keeps ``call_s``, the intercept, from becoming negative.
        self.row_s = min(max(slope, 0.0), self._mean_s / self._mean_rows)
        self.call_s = self._mean_s - self.row_s * self._mean_rows


class Arrivals:
    """Model of the arrivals of one shape: the expected time until the next request, while a slot of the engine is free.

    Clients tend to ask again soon after an answer, so after a call as many requests are expected as it answered. The
    gap is the mean time until the next expected request, from when a slot becomes free or from the last arrival since
    then. It is measured even if the slot does not wait, so it shows what waiting would have gained.
    """

    def __init__(self, max_gap_s: float) -> None:
        """Start without observations.

        Args:
            max_gap_s: the initial gap. Longer gaps count as this one, so that a pause is soon forgotten.
        """
        self.expected = 0
        self.gap_s = max_gap_s
        self.since_s: float | None = None
        """The time since which the next expected request is awaited; None if it is not."""
        self._max_gap_s = max_gap_s

    def answered(self, requests: int) -> None:
        """Expect as many requests as a call has answered."""
        self.expected = requests

    def slot_free(self, now_s: float) -> None:
        """Start to measure the gap, because the engine could run the waiting requests now."""
        if self.expected and self.since_s is None:
            self.since_s = now_s

    def arrived(self, now_s: float) -> None:
        """Record an arrival."""
        if self.expected:
            self.expected -= 1
        # Only the first arrival after a slot became free ends a gap. The next gap starts when a slot is free again.
        if self.since_s is not None:
            self.gap_s += (min(now_s - self.since_s, self._max_gap_s) - self.gap_s) / _RECENT_GAPS
            self.since_s = None


class Answer(Protocol):
    """The receiver of a request's answer, such as a future. The batcher calls it on the event loop."""

    def done(self) -> bool:
        """Return whether nobody waits any more. Any thread may call this."""
        ...

    def set_result(self, outputs: Tensors, /) -> None:
        """Take the outputs of all rows. They may be views of the outputs of a whole call."""
        ...

    def set_exception(self, error: Exception, /) -> None:
        """Take the error that replaces the answer."""
        ...


@dataclass(slots=True)
class Collected:
    """The partial answer to a request that takes several calls."""

    missing: int
    """The number of rows without outputs."""
    outputs: dict[int, Tensors] = field(default_factory=dict)
    """Outputs by their first row in the request."""
    compute: ComputeTime = field(default_factory=ComputeTime)

    @property
    def is_complete(self) -> bool:
        """Whether all rows have outputs."""
        return not self.missing

    @property
    def answer(self) -> Tensors:
        """The outputs of all rows, in order."""
        return concat_rows([self.outputs[start] for start in sorted(self.outputs)])


# Compared by identity, because ``deque.remove`` must not compare tensors.
@dataclass(slots=True, eq=False)
class QueuedRequest:
    """An admitted request. Times are in seconds of the batcher's clock."""

    tensors: Tensors
    rows: int
    level: int
    number: int
    arrived_s: float
    deadline_s: float
    group: "Group"
    answer: Answer
    scheduled: int = 0
    """The number of its rows that are in calls already."""
    queue_s: float = 0.0
    collected: Collected | None = None
    """The partial answer, if the request takes several calls and one has ended."""
    trace: RequestTrace | None = None
    """None, unless the request is traced."""

    @property
    def is_waiting(self) -> bool:
        """Whether some of its rows are in no call yet."""
        return self.scheduled < self.rows

    def collect(self, start: int, rows: int, outputs: Tensors) -> Tensors | None:
        """Add the outputs of the rows from ``start`` on. Return the outputs of all rows once they are complete."""
        # The usual case: one call took the whole request, so nothing is copied.
        if rows == self.rows:
            return outputs
        if self.collected is None:
            self.collected = Collected(self.rows)
        self.collected.outputs[start] = outputs
        self.collected.missing -= rows
        return self.collected.answer if self.collected.is_complete else None

    def deadline_error(self, now_s: float) -> DeadlineError:
        """Return the error of a request that cannot be answered in time."""
        waited_s, allowed_s = now_s - self.arrived_s, max(0.0, self.deadline_s - self.arrived_s)
        return DeadlineError(
            f"the request waited for {waited_s:.3g} s and cannot be answered within {allowed_s:.3g} s of its arrival: "
            "try again later, or allow more time"
        )


class Group:
    """The waiting requests of one shape, which can share a call."""

    def __init__(self, policy: BatchingPolicy, max_rows: int) -> None:
        self.max_rows = max_rows
        """The maximum rows of a call."""
        self.rows = 0
        """Rows of waiting requests that are in no call yet."""
        self.latency = LatencyModel()
        # Above the longest hold, so that a new shape is not held back before gaps were measured.
        self.arrivals = Arrivals(max_gap_s=4 * policy.max_queue_delay_s)
        self.levels: list[deque[QueuedRequest]] = [deque() for _ in range(policy.priority_levels)]

    def __iter__(self) -> Iterator[QueuedRequest]:
        """Iterate over the waiting requests by level, then by age."""
        for level in self.levels:
            yield from level

    @property
    def head(self) -> QueuedRequest | None:
        """The next request; None if none waits."""
        return next(iter(self), None)

    @property
    def requests(self) -> int:
        """The number of waiting requests."""
        return sum(map(len, self.levels))


class Part(NamedTuple):
    """Rows of a request, from ``start`` to before ``stop``, in one call."""

    request: QueuedRequest
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def tensors(self) -> Tensors:
        """The inputs."""
        whole = self.rows == self.request.rows
        return self.request.tensors if whole else slice_rows(self.request.tensors, self.start, self.stop)


@dataclass(frozen=True, eq=False)
class RequestBatch:
    """One call of the engine."""

    group: Group
    parts: Sequence[Part]
    reason: ReleaseReason

    @cached_property
    def rows(self) -> int:
        return _rows(self.parts)


@dataclass(frozen=True)
class Hold:
    """Nothing runs before ``until_s``, unless a request arrives."""

    until_s: float


@dataclass(frozen=True)
class GiveUp:
    """Requests that cannot be answered in time without making others late."""

    requests: Sequence[QueuedRequest]


def release(group: Group, policy: BatchingPolicy, now_s: float, hold_until_s: float) -> RequestBatch | Hold | GiveUp:
    """Decide what a free slot does for a group with waiting requests.

    A call takes as many rows as it may, from the most urgent and oldest requests first. A request that does not fit as
    a whole contributes the rows that fit. If preferred sizes are set, a call that is not full ends at the largest
    preferred size that whole requests add up to.

    Args:
        hold_until_s: time until which the slot may be kept idle if that pays; -inf if it may not.
    """
    parts, reason = _gather(group, policy)
    ends_s = now_s + group.latency.seconds(_rows(parts))
    deadline_s = min(part.request.deadline_s for part in parts)
    # A single request runs even if it seems too late, so that the latency model notices a faster engine.
    if ends_s > deadline_s and len(parts) > 1:
        return _in_time(group, now_s, parts)
    if reason is not None:
        return RequestBatch(group, parts, reason)
    until_s = _pays_until_s(group, len(parts), hold_until_s)
    if until_s <= now_s:
        held = -math.inf < hold_until_s <= now_s
        return RequestBatch(group, parts, ReleaseReason.DELAY if held else ReleaseReason.IDLE)
    # A hold must not make the call itself late.
    if until_s - now_s + ends_s > deadline_s:
        return RequestBatch(group, parts, ReleaseReason.DEADLINE)
    return Hold(until_s)


def _gather(group: Group, policy: BatchingPolicy) -> tuple[list[Part], ReleaseReason | None]:
    """Return the parts of the next call, and the reason not to wait for more, if there is one."""
    parts: list[Part] = []
    rows = preferred = 0
    for request in group:
        more = min(request.rows - request.scheduled, group.max_rows - rows)
        parts.append(Part(request, request.scheduled, request.scheduled + more))
        rows += more
        if rows == group.max_rows:
            return parts, ReleaseReason.FULL
        if rows in policy.preferred_batch_sizes:
            # The last match is the largest, because rows only grow.
            preferred = len(parts)
    return (parts[:preferred], ReleaseReason.PREFERRED) if preferred else (parts, None)


def _pays_until_s(group: Group, requests: int, hold_until_s: float) -> float:
    """Return the time until which waiting for one more request pays, at most ``hold_until_s``; -inf if it does not.

    Let n requests wait, let a call of r rows take a·r + b, and let the next request come in d seconds, with as many
    rows as the others have on average. Then the engine answers more requests a second with it than without it if

        (n + 1) / (d + a·r (n + 1) / n + b) > n / (a·r + b)        that is        n·d < b

    d is a guess, and waiting requests pay for a wrong one, so the condition demands half of that: 2·n·d < b.
    """
    since_s = group.arrivals.since_s
    if since_s is None:
        return -math.inf
    until_s = min(hold_until_s, since_s + group.latency.call_s / (2 * requests))
    # A shorter hold is over before its thread wakes.
    if until_s - since_s < _MIN_HOLD_S:
        return -math.inf
    return until_s if since_s + group.arrivals.gap_s < until_s else -math.inf


def _in_time(group: Group, now_s: float, parts: Sequence[Part]) -> RequestBatch | GiveUp:
    """Decide what to do if a call of all parts would miss a deadline.

    Run the first parts that are in time together, if the others of their level can still be answered in time after
    that. If they cannot, there is more work than time. Smaller and smaller calls that suit the oldest requests would
    answer fewer and fewer. So give up the requests with the least time until the others are in time together. This is
    the early drop of Nexus (SOSP 2019). A request that has begun is never given up.
    """
    level = parts[0].request.level
    waiting = sum(request.rows - request.scheduled for request in group.levels[level - 1])
    first = parts[: _count_in_time(group, now_s, parts)]
    ends_s = now_s + group.latency.seconds(_rows(first))
    # Look one call ahead: only the rest that fits into the next call counts.
    rest_s = group.latency.seconds(min(waiting - _rows(first), group.max_rows))
    later = [part.request.deadline_s for part in parts[len(first) :] if part.request.level == level]
    if not later or (first and ends_s + rest_s <= min(later)):
        return RequestBatch(group, first, ReleaseReason.DEADLINE)
    # There is more work than time. Give up requests until one call holds the others in time.
    peers = [part for part in parts if part.request.level == level and not part.request.scheduled]
    peers.sort(key=lambda part: part.request.deadline_s)
    given_up: list[QueuedRequest] = []
    for part in peers[:-1]:  # the last one stays, so that something runs
        if now_s + group.latency.seconds(min(waiting, group.max_rows)) <= part.request.deadline_s:
            break
        given_up.append(part.request)
        waiting -= part.rows
    return GiveUp(given_up) if given_up else RequestBatch(group, parts[:1], ReleaseReason.DEADLINE)


def _count_in_time(group: Group, now_s: float, parts: Sequence[Part]) -> int:
    """Return how many parts, from the first on, fit into a call that ends before their deadlines."""
    rows, deadline_s = 0, math.inf
    for count, part in enumerate(parts):
        rows += part.rows
        deadline_s = min(deadline_s, part.request.deadline_s)
        if now_s + group.latency.seconds(rows) > deadline_s:
            return count
    return len(parts)


def _rows(parts: Sequence[Part]) -> int:
    return sum(part.stop - part.start for part in parts)


class WaitingQueue:
    """The waiting requests by shape, level and arrival."""

    def __init__(self, policy: BatchingPolicy) -> None:
        self._policy = policy
        self._groups: dict[Hashable, Group] = {}
        self.requests = 0

    def __iter__(self) -> Iterator[QueuedRequest]:
        for group in self._groups.values():
            yield from group

    def seconds(self, latency: LatencyModel) -> float:
        """Return the time that all waiting rows take in consecutive calls."""
        return sum(latency.seconds_in_calls(group.rows, group.max_rows) for group in self._groups.values())

    def group(self, shape: Hashable, tensors: Tensors) -> Group:
        """Return the group of ``tensors``, whose shape key is ``shape``. Create the group if it is new."""
        if (group := self._groups.get(shape)) is None:
            if len(self._groups) >= _MAX_GROUPS:
                self._forget()
            group = self._groups[shape] = Group(self._policy, self._policy.max_rows(tensors))
        return group

    def put(self, request: QueuedRequest) -> None:
        """Add a request as the last of its level."""
        request.group.levels[request.level - 1].append(request)
        self.requests += 1
        request.group.rows += request.rows

    def take(self, request: QueuedRequest, rows: int) -> None:
        """Give some rows of a request to a call. With its last row, the request leaves the queue."""
        request.scheduled += rows
        request.group.rows -= rows
        if not request.is_waiting:
            self._leave(request)

    def remove(self, request: QueuedRequest) -> None:
        """Remove a request, if it still waits."""
        if request.is_waiting:
            self.take(request, request.rows - request.scheduled)

    def next(self) -> Group | None:
        """Return the group of the oldest request at the most urgent level; None if none waits."""
        # Numbers rise with arrival, so the smallest is the oldest.
        heads = [head for group in self._groups.values() if (head := group.head)] if self.requests else []
        return min(heads, key=lambda head: (head.level, head.number)).group if heads else None

    def _leave(self, request: QueuedRequest) -> None:
        level = request.group.levels[request.level - 1]
        # Usually the first one leaves. Only a cancelled or late request leaves from the middle.
        if level[0] is request:
            level.popleft()
        else:
            level.remove(request)
        self.requests -= 1

    # If every group has waiting requests, none is dropped. Then the limit of the queue bounds the groups.
    def _forget(self) -> None:
        """Drop the oldest group without waiting requests."""
        for shape, group in self._groups.items():
            if group.head is None:
                del self._groups[shape]
                return


class Scheduler:
    """The waiting requests, the running calls, and the calls to retry.

    The scheduler knows neither threads nor the event loop. Its user holds a lock, and passes the time in seconds.
    """

    def __init__(self, policy: BatchingPolicy, slots: int) -> None:
        self.queue = WaitingQueue(policy)
        self.late: list[QueuedRequest] = []
        """Requests that were dropped because they cannot be answered in time. The caller empties the list."""
        self.closing = False
        """Whether no more requests come. Then none is held back."""
        self.expiry_s = math.inf
        """A time before which no waiting request is late."""
        self._policy = policy
        self._slots = slots
        self._retries: deque[RequestBatch] = deque()
        self._running: dict[RequestBatch, float] = {}  # with their start times
        self._latency = LatencyModel()  # of all shapes
        self._held_s: float | None = None  # the time since which a free slot is kept idle

    @property
    def is_busy(self) -> bool:
        """Whether no slot is free."""
        return len(self._running) >= self._slots

    @property
    def is_running(self) -> bool:
        """Whether any call runs."""
        return bool(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a free slot may find a call to make."""
        return not self.is_busy and bool(self._retries or self.queue.requests)

    def room_for(self, shape: Hashable, tensors: Tensors, now_s: float) -> Group:
        """Return the group that a request joins. Raises OverloadError if the queue is full, or takes no more."""
        if self.closing:
            raise OverloadError("the model is being unloaded: ask again, or another server", 0.0)
        group = self.queue.group(shape, tensors)
        # Requests that a free slot is about to take do not count.
        at_once = 0 if self.is_busy else group.max_rows
        if self.queue.requests >= self._policy.queue_limit + at_once:
            retry_after_s = self.backlog_s(now_s) or _UNMEASURED_RETRY_S
            raise OverloadError(
                f"{self.queue.requests} requests wait already: try again in {retry_after_s:.3g} s", retry_after_s
            )
        return group

    def running_s(self, now_s: float) -> float:
        """Return the time for which the oldest running call has run; 0 if none runs."""
        return max((now_s - started_s for started_s in self._running.values()), default=0.0)

    def backlog_s(self, now_s: float) -> float:
        """Return the time that all running and waiting rows take, as recent calls went; 0 before the first."""
        running = sum(
            max(0.0, self._latency.seconds(batch.rows) - (now_s - started_s))
            for batch, started_s in self._running.items()
        )
        # The slots share the work.
        return (running + self.queue.seconds(self._latency)) / self._slots

    def put(self, request: QueuedRequest) -> None:
        """Add a request that arrives now."""
        request.group.arrivals.arrived(request.arrived_s)
        self.queue.put(request)
        # An early time is enough: ``expire`` finds what is late, and the exact next time.
        self.expiry_s = min(self.expiry_s, self._start_by_s(request))

    def remove(self, request: QueuedRequest) -> None:
        """Run no more of a request. If none waits any more, a held slot becomes idle."""
        self.queue.remove(request)
        if not self.queue.requests:
            self._held_s = None

    def next(self, now_s: float) -> RequestBatch | Hold | None:
        """Start the next call of a free slot.

        Without one, return a hold that tells when to ask again, or None if nothing waits or no slot is free.
        """
        self.expire(now_s)
        # Retries first, because their requests have waited for a whole call already.
        chosen = None if self.is_busy else self._retry(now_s) or self._release(now_s)
        if isinstance(chosen, Hold):
            # Keep the start of a hold: asking again must not extend the delay.
            if self._held_s is None:
                self._held_s = now_s
        elif chosen is not None:
            self._running[chosen] = now_s
            self._held_s = None
        return chosen

    def succeeded(self, batch: RequestBatch, seconds: float, now_s: float) -> None:
        """Free the slot of a call, and learn from its latency."""
        self._free(batch, now_s)
        self._latency.observe(batch.rows, seconds)
        batch.group.latency.observe(batch.rows, seconds)
        # A request that was split counts once, with its last rows.
        batch.group.arrivals.answered(sum(part.stop == part.request.rows for part in batch.parts))

    def failed(self, batch: RequestBatch, now_s: float) -> None:
        """Free the slot of a failed call, and retry its halves. Drop a single request, which has failed."""
        # A failed call says nothing about latency.
        self._free(batch, now_s)
        if len(batch.parts) > 1:
            # Bisect: the request that makes a call fail is found, and all others are answered.
            half = len(batch.parts) // 2
            for parts in (batch.parts[:half], batch.parts[half:]):
                self._retries.append(RequestBatch(batch.group, parts, ReleaseReason.RETRY))
        else:
            self.remove(batch.parts[0].request)

    def expire(self, now_s: float) -> None:
        """Drop requests that can no longer be answered in time.

        While a slot is free, only requests whose deadlines have passed are dropped. The others run anyway, so that the
        latency model notices an engine that has become faster.
        """
        if now_s < self.expiry_s:
            return
        busy = self.is_busy
        # A copy, because dropping a request changes the queue.
        for request in list(self.queue):
            start_by_s = self._start_by_s(request)
            if now_s >= (start_by_s if busy else max(start_by_s, request.deadline_s)):
                self._drop(request)
        self.expiry_s = min(map(self._start_by_s, self.queue), default=math.inf)

    def _free(self, batch: RequestBatch, now_s: float) -> None:
        # Requests expire while the slot still counts as busy, so those that can only be late are dropped, too.
        self.expire(now_s)
        del self._running[batch]

    def _retry(self, now_s: float) -> RequestBatch | None:
        """Return a half of a failed call, without late requests and those that nobody waits for."""
        while self._retries:
            batch = self._retries.popleft()
            # The failed call has taken time, so some of its requests may be late by now.
            for part in batch.parts:
                if part.request.deadline_s <= now_s:
                    self._drop(part.request)
            parts = [part for part in batch.parts if part.request.deadline_s > now_s and not part.request.answer.done()]
            if parts:
                return RequestBatch(batch.group, parts, ReleaseReason.RETRY)
        return None

    def _release(self, now_s: float) -> RequestBatch | Hold | None:
        """Take waiting requests into a call, after dropping cancelled ones and those that are given up."""
        while (group := self.queue.next()) is not None:
            group.arrivals.slot_free(now_s)
            chosen = release(group, self._policy, now_s, self._hold_until_s(group, now_s))
            if isinstance(chosen, GiveUp):
                for request in chosen.requests:
                    self._drop(request)
            elif isinstance(chosen, Hold):
                return chosen
            # Then choose again: without them, other requests may fit, or a hold may pay.
            elif gone := [part.request for part in chosen.parts if part.request.answer.done()]:
                for request in gone:  # cancelled in this turn of the loop
                    self.remove(request)
            else:
                for part in chosen.parts:
                    # A split request has waited until its first call. Its later calls do not count as waiting.
                    if part.start == 0:
                        part.request.queue_s = now_s - part.request.arrived_s
                    self.queue.take(part.request, part.rows)
                return chosen
        return None

    def _hold_until_s(self, group: Group, now_s: float) -> float:
        """Return the time until which a slot may be kept idle for a group; -inf while other groups wait, too."""
        if self.closing or not self._policy.max_queue_delay_s or group.requests < self.queue.requests:
            return -math.inf
        return (now_s if self._held_s is None else self._held_s) + self._policy.max_queue_delay_s

    def _start_by_s(self, request: QueuedRequest) -> float:
        """Return the latest time at which the first call for this request can start, if the request runs alone.

        A request that has begun has no such time: it is answered even if it is late.
        """
        if request.scheduled:
            return math.inf
        return request.deadline_s - request.group.latency.seconds_in_calls(request.rows, request.group.max_rows)

    def _drop(self, request: QueuedRequest) -> None:
        self.remove(request)
        self.late.append(request)
