"""The outcome of a search: its metrics, and the recipe with the best values."""

from collections.abc import Mapping
from typing import Self

from optuna.trial import FrozenTrial, TrialState
from pydantic import BaseModel

from app.config import Recipe, dump_recipe
from app.errors import TuningError
from app.tuning.space import Value
from app.tuning.study import SearchStudy
from app.tuning.trial_config import with_drawn
from app.tuning.trials import CAUSE, STOPPED_EARLY, epochs_of, objective_values, values_of

BEST_FILE = "best.yaml"


class ParetoTrial(BaseModel):
    """A trial of the Pareto front. With one objective, this is the best trial."""

    trial: int
    epochs: int
    """Trained epochs; fewer than others have if the trial was pruned."""
    values: dict[str, float]
    params: dict[str, Value]


class TuneMetrics(BaseModel):
    """The outcome of a search."""

    best_value: float
    """The best trial's first objective."""
    best_values: dict[str, float]
    best_params: dict[str, Value]
    best_trial: int
    best_trial_epochs: int
    """Trained epochs; fewer than others have if the trial was pruned."""
    trials: int
    """The number of trials that ended, without duplicates."""
    trials_complete: int
    trials_pruned: int
    """Ended by the scheduler, or because the search ended."""
    trials_failed: int
    trials_stopped_early: int
    """Complete trials that early stopping ended before their last epoch."""
    epochs_trained: int
    pareto_front: list[ParetoTrial] = []
    """Empty with a single objective."""
    ended_because: str | None = None
    """None if all trials were run."""

    @classmethod
    def of(cls, study: SearchStudy, metrics: list[str], reason: str | None) -> Self:
        """Return the outcome of a search that has ended. Raise TuningError if no trial has a value."""
        ended, front = study.ended, study.best
        if not front:
            raise TuningError(f"none of {len(ended)} trials has a value: {_why_none(ended)}").of("trials.none_complete")
        states = [trial.state for trial in ended]
        pareto_front = [_pareto_trial(metrics, trial) for trial in front]
        best = pareto_front[0]
        return cls(
            best_value=best.values[metrics[0]],
            best_values=best.values,
            best_params=best.params,
            best_trial=best.trial,
            best_trial_epochs=best.epochs,
            trials=len(ended),
            trials_complete=states.count(TrialState.COMPLETE),
            trials_pruned=states.count(TrialState.PRUNED),
            trials_failed=states.count(TrialState.FAIL),
            trials_stopped_early=sum(bool(trial.user_attrs.get(STOPPED_EARLY)) for trial in ended),
            epochs_trained=study.epochs_trained,
            pareto_front=pareto_front if len(metrics) > 1 else [],
            ended_because=reason,
        )


class StoppedSearchMetrics(BaseModel):
    """The progress of a search that was asked to stop."""

    trials: int
    epochs_trained: int


def tuned_recipe(recipe: Recipe, params: Mapping[str, Value], trial: int, study_name: str) -> Recipe:
    """Return the recipe with the values of a trial. Its ``tuned_from`` names the study and the trial."""
    tuned = with_drawn(recipe, {**params, "tuned_from": {"run": study_name, "trial": trial}})
    if tuned.tune is None:
        return tuned
    # This recipe starts something new, even if the search itself was resumed.
    return tuned.model_copy(update={"tune": tuned.tune.model_copy(update={"resume": False})})


def best_yaml(recipe: Recipe, trial: ParetoTrial, study_name: str) -> str:
    """Return the recipe with a trial's values, as YAML for ``jobs.train``."""
    values = ", ".join(f"{metric} {value:.6g}" for metric, value in trial.values.items())
    tuned = tuned_recipe(recipe, trial.params, trial.trial, study_name)
    header = (
        f"# {values} in {trial.epochs} epochs: trial {trial.trial} of study {study_name}.\n"
        f"# Found values: {trial.params}\n"
    )
    return header + dump_recipe(tuned)


def _pareto_trial(metrics: list[str], trial: FrozenTrial) -> ParetoTrial:
    values = dict(zip(metrics, objective_values(trial), strict=True))
    return ParetoTrial(trial=trial.number, epochs=epochs_of(trial), values=values, params=values_of(trial))


def _why_none(ended: list[FrozenTrial]) -> str:
    failed = [trial for trial in ended if CAUSE in trial.user_attrs]
    if not failed:
        return "the search ended first"
    last = failed[-1]
    return f"trial {last.number}, after {epochs_of(last)} epochs: {last.user_attrs[CAUSE]}"
