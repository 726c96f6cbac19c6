"""Counters of a batcher, and the latencies of recent requests."""

import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from app.errors import DeadlineError
from app.telemetry.metrics import LATENCY_BOUNDS_S, ROWS_BOUNDS, Distribution, Metric


class Buckets:
    """A histogram that is counted in. Adding a value takes about 0.2 µs."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS_S) -> None:
        self.bounds = bounds
        # The last bucket has the values above all bounds.
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value, in the bucket of the first bound that is not below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def of(self, metric: Metric, *labels: str) -> Distribution:
        """Return what was counted, as a value of a metric."""
        return Distribution(metric, labels, self.bounds, self.counts, self.total)


class ReleaseReason(StrEnum):
    """The reason to start a call, instead of waiting for more rows."""

    FULL = "full"
    """The call had the maximum rows."""
    PREFERRED = "preferred"
    """The call had a preferred number of rows."""
    IDLE = "idle"
    """A slot of the engine was free, and waiting for more rows did not pay."""
    DELAY = "delay"
    """A slot had been idle for the maximum queue delay."""
    DEADLINE = "deadline"
    """A request would have been late in a larger or later call."""
    RETRY = "retry"
    """The call was a half of a failed one."""


class FailureReason(StrEnum):
    """The reason why a request got no answer."""

    REJECTED = "rejected"
    """The queue was full, or the batcher closed."""
    DEADLINE = "deadline"
    """Its deadline passed, or would have, before the engine could run it."""
    CANCELLED = "cancelled"
    """The client went away."""
    ENGINE = "engine"
    """The engine failed on it, or gave an invalid answer."""
    INTERNAL = "internal"
    """An unexpected error came while it was read."""


@dataclass
class Durations:
    """The number of events, and their total time."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float, count: int = 1) -> None:
        """Add ``count`` events with a total time."""
        self.count += count
        self.ns += round(seconds * 1e9)


@dataclass(slots=True)
class ComputeTime:
    """The seconds of one call, or of all calls of one request."""

    input_s: float = 0.0
    """Time to concatenate the rows of the call's requests."""
    infer_s: float = 0.0
    """Time in the engine, including copies to and from a GPU: engines take and return tensors on the host."""
    output_s: float = 0.0
    """Time to check the answer and to give each request its rows."""

    @property
    def total_s(self) -> float:
        """The sum of all three."""
        return self.input_s + self.infer_s + self.output_s

    def add(self, other: "ComputeTime") -> None:
        """Add the time of another call."""
        self.input_s += other.input_s
        self.infer_s += other.infer_s
        self.output_s += other.output_s


@dataclass
class ComputeDurations:
    """Sums of compute times. All three have the same count: load generators rely on it."""

    input: Durations = field(default_factory=Durations)
    infer: Durations = field(default_factory=Durations)
    output: Durations = field(default_factory=Durations)

    def add(self, time: ComputeTime, count: int = 1) -> None:
        """Add one compute time ``count`` times."""
        self.input.add(time.input_s * count, count)
        self.infer.add(time.infer_s * count, count)
        self.output.add(time.output_s * count, count)


@dataclass
class BatchingStatistics:
    """Sums since the batcher was created, as the statistics extension of the Open Inference Protocol defines them.

    ``success``, ``fail``, ``queue`` and ``compute`` count requests; the last two count only successful requests.
    ``queue`` is the time from a request's arrival until its first row is handed to the engine. ``compute`` is the full
    time of all calls that contained its rows, even if other requests shared them.
    """

    success: Durations = field(default_factory=Durations)
    fail: Durations = field(default_factory=Durations)
    queue: Durations = field(default_factory=Durations)
    compute: ComputeDurations = field(default_factory=ComputeDurations)
    inferences: int = 0
    """Rows of the successful requests."""
    batches: defaultdict[int, ComputeDurations] = field(default_factory=lambda: defaultdict(ComputeDurations))
    """Successful calls of the engine, by their rows."""
    releases: Counter[ReleaseReason] = field(default_factory=Counter)
    """All calls, by their reason."""
    failures: Counter[FailureReason] = field(default_factory=Counter)
    """Failed requests, by their reason."""
    invalid: int = 0
    """Requests that were refused because they are malformed, or do not fit the model. They are not failures."""

    request_s: Buckets = field(default_factory=Buckets)
    """The time of each request of ``success``."""
    queue_s: Buckets = field(default_factory=Buckets)
    """The part of it in the queue."""
    engine_s: Buckets = field(default_factory=Buckets)
    """The time of each call of the engine."""
    batch_rows: Buckets = field(default_factory=lambda: Buckets(ROWS_BOUNDS))
    """The rows of each call of the engine."""
    first_answer_s: float | None = None
    """The time of the first request; None before it."""

    def answered(self, seconds: Sequence[float], queue_s: Sequence[float]) -> None:
        """Count requests that were answered together: how long each took, and how long of that it waited."""
        self.success.add(sum(seconds), len(seconds))
        self.queue.add(sum(queue_s), len(queue_s))
        for request_s in seconds:
            self.request_s.add(request_s)
        for waited_s in queue_s:
            self.queue_s.add(waited_s)
        if self.first_answer_s is None and seconds:
            self.first_answer_s = seconds[0]

    def called(self, rows: int, time: ComputeTime) -> None:
        """Count a call of ``rows`` rows that the engine has answered."""
        self.batches[rows].add(time)
        self.engine_s.add(time.infer_s)
        self.batch_rows.add(rows)

    def count_failure(self, reason: FailureReason, seconds: float) -> None:
        """Count a request that got no answer."""
        self.fail.add(seconds)
        self.failures[reason] += 1

    @property
    def executions(self) -> int:
        """The number of successful calls of the engine."""
        return sum(batches.infer.count for batches in self.batches.values())


_WINDOW_S = 10.0
_MAX_REMEMBERED = 1000
"""Enough requests for a stable 95th percentile."""


class RecentLatencies:
    """Latencies of the last 1,000 answered or late requests within the last 10 seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answered: deque[tuple[float, float]] = deque(maxlen=_MAX_REMEMBERED)

    def add(self, seconds: float) -> None:
        """Add a request that was answered just now."""
        self._answered.append((self._clock(), seconds))

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the request that is answered within the block, or refused there because it is late."""
        began_s = self._clock()
        try:
            yield
        # Late requests count, because an overload would look fast without its slowest requests.
        except DeadlineError:
            self.add(self._clock() - began_s)
            raise
        self.add(self._clock() - began_s)

    def percentile_s(self, share: float) -> float | None:
        """Return a percentile of the latencies, for example 0.95; None without requests."""
        # Sorted only when somebody asks, so that ``add``, which each request calls, stays cheap.
        since_s = self._clock() - _WINDOW_S
        recent = sorted(seconds for answered_s, seconds in self._answered if answered_s >= since_s)
        return recent[int(share * (len(recent) - 1))] if recent else None
