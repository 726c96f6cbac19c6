"""What a trial costs beside its training: a search as it is by default, on a local Ray cluster, one trial at a time.

Trials train an epoch and wait; some are promoted, and train to their end. Seconds between two trials' starts are fitted
by their turns, of which a promotion is one more, and by their epochs. A turn beside its epochs is the overhead.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd
from scipy import stats

from app.errors import TuningError
from benchmarks.cluster import local_cluster

_EPOCHS = 4
_TRIALS = 40
_CONFIDENCE = 0.95
_SEARCH = (
    "name=overhead",
    "model.args.width=16",
    f"train.epochs={_EPOCHS}",
    "train.early_stopping=null",
    "tune.space=tune_spaces.image:rates",  # every epoch costs the same
    "tune.workers=1",
    "tune.concurrent=1",
)


@dataclass(frozen=True)
class Window:
    """From a trial's start to the next one's."""

    turns: int
    """Number of turns of this trial, and of trials that were promoted before the next one began."""
    epochs: int
    seconds: float


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

    per_turn: Estimate
    per_epoch: Estimate
    windows: tuple[Window, ...]


def measure_overhead(trials: int = _TRIALS) -> Overhead:
    """Run a search of so many trials on a cluster of its own. Raises RuntimeError if the search fails."""
    with local_cluster() as cluster:
        search = cluster.submit("tune", "recipes/digits.yaml", *_SEARCH, f"tune.trials={trials}")
        return fit(timed(pd.read_parquet(search.result.artifacts["trials"]), turns_in(search.output)))


def turns_in(output: Sequence[str]) -> list[tuple[int, int]]:
    """Whose turns ended, in order, and after which epoch: from the table that the search prints."""
    rows = [line.split() for line in output]
    return [
        (int(row[0]), int(row[2].partition("/")[0]))
        for row in rows
        if len(row) > 2 and row[0].isdecimal() and row[1] in ("paused", "complete")
    ]


def timed(table: pd.DataFrame, turns: Sequence[tuple[int, int]]) -> list[Window]:
    """Between the starts of two trials of ``trials.parquet``, but for the first, whose actor has to start.

    Raises:
        TuningError: a trial has failed, and was perhaps run more than once.
    """
    if broken := table.loc[(table["state"] == "fail") | (table["failures"] > 0), "trial"].tolist():
        raise TuningError(f"trials {broken} of the search that is timed did not run as they should: look at its log")
    last_reported: dict[int, int] = {}
    groups: list[tuple[int, list[int]]] = []
    for trial, epoch in turns:
        if trial not in last_reported:
            groups.append((trial, []))
        groups[-1][1].append(epoch - last_reported.get(trial, 0))
        last_reported[trial] = epoch
    began = table.set_index("trial")["began"]
    windows = [
        Window(len(epochs), sum(epochs), (began[after] - began[trial]).total_seconds())
        for (trial, epochs), (after, _) in pairwise(groups)
    ]
    return windows[1:]


def fit(windows: Sequence[Window]) -> Overhead:
    """Seconds as a sum of turns and epochs, by least squares, with Student's intervals.

    Raises:
        TuningError: fewer than three windows, or all with as many epochs a turn, of which nothing can be told apart.
    """
    sizes = np.array([[window.turns, window.epochs] for window in windows], dtype=float).reshape(-1, 2)
    if len(windows) < 3 or np.linalg.matrix_rank(sizes) < 2:
        raise TuningError(f"turns and epochs of {len(windows)} trials cannot be told apart: time more of them")
    seconds = np.array([window.seconds for window in windows])
    inverse = np.linalg.inv(sizes.T @ sizes)
    solution = inverse @ sizes.T @ seconds
    freedom = len(windows) - 2
    variance = float(np.sum((seconds - sizes @ solution) ** 2)) / freedom
    factor = float(stats.t.ppf((1 + _CONFIDENCE) / 2, freedom))
    turn, epoch = (
        Estimate(float(value), factor * float(np.sqrt(variance * share)))
        for value, share in zip(solution, np.diag(inverse), strict=True)
    )
    return Overhead(turn, epoch, tuple(windows))


if __name__ == "__main__":
    found = measure_overhead(int(sys.argv[1]) if len(sys.argv) > 1 else _TRIALS)
    print(f"overhead {found.per_turn} s a turn, {found.per_epoch} s an epoch, {len(found.windows)} trials")
    half = len(found.windows) // 2
    print(f"first half {fit(found.windows[:half]).per_turn} s, second half {fit(found.windows[half:]).per_turn} s")
