"""Measure the cost of a search in a study of many trials, and write MANY.md: python -m benchmarks.tuning.many"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import optuna
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import event, make_url
from sqlalchemy.engine import Engine
from sqlalchemy.engine.interfaces import DBAPIConnection

from app.config import TuneConfig, load_recipe
from app.tuning.space import load_space
from app.tuning.storage import StudyPlace
from app.tuning.study import SearchStudy
from app.tuning.trials import EPOCHS, KEPT, VALUES
from benchmarks.machine import load_average, machine, today, versions
from benchmarks.markdown import table

_RECIPE = Path(__file__).parents[2] / "recipes/digits.yaml"
_RESULTS = Path(__file__).with_name("MANY.md")
_PROPOSALS = 5
_T = TypeVar("_T")

_HEAD = """# A study of many trials

Written by `python -m benchmarks.tuning.many`. Milliseconds of the search process, without the training of trials. The
study is on a local disk and already has the given number of trials. `resume` is measured once. The other rows are
medians of 5 trials, after a first one that does not count. The space is `tune_spaces.image:space`, the sampler `tpe`.

"""


@dataclass(frozen=True)
class Costs:
    """Milliseconds in a study that already has ``trials`` trials."""

    trials: int
    resume: float
    proposal: float
    epoch: float
    end: float
    best: float


class Many:
    """A study whose first ``trials`` trials were drawn at random."""

    def __init__(self, trials: int, folder: Path) -> None:
        self.trials, self._max_trials = trials, trials + _PROPOSALS + 1
        self._recipe = load_recipe(_RECIPE, [f"tune.trials={self._max_trials}", "tune.scheduler=none"])
        assert self._recipe.tune is not None
        self._config: TuneConfig = self._recipe.tune
        self._space = load_space(self._config.space, self._recipe)
        self._place = StudyPlace(make_url(f"sqlite:///{folder / f'{trials}.db'}"))

    def fill(self) -> None:
        """Create the study with its trials."""
        study = SearchStudy.create("many", self._place, self._space, self._recipe, self._config)
        drawn = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        now = datetime.now()
        for number in range(self.trials):
            trial = drawn.ask()
            values, value = self._space.draw(trial), (number * 7919 % 1000) / 1000
            study.study.add_trial(
                FrozenTrial(
                    number=-1,
                    trial_id=-1,
                    state=TrialState.COMPLETE,
                    value=value,
                    datetime_start=now,
                    datetime_complete=now,
                    params=trial.params,
                    distributions=trial.distributions,
                    user_attrs={VALUES: values, EPOCHS: 1, KEPT: [-value, value]},
                    system_attrs={},
                    intermediate_values={1: value},
                )
            )

    def measure(self) -> Costs:
        """Measure resuming the study and running a few more trials."""
        study, resume = _timed(self._resume)
        laps = [self._run_trial(study) for _ in range(_PROPOSALS + 1)]
        proposal, epoch, end, best = (statistics.median(column) for column in zip(*laps[1:], strict=True))
        return Costs(self.trials, resume, proposal, epoch, end, best)

    def _resume(self) -> SearchStudy:
        return SearchStudy.resume("many", self._place, self._space, self._recipe, self._config)

    def _run_trial(self, study: SearchStudy) -> tuple[float, float, float, float]:
        proposal, proposal_ms = _timed(lambda: study.ask(self._max_trials))
        assert proposal is not None
        _, epoch_ms = _timed(lambda: study.report(proposal.number, 1, 0.5, cost=-0.5))
        _, end_ms = _timed(lambda: study.complete(proposal.number, [0.5], stopped_early=False))
        _, best_ms = _timed(lambda: study.best)
        return proposal_ms, epoch_ms, end_ms, best_ms


def _timed(action: Callable[[], _T]) -> tuple[_T, float]:
    began = time.perf_counter()
    result = action()
    return result, 1000 * (time.perf_counter() - began)


def _write_without_waiting(connection: DBAPIConnection, _: object) -> None:
    """Do not wait for the disk while the study is prepared."""
    connection.cursor().execute("PRAGMA synchronous=OFF")


def main() -> None:
    """Print the table and write it to MANY.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning.many", description=__doc__)
    parser.add_argument("--trials", type=int, nargs="+", default=[100, 1_000, 10_000])
    measured = []
    with tempfile.TemporaryDirectory(prefix="bench-tuning-") as folder:
        for trials in parser.parse_args().trials:
            many = Many(trials, Path(folder))
            event.listen(Engine, "connect", _write_without_waiting)
            many.fill()
            event.remove(Engine, "connect", _write_without_waiting)
            measured.append(many.measure())
            print(measured[-1], flush=True)
    rows = [
        ("resume", *(f"{costs.resume:,.0f}" for costs in measured)),
        ("propose a trial", *(f"{costs.proposal:,.0f}" for costs in measured)),
        ("report an epoch", *(f"{costs.epoch:,.1f}" for costs in measured)),
        ("end a trial", *(f"{costs.end:,.1f}" for costs in measured)),
        ("find the best trial", *(f"{costs.best:,.1f}" for costs in measured)),
    ]
    header = ("", *(f"{costs.trials:,} trials" for costs in measured))
    about = f"{machine()}; {versions(['optuna', 'sqlalchemy'])}; {today()}, load average {load_average()}"
    text = f"{_HEAD}{about}\n\n{table(header, rows)}\n"
    _RESULTS.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
