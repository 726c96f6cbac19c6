"""RESULTS.md: what was reached, beside the goals."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.machine import Conditions, machine, versions
from benchmarks.markdown import table, verdict
from benchmarks.tuning.cases import Case
from benchmarks.tuning.contenders import CONTENDERS, RANDOM, RAYLOOM
from benchmarks.tuning.overhead import Overhead
from benchmarks.tuning.race import Race

GOAL_SHARE = 0.25
GOAL_OVERHEAD_S = 1.5
_PACKAGES = ("rayloom", "optuna", "ray", "torch", "deepspeed")


@dataclass(frozen=True)
class Comparison:
    """Every contender on one case, once for each seed."""

    case: Case
    repeats: Sequence[Mapping[str, Race]]

    def races(self, contender: str) -> list[Race]:
        """One for each seed."""
        return [repeat[contender] for repeat in self.repeats]

    def shares(self, contender: str) -> list[float]:
        """Epochs until the value that random search ends with, as a share of its epochs; infinite if never reached."""
        shares = []
        for race, random in zip(self.races(contender), self.races(RANDOM), strict=True):
            epochs = race.epochs_to(random.best[-1])
            shares.append(epochs / self.case.budget if epochs else float("inf"))
        return shares

    def finals(self, contender: str) -> list[float]:
        """The value after the whole budget."""
        return [race.best[-1] for race in self.races(contender)]


@dataclass(frozen=True)
class Findings:
    """All that a run of the benchmark found."""

    comparisons: Sequence[Comparison]
    overhead: Overhead | None
    conditions: Conditions


def report(found: Findings) -> str:
    """The whole of RESULTS.md."""
    sections = [_head(found), _goals(found), *map(_details, found.comparisons)]
    if found.overhead:
        sections.append(_overhead(found.overhead))
    return "\n\n".join(sections) + "\n"


def _head(found: Findings) -> str:
    repeats = len(found.comparisons[0].repeats)
    return f"""# Tuning: results

`make bench-tuning`, {repeats} seeds. {machine()}. {versions(_PACKAGES)}.
{found.conditions}

Cost is counted in epochs, which do not depend on the machine. Every epoch is real training. A configuration that
several searches propose is trained only once, because training is deterministic. One trial runs at a time, so that
searches can be repeated. No search starts from the recipe's own values, which Rayloom's first trial would have by
default. The value of a search is the best validation accuracy of any epoch of any trial so far. If the search ended
there, best.yaml would name that trial."""


def _goals(found: Findings) -> str:
    rows = []
    for comparison in found.comparisons:
        case, share = comparison.case.name, statistics.median(comparison.shares(RAYLOOM))
        own = statistics.median(comparison.finals(RAYLOOM))
        peer = max(statistics.median(comparison.finals(name)) for name in CONTENDERS if name != RAYLOOM)
        is_near = share <= GOAL_SHARE
        rows += [_row(case, "epochs to random search's value", f"≤ {GOAL_SHARE:.0%}", _share(share), is_near)]
        rows += [_row(case, "final value, beside the best peer's", f"≥ {peer:.4f}", f"{own:.4f}", own >= peer)]
    if found.overhead:
        seconds = found.overhead.per_turn
        is_short = seconds.value <= GOAL_OVERHEAD_S
        rows += [_row("digits, on Ray", "overhead of a trial", f"≤ {GOAL_OVERHEAD_S} s", f"{seconds} s", is_short)]
    return "## Goals\n\n" + table(["case", "what", "goal", "reached", ""], rows) + "\n\nFigures are medians over seeds."


def _overhead(found: Overhead) -> str:
    turns, epochs = (sum(getattr(window, name) for window in found.windows) for name in ("turns", "epochs"))
    rows = [["a turn, without its training", str(found.per_turn)], ["an epoch", str(found.per_epoch)]]
    return f"""## Overhead of a trial

A search by `rayloom submit tune` with default settings ran on a local cluster, one trial at a time in one actor.
After the first trial there were {len(found.windows)} more, with {turns} turns and {epochs} epochs in total. A
promoted trial has a second turn. The time from the start of one trial to the start of the next is fitted by least
squares as a sum of turns and epochs.

{table(["seconds", "with 95 % confidence"], rows)}

The overhead is a turn without its epochs: asking the study, creating the model, its engine and the trial's folder,
and Ray Tune's own work. An epoch includes validation, its checkpoint and Ray Tune's work between epochs."""


def _details(comparison: Comparison) -> str:
    rows = [
        [
            name,
            _share(statistics.median(comparison.shares(name))),
            ", ".join(_share(share) for share in comparison.shares(name)),
            f"{statistics.median(comparison.finals(name)):.4f}",
            ", ".join(f"{final:.4f}" for final in comparison.finals(name)),
            f"{statistics.median(race.trials for race in comparison.races(name)):g}",
        ]
        for name in CONTENDERS
    ]
    case = comparison.case
    head = ["search", "share of epochs, median", "each seed", "final value, median", "each seed", "trials"]
    return (
        f"## {case.title}\n\n{case.budget} epochs: {case.trials} random trials of {case.epochs}. "
        f"Space `{case.space}`.\n\n" + table(head, rows)
    )


def _share(share: float) -> str:
    return f"{share:.0%}" if share != float("inf") else "never"


def _row(case: str, what: str, goal: str, reached: str, is_reached: bool) -> list[str]:
    return [case, what, goal, reached, verdict(is_reached)]
