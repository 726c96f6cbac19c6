"""Time a search, without the training of trials, in a study that already has many trials."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TypeVar

import optuna
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import event, make_url
from sqlalchemy.engine import Engine
from sqlalchemy.engine.interfaces import DBAPIConnection
from upath import UPath

from app.config import load_recipe
from app.tuning.space import Space, load_space
from app.tuning.storage import StudyLocation
from app.tuning.study import SearchStudy
from app.tuning.trials import EPOCHS, KEPT, VALUES
from benchmarks.many.measures import Cost
from benchmarks.many.population import RECIPE

_PROPOSALS = 5
_CALLS = ("propose a trial", "report an epoch", "end a trial", "find the best trial")
_NAME = "many"
_T = TypeVar("_T")


def of_trials(storage: UPath, count: int) -> dict[str, Cost]:
    """Resume a study with ``count`` trials and run a few more. The first of these warms up and does not count."""
    max_trials = count + _PROPOSALS + 1
    recipe = load_recipe(RECIPE, [f"tune.trials={max_trials}", "tune.scheduler=none"])
    assert recipe.tune is not None
    config, space = recipe.tune, load_space(recipe.tune.space, recipe)
    storage.mkdir(parents=True, exist_ok=True)
    location = StudyLocation(make_url(f"sqlite:///{storage.path}/study.db"))
    with _without_waiting_for_the_disk():
        _fill(SearchStudy.create(_NAME, location, space, recipe, config), space, count)
    study, resume_s = _timed(lambda: SearchStudy.resume(_NAME, location, space, recipe, config))
    laps = [_run_trial(study, max_trials) for _ in range(_PROPOSALS + 1)]
    medians = map(statistics.median, zip(*laps[1:], strict=True))
    seconds = {"resume": resume_s, **dict(zip(_CALLS, medians, strict=True))}
    return {call: Cost(spent_s, 0) for call, spent_s in seconds.items()}


def _fill(study: SearchStudy, space: Space, count: int) -> None:
    """Add trials that a random search has drawn."""
    drawn = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    now = datetime.now()
    for number in range(count):
        trial = drawn.ask()
        values, value = space.draw(trial), (number * 7919 % 1000) / 1000
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


def _run_trial(study: SearchStudy, max_trials: int) -> Sequence[float]:
    """Run a trial of one epoch, without its training. Return the seconds of each call."""
    proposal, ask_s = _timed(lambda: study.ask(max_trials))
    assert proposal is not None
    _, report_s = _timed(lambda: study.report(proposal.number, 1, 0.5, cost=(-0.5, 0.0)))
    _, complete_s = _timed(lambda: study.complete(proposal.number, [0.5], stopped_early=False))
    _, best_s = _timed(lambda: study.best)
    return ask_s, report_s, complete_s, best_s


def _timed(work: Callable[[], _T]) -> tuple[_T, float]:
    began_s = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began_s


@contextmanager
def _without_waiting_for_the_disk() -> Iterator[None]:
    """Do not sync what is only prepared. The measured calls do."""

    def configure(connection: DBAPIConnection, _: object) -> None:
        connection.cursor().execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "connect", configure)
    try:
        yield
    finally:
        event.remove(Engine, "connect", configure)
