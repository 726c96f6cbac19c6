"""Requests that wait for the engine, by shape, and the latencies that are learnt from them."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from app.errors import DeadlineError
from app.serving.batching.policy import BatchingPolicy
from app.serving.batching.statistics import ComputeTime
from app.tensors import Tensors, concat_rows

_RECENT_CALLS = 16
"""A call of this age, in calls, weighs a third of the newest."""
_SETTLED = 8
"""The number of calls after which outliers can be recognized."""
_OUTLIER = 4.0
"""Limit on a call, as a multiple of its expected time, plus 1 ms. Longer calls mean that the machine was busy."""
_MIN_VARIANCE = 1e-3
"""Below this variance of rows, calls have one size and tell nothing about the cost of a row."""


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
            seconds = min(seconds, _OUTLIER * self.seconds(rows) + 1e-3)
        self._calls += 1
        # The exponentially weighted mean, variance and covariance, updated incrementally.
        weight = 1 / min(self._calls, _RECENT_CALLS)
        more_rows, more_s = rows - self._mean_rows, seconds - self._mean_s
        self._mean_rows += weight * more_rows
        self._mean_s += weight * more_s
        self._variance = (1 - weight) * (self._variance + weight * more_rows * more_rows)
        self._covariance = (1 - weight) * (self._covariance + weight * more_rows * more_s)
        slope = self._covariance / self._variance if self._variance > _MIN_VARIANCE else self.row_s
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

    @property
    def is_waiting(self) -> bool:
        """Whether some of its rows are in no call yet."""
        return self.scheduled < self.rows

    def collect(self, start: int, rows: int, outputs: Tensors) -> Tensors | None:
        """Add the outputs of the rows from ``start`` on. Return the outputs of all rows once they are complete."""
        if rows == self.rows:
            return outputs
        if self.collected is None:
            self.collected = Collected(self.rows)
        self.collected.outputs[start] = outputs
        self.collected.missing -= rows
        return self.collected.answer if self.collected.is_complete else None

    def deadline_error(self, now_s: float) -> DeadlineError:
        """Return the error of a request that cannot be answered in time."""
        waited_s, allowed_s = now_s - self.arrived_s, self.deadline_s - self.arrived_s
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
