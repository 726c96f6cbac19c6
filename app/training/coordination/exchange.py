"""What the workers of a run tell each other every second or so: losses, requests, who is slow."""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from app.telemetry.alerts import Action
from app.training.worker import Worker

_INTERVAL_S = 1.0
_MOST_STEPS = 20
_SLOW_FACTOR, _SLOW_S = 2.0, 0.1


@dataclass(frozen=True)
class LocalStep:
    """One optimizer step as one worker saw it."""

    loss: Tensor
    """Mean loss of its micro-batches, shape ()."""
    lr: float
    grad_norm: float
    loss_scale: float | None
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
    busy_s: list[float]
    """Mean busy seconds a step of each worker, by rank."""

    @property
    def slow_ranks(self) -> list[int]:
        """Workers that take twice as long as the median, and a tenth of a second more."""
        median = sorted(self.busy_s)[(len(self.busy_s) - 1) // 2]
        limit = max(_SLOW_FACTOR * median, median + _SLOW_S)
        return [rank for rank, busy in enumerate(self.busy_s) if busy > limit]


@dataclass
class Exchange:
    """Collects steps until it is time to tell the others; all workers agree on the time."""

    worker: Worker
    steps: list[LocalStep] = field(default_factory=list)
    _interval: int = 1
    _began: float = field(default_factory=time.monotonic)

    def add(self, step: LocalStep) -> None:
        """Take note of a step."""
        self.steps.append(step)

    @property
    def is_due(self) -> bool:
        """Whether to exchange now; the same answer in every worker."""
        return len(self.steps) >= self._interval

    def run(self, request: Action) -> Exchanged:
        """Tell and hear; every worker calls it, after as many steps."""
        steps, self.steps = self.steps, []
        elapsed, self._began = time.monotonic() - self._began, time.monotonic()
        sizes = [len(steps), len(Action), 1, self.worker.size]
        told = torch.zeros(sum(sizes), dtype=torch.float64)
        losses, asked, interval, busy = torch.split(told, sizes)
        if steps:
            losses.copy_(torch.stack([step.loss for step in steps]) / self.worker.size)
            busy[self.worker.rank] = sum(step.busy_s for step in steps) / len(steps)
        asked[request] = 1.0
        if self.worker.is_first:
            interval.fill_(self._next_interval(len(steps), elapsed))
        losses, asked, interval, busy = torch.split(self.worker.sum(told), sizes)
        self._interval = int(interval)
        strongest = max(action for action in Action if asked[action])
        return Exchanged(steps, losses.tolist(), strongest, busy.tolist())

    def _next_interval(self, steps: int, elapsed: float) -> int:
        """So many steps take about a second."""
        return max(1, min(_MOST_STEPS, int(steps * _INTERVAL_S / max(elapsed, 1e-6)))) if steps else self._interval
