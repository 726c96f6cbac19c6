"""What a batcher counts."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from app.errors import DeadlineError


class ReleaseReason(StrEnum):
    """Why a call was made when it was, and not with more rows later."""

    FULL = "full"
    """As many rows as a call takes."""
    PREFERRED = "preferred"
    """A preferred number of rows."""
    IDLE = "idle"
    """A slot of the engine was free, and waiting for more rows did not pay."""
    DELAY = "delay"
    """A slot had been kept idle for the longest queue delay."""
    DEADLINE = "deadline"
    """A request would have been late in a larger or later call."""
    RETRY = "retry"
    """Part of a call that failed."""


class FailureReason(StrEnum):
    """Why a request got no answer."""

    UNREAD = "unread"
    """It could not be read, or is not what the model takes."""
    REJECTED = "rejected"
    """The queue was full, or the batcher closed."""
    DEADLINE = "deadline"
    """Its deadline passed, or would have, before the engine could run it."""
    CANCELLED = "cancelled"
    """Whoever asked went away."""
    ENGINE = "engine"
    """The engine failed on it, or gave an answer that will not do."""


@dataclass
class Durations:
    """How many there were, and how long they took together."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float, count: int = 1) -> None:
        """Add some that took so long together."""
        self.count += count
        self.ns += round(seconds * 1e9)


@dataclass(slots=True)
class ComputeTime:
    """Seconds that one call took, or all calls of one request."""

    input_s: float = 0.0
    """Time to join the rows of the call's requests."""
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
        """Add one compute time, as often as it counts."""
        self.input.add(time.input_s * count, count)
        self.infer.add(time.infer_s * count, count)
        self.output.add(time.output_s * count, count)


@dataclass
class BatchingStatistics:
    """Sums since the batcher was made, as the statistics extension of the Open Inference Protocol has them.

    ``success``, ``fail``, ``queue`` and ``compute`` count requests; the last two count only successful requests.
    ``queue`` is the time from a request's arrival until its first row is handed to the engine. ``compute`` is the full
    time of all calls that contained its rows, also if other requests shared them.
    """

    success: Durations = field(default_factory=Durations)
    fail: Durations = field(default_factory=Durations)
    queue: Durations = field(default_factory=Durations)
    compute: ComputeDurations = field(default_factory=ComputeDurations)
    inferences: int = 0
    """Rows of the requests that succeeded."""
    batches: defaultdict[int, ComputeDurations] = field(default_factory=lambda: defaultdict(ComputeDurations))
    """The engine's calls that succeeded, by their rows."""
    releases: Counter[ReleaseReason] = field(default_factory=Counter)
    """All calls, by why they were made."""
    failures: Counter[FailureReason] = field(default_factory=Counter)
    """Requests, by why they failed."""

    def failed(self, reason: FailureReason, seconds: float) -> None:
        """One more request got no answer, after so long."""
        self.fail.add(seconds)
        self.failures[reason] += 1

    @property
    def executions(self) -> int:
        """The engine's calls that succeeded."""
        return sum(batches.infer.count for batches in self.batches.values())


_WINDOW_S = 10.0
_MOST = 1000
"""Requests that are remembered: enough for the 95th of 100 to be steady."""


class RecentLatencies:
    """Of the last thousand requests, those of the last ten seconds that were answered, or would have been too late."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answered: deque[tuple[float, float]] = deque(maxlen=_MOST)

    def add(self, seconds: float) -> None:
        """A request was answered just now, after so long."""
        self._answered.append((self._clock(), seconds))

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add a request that is answered in here, or refused because that would be too late."""
        began_s = self._clock()
        try:
            yield
        except DeadlineError:
            self.add(self._clock() - began_s)
            raise
        self.add(self._clock() - began_s)

    def percentile_s(self, share: float) -> float | None:
        """What this share of the requests took at most; None if there were none."""
        since_s = self._clock() - _WINDOW_S
        recent = sorted(seconds for answered_s, seconds in self._answered if answered_s >= since_s)
        return recent[int(share * (len(recent) - 1))] if recent else None
