"""The sync between the workers of a run, about once a second: losses, stop requests, and which ranks are slow."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from app.best_effort import warn
from app.telemetry.record import ReadingRecord
from app.training.engine import StepResult
from app.training.stop_request import StopRequest
from app.training.worker import Worker

_INTERVAL_S = 1.0
_MAX_STEPS = 20
_POLL_INTERVAL_S = 1.0
_SLOW_FACTOR, _SLOW_S = 2.0, 0.1
_WARNING_INTERVAL_S = 10.0


@dataclass(frozen=True)
class LocalStep:
    """One optimizer step as one worker saw it."""

    batch: int
    """Number of its global batch in the epoch."""
    result: StepResult
    busy_s: float
    """Seconds until it first waited for the other workers."""
    data_s: float
    """Seconds of ``busy_s`` in which it waited for data."""
    seconds: float
    """Seconds of the whole step."""
    mfu: float | None
    """Model FLOPs utilisation."""
    samples: int
    """Samples of the global batch."""
    reading: ReadingRecord | None = None
    """How its micro-batches were read."""


@dataclass(frozen=True)
class SyncedSteps:
    """The result of a sync, which all workers know."""

    steps: list[LocalStep]
    """This worker's steps since the last sync."""
    losses: list[float]
    """Mean loss of each step over all workers."""
    stop_request: StopRequest
    """The strongest request that any worker received."""
    has_lost_state: bool
    """Whether any worker knows that a checkpoint could not be written."""
    busy_s: list[float]
    """The seconds of its own work that each rank had in a step, before it first waited for the others."""

    @property
    def applied_losses(self) -> list[float]:
        """The losses of the steps that the optimizer applied. A skipped step left the weights unchanged."""
        return [loss for step, loss in zip(self.steps, self.losses, strict=True) if step.result.is_applied]

    @property
    def broken(self) -> int | None:
        """Index of the first step whose loss or gradient is not finite. It is the same in every worker."""
        for index, (step, loss) in enumerate(zip(self.steps, self.losses, strict=True)):
            if step.result.is_broken or (step.result.is_applied and not math.isfinite(loss)):
                return index
        return None


@dataclass
class StepSync:
    """Collects steps until the next sync. All workers agree on when that is."""

    worker: Worker
    stop_signals: Sequence[Callable[[], StopRequest]]
    """Each returns the request that this worker received, from a person, a signal or an alert."""
    has_lost_state: Callable[[], bool]
    """Return whether this worker knows that a checkpoint could not be written."""
    poll_stop_request: Callable[[], StopRequest] | None = None
    """Poll the platform for a stop request (preemption). Collective and slow: every worker calls it once a second."""
    clock: Callable[[], float] = time.monotonic
    steps: list[LocalStep] = field(default_factory=list)
    _interval: int = 1
    """Steps between two syncs."""
    _began: float = field(init=False)
    _polls: bool = True
    """Whether this sync calls ``poll_stop_request``. The first worker decided it at the previous sync."""
    _last_poll: float = field(init=False)
    """When the first worker last decided to call ``poll_stop_request``."""
    _last_warning: float = -math.inf

    def __post_init__(self) -> None:
        self._began = self._last_poll = self.clock()

    def forget(self) -> None:
        """Drop the steps since the last sync. They were undone."""
        self.steps, self._interval, self._began = [], 1, self.clock()

    def add(self, step: LocalStep) -> None:
        """Add a step to the next sync."""
        self.steps.append(step)

    @property
    def is_due(self) -> bool:
        """Whether to sync now. Every worker gets the same answer, because the norm of a gradient is global."""
        return len(self.steps) >= self._interval or any(step.result.is_broken for step in self.steps)

    def run(self) -> SyncedSteps:
        """Exchange the steps since the last sync. Collective: every worker calls it after the same number of steps."""
        local_request = self._local_request()
        steps, self.steps = self.steps, []
        elapsed, self._began = self.clock() - self._began, self.clock()
        # One all-reduce carries everything. A slot that only one worker fills arrives unchanged in the others.
        sizes = [len(steps), len(StopRequest), 1, 1, 1, self.worker.size]
        message = torch.zeros(sum(sizes), dtype=torch.float64)
        losses, requests, lost, interval, polls, busy = torch.split(message, sizes)
        if steps:
            # The sum over all workers of these shares is the mean.
            losses.copy_(torch.stack([step.result.loss for step in steps]) / self.worker.size)
            busy[self.worker.rank] = sum(step.busy_s for step in steps) / len(steps)
        # One slot for each kind: a sum of values could not tell the workers' requests apart.
        requests[local_request] = 1.0
        lost.fill_(float(self.has_lost_state()))
        # The first worker decides both, because all workers must agree and their clocks differ.
        if self.worker.is_first:
            interval.fill_(self._next_interval(len(steps), elapsed))
            polls.fill_(self._is_poll_due())

        losses, requests, lost, interval, polls, busy = torch.split(self.worker.all_reduce(message), sizes)
        self._interval, self._polls = int(interval), bool(polls)
        strongest = max(request for request in StopRequest if requests[request])
        self._warn_of_stragglers(busy.tolist())
        return SyncedSteps(steps, losses.tolist(), strongest, bool(lost), busy.tolist())

    def _local_request(self) -> StopRequest:
        request = max(signal() for signal in self.stop_signals)
        return max(request, self.poll_stop_request()) if self.poll_stop_request and self._polls else request

    def _is_poll_due(self) -> bool:
        """Return whether the next sync should call ``poll_stop_request``, at most once a second."""
        if self.clock() - self._last_poll < _POLL_INTERVAL_S:
            return False
        self._last_poll = self.clock()
        return True

    def _next_interval(self, steps: int, elapsed: float) -> int:
        """Return the number of steps that take about a second, at most ``_MAX_STEPS``."""
        return max(1, min(_MAX_STEPS, int(steps * _INTERVAL_S / max(elapsed, 1e-6)))) if steps else self._interval

    def _warn_of_stragglers(self, busy_s: Sequence[float]) -> None:
        """Warn of slow ranks, at most every few seconds. ``busy_s`` has each rank's own seconds per step."""
        slow = slow_ranks(busy_s)
        if not slow or time.monotonic() - self._last_warning < _WARNING_INTERVAL_S:
            return
        self._last_warning = time.monotonic()
        for rank in slow if self.worker.is_first else ():
            warn(
                f"rank {rank} is slow: {busy_s[rank]:.3f} s of its own work a step, "
                f"the fastest takes {min(busy_s):.3f} s"
            )


def slow_ranks(busy_s: Sequence[float]) -> list[int]:
    """Return the ranks that take twice as long as the median, and at least a tenth of a second longer."""
    # The lower median, because with two workers the upper one is the slow worker itself.
    median = sorted(busy_s)[(len(busy_s) - 1) // 2]
    limit = max(_SLOW_FACTOR * median, median + _SLOW_S)
    return [rank for rank, busy in enumerate(busy_s) if busy > limit]
