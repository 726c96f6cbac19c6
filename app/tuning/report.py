"""The report of a search: a table of all trials, and a page with Optuna's plots."""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import optuna.visualization as plots
import pandas as pd
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from upath import UPath

from app.config import Objective
from app.pages.content import State
from app.pages.page import REPORT_FILE, Page
from app.storage import stream_atomically
from app.tuning.outcome import TuneMetrics
from app.tuning.trials import (
    CAUSE,
    DUPLICATE_OF,
    FAILURES,
    LEARNED_FROM,
    STOPPED_EARLY,
    epochs_of,
    objective_values,
    values_of,
)

TRIALS_FILE = "trials.parquet"

Plot = Callable[[], Any]


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
    page = Page(study.study_name, State(metrics.ended_because or "all trials ended", "good"))
    page.add_facts(_summary(metrics))
    for title, plot in _plots(study, objectives):
        page.add_heading(title)
        _add_plot(page, plot)
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


def _plots(study: Study, objectives: list[Objective]) -> Iterator[tuple[str, Plot]]:
    names = [objective.metric for objective in objectives]
    if len(objectives) in (2, 3):
        yield "Pareto front", partial(plots.plot_pareto_front, study, target_names=names)
    for index, name in enumerate(names):
        target: dict[str, Any] = {"target_name": name}
        if len(objectives) > 1:
            target["target"] = partial(_value, index)
        yield f"History of {name}", partial(plots.plot_optimization_history, study, **target)
        yield f"Importance for {name}", partial(plots.plot_param_importances, study, **target)
        yield f"Parallel coordinates of {name}", partial(plots.plot_parallel_coordinate, study, **target)
        yield f"Slices of {name}", partial(plots.plot_slice, study, **target)
    if len(objectives) == 1:
        yield "Trials by epoch", partial(plots.plot_intermediate_values, study)
    yield "Timeline", partial(plots.plot_timeline, study)


def _value(index: int, trial: FrozenTrial) -> float:
    return float(trial.values[index])


def _add_plot(page: Page, plot: Plot) -> None:
    """Add a plot, or a sentence if there are too few trials for it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            page.add_figure(plot())
    except (ValueError, RuntimeError, ZeroDivisionError) as error:
        page.add_text(f"Too few complete trials for this plot: {error}")


def _summary(metrics: TuneMetrics) -> dict[str, object]:
    return {
        "best trial": metrics.best_trial,
        **metrics.best_values,
        "trials": f"{metrics.trials}: {metrics.trials_complete} complete, {metrics.trials_pruned} pruned, "
        f"{metrics.trials_failed} failed",
        "ended by early stopping": metrics.trials_stopped_early,
        "epochs trained": metrics.epochs_trained,
        **metrics.best_params,
    }
