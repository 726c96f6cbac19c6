"""The report of a search: a table of all trials, and a page with its charts."""

import json
import math
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import pandas as pd
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from upath import UPath

from app.config import Objective
from app.pages.content import Chart, Series, State
from app.pages.page import REPORT_FILE, Page
from app.pages.words import MISSING, duration, number
from app.runs import recipe_named_in
from app.storage import stream_atomically
from app.tuning.outcome import TuneMetrics
from app.tuning.trials import (
    CAUSE,
    DUPLICATE_OF,
    ENDINGS,
    FAILURES,
    LEARNED_FROM,
    STOPPED_EARLY,
    best_trials,
    epochs_of,
    objective_values,
    own_trials,
    values_of,
)

TRIALS_FILE = "trials.parquet"
_MIN_FOR_IMPORTANCE = 10
"""Complete trials from which importances are more than chance."""
_MAX_SLICES, _MAX_CURVES, _MAX_ROWS, _MAX_BARS = 12, 8, 30, 300
"""Parameters, trials by epoch, rows of the table and trials of the timeline that a page shows."""


def write_trials(study: Study, objectives: list[Objective], folder: UPath) -> UPath:
    """Write ``trials.parquet``: a row for each trial of the study, with duplicates and those of earlier studies."""
    # Nothing here changes a trial, and deep copies of thousands take seconds.
    begun = [trial for trial in study.get_trials(deepcopy=False) if trial.state != TrialState.WAITING]
    rows = [_row(trial, objectives) for trial in begun]
    with stream_atomically(folder / TRIALS_FILE) as file:
        pd.DataFrame(rows).to_parquet(file, index=False)
    return folder / TRIALS_FILE


def write_report(study: Study, objectives: list[Objective], metrics: TuneMetrics, folder: UPath) -> UPath:
    """Write ``report.html``: one page that needs no network."""
    names = " and ".join(objective.metric for objective in objectives)
    state = State(metrics.ended_because or "all trials ended", "good")
    page = Page(f"{recipe_named_in(study.study_name)}, tuned for {names}", state)
    page.add_figures({name: number(value) for name, value in metrics.best_values.items()} | _counts(metrics))
    page.add_heading(f"Values of trial {metrics.best_trial}, the best")
    page.add_facts({key: number(value) for key, value in metrics.best_params.items()})
    trials = own_trials(study)
    if len(objectives) > 1:
        page.add_heading("Pareto front")
        page.add_charts(_front(study, trials, objectives))
    for index, objective in enumerate(objectives):
        _add_objective(page, study, trials, objective, index)
    if len(objectives) == 1:
        _add_epochs(page, trials, objectives[0])
    page.add_heading("Timeline")
    page.add_charts(_timeline(trials[-_MAX_BARS:]))
    _add_trials(page, study, trials, objectives)
    page.write(folder / REPORT_FILE)
    return folder / REPORT_FILE


def _row(trial: FrozenTrial, objectives: list[Objective]) -> dict[str, Any]:
    attributes = trial.user_attrs
    values: Sequence[float | None] = objective_values(trial) or [None] * len(objectives)
    return {
        "trial": trial.number,
        "state": trial.state.name.lower(),
        **{objective.metric: value for objective, value in zip(objectives, values, strict=True)},
        "epochs": epochs_of(trial),
        "stopped_early": bool(attributes.get(STOPPED_EARLY, False)),
        "cause": attributes.get(CAUSE),
        "failures": len(attributes.get(FAILURES, [])),
        "duplicate_of": attributes.get(DUPLICATE_OF),
        "learned_from": attributes.get(LEARNED_FROM),
        "began": trial.datetime_start,
        "ended": trial.datetime_complete,
        "by_epoch": json.dumps(trial.intermediate_values),
        **values_of(trial),
    }


def _counts(metrics: TuneMetrics) -> dict[str, object]:
    return {
        "trials": metrics.trials,
        "complete": metrics.trials_complete,
        "pruned": metrics.trials_pruned,
        "failed": metrics.trials_failed,
        "stopped early": metrics.trials_stopped_early,
        "epochs trained": metrics.epochs_trained,
    }


def _add_objective(page: Page, study: Study, trials: list[FrozenTrial], objective: Objective, index: int) -> None:
    """Add what the trials say of one objective: its history, and what it depends on."""
    name = objective.metric
    known = [trial for trial in trials if len(objective_values(trial)) > index]
    page.add_heading(f"History of {name}")
    page.add_charts(_history(known, objective, index))
    page.add_heading(f"Importance for {name}")
    importances = _importances(study, index)
    if importances:
        page.add_bars(importances)
    else:
        page.add_text(f"Not known: it takes {_MIN_FOR_IMPORTANCE} complete trials with different values.")
    page.add_heading(f"Slices of {name}")
    keys = list(dict.fromkeys([*importances, *(key for trial in known for key in trial.params)]))
    page.add_charts(*(_slice(key, known, name, index) for key in keys[:_MAX_SLICES]))
    if len(keys) > _MAX_SLICES:
        page.add_text(f"{len(keys) - _MAX_SLICES} more keys are in {TRIALS_FILE}.")


def _importances(study: Study, index: int) -> dict[str, float]:
    """Return each key's share of the objective's variance, the largest first; empty if there are too few trials."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(complete) < _MIN_FOR_IMPORTANCE or len({trial.values[index] for trial in complete}) == 1:
        return {}
    from optuna.importance import get_param_importances  # scikit-learn takes a second to import

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_param_importances(study, target=partial(_value, index))


def _value(index: int, trial: FrozenTrial) -> float:
    return float(trial.values[index])


def _history(trials: list[FrozenTrial], objective: Objective, index: int) -> Chart:
    values = [objective_values(trial)[index] for trial in trials]
    best = list(accumulate(values, max if objective.mode == "max" else min))
    clouds = [
        _cloud(name, found, [trial.number for trial in found], [objective_values(trial)[index] for trial in found])
        for state, name in ENDINGS.items()
        if (found := [trial for trial in trials if trial.state == state])
    ]
    line = Series("best so far", [trial.number for trial in trials], best)
    return Chart(f"{objective.metric} by trial", "trial", objective.metric, [line, *clouds])


def _slice(key: str, trials: list[FrozenTrial], metric: str, index: int) -> Chart:
    """Return the objective by the values of one key. Values without an order stand side by side."""
    found = [trial for trial in trials if key in trial.params]
    kind = found[-1].distributions[key]
    choices = [str(choice) for choice in kind.choices] if isinstance(kind, CategoricalDistribution) else []
    places = [choices.index(str(trial.params[key])) if choices else float(trial.params[key]) for trial in found]
    points = _cloud(key, found, places, [objective_values(trial)[index] for trial in found])
    return Chart(key, key, metric, [points], log_x=_is_log(kind), x_names=choices)


def _is_log(kind: BaseDistribution) -> bool:
    return bool(getattr(kind, "log", False))


def _front(study: Study, trials: list[FrozenTrial], objectives: list[Objective]) -> Chart:
    """Return the first two objectives of all complete trials."""
    best = {trial.number for trial in best_trials(study)}
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    groups = {"other trials": False, "Pareto front": True}
    clouds = [
        _cloud(name, found, [trial.values[0] for trial in found], [trial.values[1] for trial in found])
        for name, is_best in groups.items()
        if (found := [trial for trial in complete if (trial.number in best) == is_best])
    ]
    one, other = (objective.metric for objective in objectives[:2])
    return Chart(f"{other} by {one}", one, other, clouds)


def _cloud(name: str, trials: list[FrozenTrial], x: Sequence[float], y: Sequence[float]) -> Series:
    return Series(name, x, y, "points", labels=[f"trial {trial.number}" for trial in trials])


def _add_epochs(page: Page, trials: list[FrozenTrial], objective: Objective) -> None:
    curves = [
        Series(
            f"trial {trial.number}", list(trial.intermediate_values), list(trial.intermediate_values.values()), "both"
        )
        for trial in _best_first(trials, objective)[:_MAX_CURVES]
        if trial.intermediate_values
    ]
    if curves:
        page.add_heading("Trials by epoch")
        title = f"{objective.metric} of the best {len(curves)} trials"
        page.add_charts(Chart(title, "epoch", objective.metric, curves))


def _best_first(trials: list[FrozenTrial], objective: Objective) -> list[FrozenTrial]:
    """Return the trials that have a value, by their first objective."""
    known = [trial for trial in trials if objective_values(trial)]
    return sorted(known, key=lambda trial: objective_values(trial)[0], reverse=objective.mode == "max")


def _timeline(trials: list[FrozenTrial]) -> Chart:
    """Return when each trial ran: a line from its start to its end."""
    timed = [trial for trial in trials if trial.datetime_start and trial.datetime_complete]
    began = min((trial.datetime_start for trial in timed if trial.datetime_start), default=None)
    series = []
    for state, name in ENDINGS.items():
        found = [trial for trial in timed if trial.state == state]
        times = [(trial.datetime_start, trial.datetime_complete, trial.datetime_complete) for trial in found]
        x = [(moment - began).total_seconds() / 60 for row in times for moment in row if moment and began]
        y = [value for trial in found for value in (float(trial.number), float(trial.number), math.nan)]
        if found:
            series.append(Series(name, x, y))
    return Chart("When each trial ran", "minutes", "trial", series)


def _add_trials(page: Page, study: Study, trials: list[FrozenTrial], objectives: list[Objective]) -> None:
    """Add the best trials as a table. Those of the result stand out."""
    shown = _best_first(trials, objectives[0])[:_MAX_ROWS]
    best = {trial.number for trial in best_trials(study)}
    keys = list(dict.fromkeys(key for trial in shown for key in values_of(trial)))
    page.add_heading(f"The best {len(shown)} of {len(trials)} trials")
    page.add_table(
        ["trial", "state", *(objective.metric for objective in objectives), "epochs", "time", *keys],
        [
            [
                trial.number,
                ENDINGS.get(trial.state, "running"),
                *map(number, (objective_values(trial) + [None] * len(objectives))[: len(objectives)]),
                epochs_of(trial),
                duration(trial.duration.total_seconds()) if trial.duration else MISSING,
                *(number(values_of(trial).get(key)) for key in keys),
            ]
            for trial in shown
        ],
        marked=[row for row, trial in enumerate(shown) if trial.number in best],
    )
    page.add_text(f"{TRIALS_FILE} has every trial.")
