"""The settings of batching, requests that wait for the engine by shape, and the latencies that are learnt from them."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from app.errors import DeadlineError
from app.serving.batching.statistics import ComputeTime
from app.telemetry.tracing import RequestTrace
from app.tensors import Tensors, concat_rows

_RECENT_CALLS = 16
"""A call of this age, in calls, weighs a third of the newest."""
_SETTLED = 8
"""The number of calls after which outliers can be recognized."""
_OUTLIER = 4.0
"""Limit on a call, as a multiple of its expected time, plus 1 ms. Longer calls mean that the machine was busy."""
_MIN_VARIANCE = 1e-3
"""Below this variance of rows, calls have one size and tell nothing about the cost of a row."""


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


_RECENT = 8
"""A gap of this age, in gaps, weighs a third of the newest."""


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
            self.gap_s += (min(now_s - self.since_s, self._max_gap_s) - self.gap_s) / _RECENT
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
