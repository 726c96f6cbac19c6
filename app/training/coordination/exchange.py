"""What the workers of a run tell each other every second or so: losses, requests, who is slow."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from app.telemetry.alerts import Action
from app.training.coordination.stragglers import StragglerWarning
from app.training.engine import StepResult
from app.training.worker import Worker

_INTERVAL_S = 1.0
_MOST_STEPS = 20
_POLL_INTERVAL_S = 1.0


@dataclass(frozen=True)
class LocalStep:
    """One optimizer step as one worker saw it."""

    batch: int
    """The number of its global batch in the epoch."""
    result: StepResult
    busy_s: float
    """Seconds before it first waited for the others."""
    data_s: float
    """Seconds of these that it waited for data."""
    seconds: float
    """All of the step."""
    mfu: float | None
    """Model FLOPs utilisation."""


@dataclass(frozen=True)
class Exchanged:
    """What all workers know after an exchange."""

    steps: list[LocalStep]
    """The steps that this worker told of."""
    losses: list[float]
    """The mean loss of each over all workers."""
    request: Action
    """The strongest that any of them heard."""
    has_lost_state: bool
    """Whether any worker knows that a checkpoint could not be written."""

    @property
    def applied_losses(self) -> list[float]:
        """The losses of the steps that the optimizer has done; of another, the next step knows nothing."""
        return [loss for step, loss in zip(self.steps, self.losses, strict=True) if step.result.is_applied]

    @property
    def broken(self) -> int | None:
        """Which of the steps first had a loss or gradient that is not finite; the same answer in every worker."""
        for number, (step, loss) in enumerate(zip(self.steps, self.losses, strict=True)):
            if step.result.is_broken or (step.result.is_applied and not math.isfinite(loss)):
                return number
        return None


@dataclass
class Exchange:
    """Collects steps until it is time to tell the others; all workers agree on the time."""

    worker: Worker
    sources: Sequence[Callable[[], Action]]
    """Each says what this worker heard: from a person, a signal or an alert."""
    has_lost_state: Callable[[], bool]
    """Return whether this worker knows that a checkpoint could not be written."""
    poll_stop_request: Callable[[], Action] | None = None
    """Poll the platform for a stop request (preemption). Collective and slow: every worker calls it once a second."""
    clock: Callable[[], float] = time.monotonic
    steps: list[LocalStep] = field(default_factory=list)
    _interval: int = 1
    _began: float = field(init=False)
    _polls: bool = True
    """Whether this exchange calls ``poll_stop_request``. The first worker decided it at the previous exchange."""
    _last_poll: float = field(init=False)
    """When the first worker last decided to call ``poll_stop_request``."""
    _stragglers: StragglerWarning = field(init=False)

    def __post_init__(self) -> None:
        self._began = self._last_poll = self.clock()
        self._stragglers = StragglerWarning(self.worker)

    def forget(self) -> None:
        """Begin anew: the steps not told yet are undone."""
        self.steps, self._interval, self._began = [], 1, self.clock()

    def add(self, step: LocalStep) -> None:
        """Take note of a step."""
        self.steps.append(step)

    @property
    def is_due(self) -> bool:
        """Whether to exchange now; the same answer in every worker, for the norm of a gradient is global."""
        return len(self.steps) >= self._interval or any(step.result.is_broken for step in self.steps)

    def run(self) -> Exchanged:
        """Tell and hear; every worker calls it, after as many steps."""
        request = self._local_request()
        steps, self.steps = self.steps, []
        elapsed, self._began = self.clock() - self._began, self.clock()
        sizes = [len(steps), len(Action), 1, 1, 1, self.worker.size]
        told = torch.zeros(sum(sizes), dtype=torch.float64)
        losses, asked, lost, interval, polls, busy = torch.split(told, sizes)
        if steps:
            losses.copy_(torch.stack([step.result.loss for step in steps]) / self.worker.size)
            busy[self.worker.rank] = sum(step.busy_s for step in steps) / len(steps)
        asked[request] = 1.0
        lost.fill_(float(self.has_lost_state()))
        if self.worker.is_first:
            interval.fill_(self._next_interval(len(steps), elapsed))
            polls.fill_(self._is_poll_due())
        losses, asked, lost, interval, polls, busy = torch.split(self.worker.all_reduce(told), sizes)
        self._interval, self._polls = int(interval), bool(polls)
        strongest = max(action for action in Action if asked[action])
        self._stragglers.look(busy.tolist())
        return Exchanged(steps, losses.tolist(), strongest, bool(lost))

    def _local_request(self) -> Action:
        request = max(source() for source in self.sources)
        return max(request, self.poll_stop_request()) if self.poll_stop_request and self._polls else request

    def _is_poll_due(self) -> bool:
        """Return whether the next exchange should call ``poll_stop_request``, at most once a second."""
        if self.clock() - self._last_poll < _POLL_INTERVAL_S:
            return False
        self._last_poll = self.clock()
        return True

    def _next_interval(self, steps: int, elapsed: float) -> int:
        """So many steps take about a second."""
        return max(1, min(_MOST_STEPS, int(steps * _INTERVAL_S / max(elapsed, 1e-6)))) if steps else self._interval
