"""What a person looks at after a search: a table of all trials, and a page of Optuna's plots."""

import io
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
from app.page import Page
from app.storage import write_atomically
from app.tuning.outcome import TuneMetrics
from app.tuning.trials import CAUSE, DUPLICATE_OF, FAILURES, LEARNED_FROM, STOPPED_EARLY, epochs_of, values_of, worth_of

TRIALS_FILE, REPORT_FILE = "trials.parquet", "report.html"

Plot = Callable[[], Any]


def write_trials(study: Study, objectives: list[Objective], folder: UPath) -> UPath:
    """``trials.parquet``: a row for each trial of the study, also for duplicates and for those it learned from."""
    rows = [_row(each, objectives) for each in study.get_trials(deepcopy=False) if each.state != TrialState.WAITING]
    buffer = io.BytesIO()
    pd.DataFrame(rows).to_parquet(buffer, index=False)
    write_atomically(folder / TRIALS_FILE, buffer.getvalue())
    return folder / TRIALS_FILE


def write_report(study: Study, objectives: list[Objective], metrics: TuneMetrics, folder: UPath) -> UPath:
    """``report.html``: one page that needs no network."""
    page = Page(study.study_name)
    page.add_facts(_summary(metrics))
    for title, plot in _plots(study, objectives):
        page.add_heading(title)
        _add_plot(page, plot)
    page.write(folder / REPORT_FILE)
    return folder / REPORT_FILE


def _row(trial: FrozenTrial, objectives: list[Objective]) -> dict[str, Any]:
    attributes = trial.user_attrs
    values: Sequence[float | None] = worth_of(trial) or [None] * len(objectives)
    return {
        "trial": trial.number,
        "state": trial.state.name.lower(),
        **{each.metric: value for each, value in zip(objectives, values, strict=True)},
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
    if len(objectives) in (2, 3):
        yield "Pareto front", partial(plots.plot_pareto_front, study, target_names=[each.metric for each in objectives])
    for index, name in enumerate(each.metric for each in objectives):
        of: dict[str, Any] = {"target_name": name}
        if len(objectives) > 1:
            of["target"] = partial(_value, index)
        yield f"History of {name}", partial(plots.plot_optimization_history, study, **of)
        yield f"What {name} depends on", partial(plots.plot_param_importances, study, **of)
        yield f"Parallel coordinates of {name}", partial(plots.plot_parallel_coordinate, study, **of)
        yield f"Slices of {name}", partial(plots.plot_slice, study, **of)
    if len(objectives) == 1:
        yield "Trials by epoch", partial(plots.plot_intermediate_values, study)
    yield "Timeline", partial(plots.plot_timeline, study)


def _value(index: int, trial: FrozenTrial) -> float:
    return float(trial.values[index])


def _add_plot(page: Page, plot: Plot) -> None:
    """The plot; a sentence where there are too few trials for it."""
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
        "training stopped early by itself in": metrics.trials_stopped_early,
        "epochs trained": metrics.epochs_trained,
        **metrics.best_params,
    }
