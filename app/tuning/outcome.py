"""What a search came to: its numbers, and the recipe with the best values."""

from typing import Any, Self

from optuna.trial import FrozenTrial, TrialState
from pydantic import BaseModel

from app.config import Recipe, dump_recipe, with_values
from app.errors import TuningError
from app.tuning.space import Value
from app.tuning.study import SearchStudy
from app.tuning.trials import CAUSE, STOPPED_EARLY, epochs_of, values_of, worth_of

BEST_FILE = "best.yaml"


class FrontTrial(BaseModel):
    """One of the trials that no other one beats in every objective."""

    trial: int
    epochs: int
    """That it trained; fewer than others if it was cut short."""
    values: dict[str, float]
    params: dict[str, Value]


class TuneMetrics(BaseModel):
    """The outcome of a search."""

    best_value: float
    """Of the first objective."""
    best_values: dict[str, float]
    best_params: dict[str, Value]
    best_trial: int
    best_trial_epochs: int
    """That it trained; fewer than others if it was cut short."""
    trials: int
    """That ended; duplicates are none of them."""
    trials_complete: int
    trials_pruned: int
    """Cut short by the scheduler, or because the search ended."""
    trials_failed: int
    trials_stopped_early: int
    """Complete ones whose training stopped by itself before its last epoch."""
    epochs_trained: int
    pareto_front: list[FrontTrial] = []
    """Of several objectives."""
    ended_because: str | None = None
    """None: all trials were run."""

    @classmethod
    def of(cls, study: SearchStudy, metrics: list[str], reason: str | None) -> Self:
        """The outcome of a search that has ended. Raises TuningError if no trial came to a value."""
        ended, front = study.ended, study.best
        if not front:
            raise TuningError(f"none of {len(ended)} trials came to a value: {_why(ended)}")
        states = [each.state for each in ended]
        named = [_front_trial(metrics, each) for each in front]
        best = named[0]
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
            trials_stopped_early=sum(bool(each.user_attrs.get(STOPPED_EARLY)) for each in ended),
            epochs_trained=study.epochs_trained,
            pareto_front=named if len(metrics) > 1 else [],
            ended_because=reason,
        )


class StoppedMetrics(BaseModel):
    """How far a search came that was asked to end."""

    trials: int
    epochs_trained: int


def recipe_of(recipe: Recipe, trial: FrontTrial, study_name: str) -> str:
    """The recipe with a trial's values, as YAML that ``jobs.train`` takes, and where they are from."""
    values = ", ".join(f"{metric} {value:.6g}" for metric, value in trial.values.items())
    tuned = with_values(recipe, {**trial.params, "tuned_from": {"run": study_name, "trial": trial.trial}})
    if tuned.tune is not None:
        tuned = tuned.model_copy(update={"tune": tuned.tune.model_copy(update={"resume": False})})
    head = (
        f"# {values} in {trial.epochs} epochs: trial {trial.trial} of study {study_name}.\n"
        f"# Found values: {trial.params}\n"
    )
    return head + dump_recipe(tuned)


def _front_trial(metrics: list[str], trial: FrozenTrial) -> FrontTrial:
    values = dict(zip(metrics, worth_of(trial), strict=True))
    return FrontTrial(trial=trial.number, epochs=epochs_of(trial), values=values, params=values_of(trial))


def _why(ended: list[FrozenTrial]) -> str:
    causes: list[Any] = [each.user_attrs[CAUSE] for each in ended if CAUSE in each.user_attrs]
    if not causes:
        return "the search ended first"
    return f"trial {ended[-1].number}, after {epochs_of(ended[-1])} epochs: {causes[-1]}"
