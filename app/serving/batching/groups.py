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
"""A call that is so many calls old weighs a third of the newest."""
_SETTLED = 8
"""Calls after which one can be seen to be an outlier."""
_OUTLIER = 4.0
"""No call counts as more than so many times what was expected, and a millisecond: the machine was busy elsewhere."""
_MIN_VARIANCE = 1e-3
"""Of rows. Below it calls are all of one size and say nothing about what a row costs."""


class LatencyModel:
    """A call of n rows takes ``row_s * n + call_s`` seconds: least squares over calls, exponentially weighted.

    Mean, variance and covariance are kept, so that a call costs the same few operations however many there were.
    Neither number is negative. Until calls differ in size a row is taken to cost nothing.
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
        """What a call of so many rows takes; 0 before the first."""
        return self.row_s * rows + self.call_s

    def seconds_in_calls(self, rows: int, max_rows: int) -> float:
        """Return the time that rows take in consecutive calls of ``max_rows`` at most."""
        return self.row_s * rows + self.call_s * math.ceil(rows / max_rows)

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a call."""
        if self._calls >= _SETTLED:
            seconds = min(seconds, _OUTLIER * self.seconds(rows) + 1e-3)
        self._calls += 1
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
"""A gap that is so many gaps old weighs a third of the newest."""


class Arrivals:
    """The requests of one shape as they come in.

    Whoever was answered tends to ask again soon: after a call, as many requests are expected as it answered. The gap is
    the mean time from when a slot is free, or since then a request has come, until the next of the expected ones. It is
    measured whether the slot waits for it or not, so that it tells what waiting would have brought.
    """

    def __init__(self, max_gap_s: float) -> None:
        """Make it without knowledge.

        Args:
            max_gap_s: what a longer gap counts as, so that a pause is soon forgotten, and the first guess.
        """
        self.expected = 0
        self.gap_s = max_gap_s
        self.since_s: float | None = None
        """Since when the next expected request is awaited."""
        self._max_gap_s = max_gap_s

    def answered(self, requests: int) -> None:
        """A call answered so many requests."""
        self.expected = requests

    def slot_free(self, now_s: float) -> None:
        """The engine could run what waits: with the next expected request, or without it."""
        if self.expected and self.since_s is None:
            self.since_s = now_s

    def arrived(self, now_s: float) -> None:
        """A request came."""
        if self.expected:
            self.expected -= 1
        if self.since_s is not None:
            self.gap_s += (min(now_s - self.since_s, self._max_gap_s) - self.gap_s) / _RECENT
            self.since_s = None


class Answer(Protocol):
    """Who waits for the answer of a request, such as a future. It is told on the event loop."""

    def done(self) -> bool:
        """Whether nobody waits any more; asked by any thread."""
        ...

    def set_result(self, outputs: Tensors, /) -> None:
        """Take the outputs of all rows; they may be views of the outputs of a whole call."""
        ...

    def set_exception(self, error: Exception, /) -> None:
        """Take the reason why there is no answer."""
        ...


@dataclass(slots=True)
class Collected:
    """What calls have given so far for a request that takes several of them."""

    missing: int
    """Rows."""
    outputs: dict[int, Tensors] = field(default_factory=dict)
    """By their first rows."""
    compute: ComputeTime = field(default_factory=ComputeTime)

    @property
    def is_complete(self) -> bool:
        """Whether no row is missing."""
        return not self.missing

    @property
    def joined(self) -> Tensors:
        """The outputs of all rows, in order."""
        return concat_rows([self.outputs[start] for start in sorted(self.outputs)])


@dataclass(slots=True, eq=False)
class Request:
    """One that was admitted. Times are in seconds of the batcher's clock."""

    tensors: Tensors
    rows: int
    level: int
    number: int
    arrived_s: float
    deadline_s: float
    group: "Group"
    answer: Answer
    taken: int = 0
    """Rows that calls were made of."""
    queue_s: float = 0.0
    collected: Collected | None = None
    """Of a request that takes several calls, once one has ended."""

    @property
    def waits(self) -> bool:
        """Whether some of its rows are in no call yet."""
        return self.taken < self.rows

    def collect(self, start: int, rows: int, outputs: Tensors) -> Tensors | None:
        """Keep the outputs of the rows from ``start`` on. Return the outputs of all rows once they are complete."""
        if rows == self.rows:
            return outputs
        if self.collected is None:
            self.collected = Collected(self.rows)
        self.collected.outputs[start] = outputs
        self.collected.missing -= rows
        return self.collected.joined if self.collected.is_complete else None

    def late(self, now_s: float) -> DeadlineError:
        """Return the error of a request that cannot be answered in time."""
        waited_s, allowed_s = now_s - self.arrived_s, self.deadline_s - self.arrived_s
        return DeadlineError(
            f"the request waited for {waited_s:.3g} s and cannot be answered within {allowed_s:.3g} s of its arrival: "
            "try again later, or allow more time"
        )


class Group:
    """The requests of one shape, which can be joined."""

    def __init__(self, policy: BatchingPolicy, max_rows: int) -> None:
        self.max_rows = max_rows
        """The maximum rows of a call."""
        self.rows = 0
        """Rows of waiting requests that are in no call yet."""
        self.latency = LatencyModel()
        self.arrivals = Arrivals(max_gap_s=4 * policy.max_queue_delay_s)
        self.levels: list[deque[Request]] = [deque() for _ in range(policy.priority_levels)]

    def __iter__(self) -> Iterator[Request]:
        """What waits: the most urgent first, and the oldest of these."""
        for level in self.levels:
            yield from level

    @property
    def head(self) -> Request | None:
        """What is next."""
        return next(iter(self), None)

    @property
    def requests(self) -> int:
        """How many wait."""
        return sum(map(len, self.levels))
