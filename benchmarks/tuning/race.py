"""One search by one contender, counted in epochs."""

from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.tuning.contenders import Contender, Task


class Source(Protocol):
    """A source of learning curves."""

    def value(self, values: dict[str, Any], epoch: int) -> float | None:
        """The objective after an epoch, the first being 1; None if training ended or broke before it."""
        ...


@dataclass(frozen=True)
class Race:
    """The best value of any epoch so far, after each that the search trained: what ``best.yaml`` would name."""

    best: list[float]
    trials: int

    def epochs_to(self, value: float) -> int | None:
        """Epochs until ``value`` was reached; None if it never was."""
        return next((number for number, best in enumerate(self.best, start=1) if best >= value), None)


def run_race(contender: Contender, source: Source, epochs: int, budget: int) -> Race:
    """Search until ``budget`` epochs are trained, each trial for ``epochs`` at most. Higher is better."""
    best: list[float] = []
    trials = 0
    while len(best) < budget and (task := contender.propose()) is not None:
        trials += not task.epochs_done
        _run_trial(contender, task, source, epochs, budget, best)
    return Race(best, trials)


def _run_trial(contender: Contender, task: Task, source: Source, epochs: int, budget: int, best: list[float]) -> None:
    """One trial, until the contender ends it, it ends itself, or the budget is spent."""
    own = [value for epoch in range(task.epochs_done) if (value := source.value(task.values, epoch + 1)) is not None]
    while len(own) < epochs and len(best) < budget:
        value = source.value(task.values, len(own) + 1)
        if value is None:
            break
        own.append(value)
        best.append(max([value, *best[-1:]]))
        if not contender.goes_on(len(own), value) and len(own) < epochs:
            contender.pruned()
            return
    contender.ended(max(own, default=None))
