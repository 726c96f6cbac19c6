"""What a trial costs beside its training: a search on a local Ray cluster, one trial at a time, in one actor.

Trials train one epoch or three. The time from a trial's start to the next one's is a line over its epochs: where the
line begins is the overhead, its slope is an epoch. What Ray Tune does between two epochs counts to the epoch.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from optuna import Trial
from scipy import stats

from app.errors import TuningError
from benchmarks.cluster import local_cluster, rayloom

_EPOCHS = (1, 3)
_TRIALS = 31
_CONFIDENCE = 0.95
_SEARCH = (
    "name=overhead",
    "model.args.width=16",
    f"train.epochs={max(_EPOCHS)}",
    "train.early_stopping=null",
    "tune.space=benchmarks.tuning.overhead:space",
    "tune.sampler=random",
    "tune.scheduler=none",
    "tune.workers=1",
    "tune.concurrent=1",
)


def space(trial: Trial) -> None:
    """How long a trial trains, and a rate, so that no two are the same; every epoch costs the same."""
    trial.suggest_categorical("train.epochs", _EPOCHS)
    trial.suggest_float("train.optimizer.lr", 1.0e-4, 1.0e-2, log=True)


@dataclass(frozen=True)
class TimedTrial:
    """A trial that another one followed."""

    epochs: int
    seconds: float
    """From its start to the next one's."""


@dataclass(frozen=True)
class Estimate:
    """A number, and how far the true one may be from it, with 95 % confidence."""

    value: float
    margin: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ± {self.margin:.2f}"


@dataclass(frozen=True)
class Overhead:
    """Seconds of a search's trials after the first."""

    per_trial: Estimate
    per_epoch: Estimate
    trials: tuple[TimedTrial, ...]


def measure_overhead(trials: int = _TRIALS) -> Overhead:
    """Run a search of so many trials on a cluster of its own. Raises RuntimeError if the search fails."""
    with local_cluster() as environment:
        result = _search(environment, trials)
        return fit(timed(pd.read_parquet(result["artifacts"]["trials"])))


def timed(table: pd.DataFrame) -> list[TimedTrial]:
    """The trials of ``trials.parquet`` that another one followed, without the first, whose actor has to start.

    Raises:
        TuningError: a trial has failed, and was perhaps run more than once.
    """
    if broken := table.loc[(table["state"] != "complete") | (table["failures"] > 0), "trial"].tolist():
        raise TuningError(f"trials {broken} of the search that is timed did not run as they should: look at its log")
    table = table.sort_values("began")
    seconds = table["began"].diff().shift(-1).dt.total_seconds()
    return [TimedTrial(*each) for each in zip(table["epochs"][1:-1], seconds[1:-1], strict=True)]


def fit(trials: Sequence[TimedTrial]) -> Overhead:
    """The line through the trials' seconds over their epochs, by least squares, with Student's intervals.

    Raises:
        TuningError: fewer than three trials, or all of one length, through which no one line goes.
    """
    epochs = [each.epochs for each in trials]
    if len(trials) < 3 or len(set(epochs)) < 2:
        raise TuningError(f"no line goes through trials of {epochs} epochs: time three or more, of two lengths")
    line = stats.linregress(epochs, [each.seconds for each in trials])
    factor = stats.t.ppf((1 + _CONFIDENCE) / 2, len(trials) - 2)
    return Overhead(
        Estimate(float(line.intercept), float(factor * line.intercept_stderr)),
        Estimate(float(line.slope), float(factor * line.stderr)),
        tuple(trials),
    )


def _search(environment: Mapping[str, str], trials: int) -> dict[str, dict[str, str]]:
    """The result of the search's job; what it prints is shown as it comes."""
    command = ["submit", "tune", "recipes/digits.yaml", *_SEARCH, f"tune.trials={trials}"]
    output = rayloom(command, environment)
    line = next(line for line in output if line.startswith("RESULT "))
    result: dict[str, dict[str, str]] = json.loads(line.removeprefix("RESULT "))
    return result


if __name__ == "__main__":
    found = measure_overhead(int(sys.argv[1]) if len(sys.argv) > 1 else _TRIALS)
    print(f"overhead {found.per_trial} s a trial, {found.per_epoch} s an epoch, {len(found.trials)} trials")
