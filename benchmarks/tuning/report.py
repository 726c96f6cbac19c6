"""RESULTS.md: what was reached, beside the goals."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.training.machine import machine, today, versions
from benchmarks.training.report import table
from benchmarks.tuning.cases import Case
from benchmarks.tuning.contenders import RANDOM, RAYLOOM
from benchmarks.tuning.race import Race

GOAL_SHARE = 0.25
_PACKAGES = ("rayloom", "optuna", "ray", "torch", "deepspeed")


@dataclass(frozen=True)
class Comparison:
    """Every contender on one case, once for each seed."""

    case: Case
    races: Mapping[str, Sequence[Race]]

    def shares(self, contender: str) -> list[float]:
        """Epochs until the value that random search ends with, as a share of its epochs; infinite if never reached."""
        shares = []
        for race, random in zip(self.races[contender], self.races[RANDOM], strict=True):
            epochs = race.epochs_to(random.best[-1])
            shares.append(epochs / self.case.budget if epochs else float("inf"))
        return shares

    def finals(self, contender: str) -> list[float]:
        """The value after the whole budget."""
        return [race.best[-1] for race in self.races[contender]]


def report(comparisons: Sequence[Comparison], minutes: float) -> str:
    """The whole of RESULTS.md."""
    return "\n\n".join([_head(comparisons, minutes), _goals(comparisons), *map(_details, comparisons)]) + "\n"


def _head(comparisons: Sequence[Comparison], minutes: float) -> str:
    repeats = len(comparisons[0].races[RAYLOOM])
    return f"""# Tuning: results

`make bench-tuning`, {today()}, {minutes:.0f} minutes, {repeats} seeds. {machine()}. {versions(_PACKAGES)}.

Counted in epochs, which do not depend on the machine. Every epoch is real training; a configuration that several
searches propose is trained once, for training is deterministic. One trial runs at a time, so that searches can be
repeated. Nobody starts from the recipe's own values, which Rayloom's first trial would have. The value is the best
validation accuracy known so far."""


def _goals(comparisons: Sequence[Comparison]) -> str:
    rows = []
    for each in comparisons:
        share = statistics.median(each.shares(RAYLOOM))
        own = statistics.median(each.finals(RAYLOOM))
        peer = max(statistics.median(each.finals(name)) for name in each.races if name != RAYLOOM)
        is_near = share <= GOAL_SHARE
        rows += [_row(each.case, "epochs to random search's value", f"≤ {GOAL_SHARE:.0%}", _share(share), is_near)]
        rows += [_row(each.case, "final value, beside the best peer's", f"≥ {peer:.4f}", f"{own:.4f}", own >= peer)]
    return "## Goals\n\n" + table(["case", "medians over seeds", "goal", "reached", ""], rows)


def _details(comparison: Comparison) -> str:
    rows = [
        [
            name,
            _share(statistics.median(comparison.shares(name))),
            ", ".join(_share(each) for each in comparison.shares(name)),
            f"{statistics.median(comparison.finals(name)):.4f}",
            ", ".join(f"{each:.4f}" for each in comparison.finals(name)),
            f"{statistics.median(race.trials for race in comparison.races[name]):g}",
        ]
        for name in comparison.races
    ]
    case = comparison.case
    head = ["search", "share of epochs, median", "each seed", "final value, median", "each seed", "trials"]
    return (
        f"## {case.name}\n\n{case.budget} epochs: {case.trials} random trials of {case.epochs}. "
        f"Space `{case.space}`.\n\n" + table(head, rows)
    )


def _share(share: float) -> str:
    return f"{share:.0%}" if share != float("inf") else "never"


def _row(case: Case, what: str, goal: str, reached: str, is_reached: bool) -> list[str]:
    return [case.name, what, goal, reached, "reached" if is_reached else "missed"]
