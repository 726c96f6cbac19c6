"""The schedulers that end or pause trials, by their name in the recipe."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from app.config import TrainConfig, TuneConfig
from app.errors import RecipeError
from app.tuning.promotion import Promotion
from app.tuning.ray_internals import Halving, MedianRule, Population
from app.tuning.space import Space, Value
from app.tuning.trial_config import ENDED, EPOCH, NUMBER, VALUE
from app.tuning.trials import is_paused

_HYPERBAND_BRACKETS = 3
_MIN_TRIALS_TO_COMPARE = 3

_MUTABLE = ("train.optimizer.", "train.label_smoothing", "train.gradient_clipping", "model.args.dropout")
"""Prefixes of the keys that may change while a trial trains."""
_IMMUTABLE = ("train.optimizer.name",)
"""Exceptions: an optimizer cannot read another one's checkpoint."""


def check_scheduler(config: TuneConfig, train: TrainConfig, space: Space) -> None:
    """Refuse a scheduler that cannot handle the trials, before any resource is taken.

    Raises:
        RecipeError: with ``pbt``, trials have several workers, or the space has no key that may change.
    """
    if config.scheduler != "pbt":
        return
    if train.workers_range[1] > 1:
        raise RecipeError(
            f"tune.scheduler pbt needs trials of one worker, and a trial has {train.workers}: set tune.scheduler to "
            "asha, or tune.workers to 1"
        ).of("scheduler.several_workers", "tune.scheduler")
    mutations(space)


def create_promotion(config: TuneConfig, epochs: int, known: list[FrozenTrial]) -> Promotion | None:
    """Return the rungs of scheduler asha, with the trials of the resumed search; None for any other scheduler."""
    if config.scheduler != "asha":
        return None
    promotion = Promotion(epochs, config.grace_epochs, config.reduction_factor, config.objectives[0].mode)
    for trial in known:
        if trial.state != TrialState.FAIL:
            promotion.recall(trial.number, trial.intermediate_values, is_paused(trial))
    return promotion


class _PauseAtRungs(FIFOScheduler):  # type: ignore[misc] # Ray has no types
    """Pause trials where ``Promotion`` says so. Ray Tune sees them end, and later start as new trials."""

    def __init__(self, promotion: Promotion) -> None:
        super().__init__()
        self._promotion = promotion

    def on_trial_result(self, tune_controller: object, trial: Trial, result: dict[str, Any]) -> str:  # noqa: ARG002
        """Return whether the trial continues now."""
        goes_on = self._promotion.goes_on(trial.config[NUMBER], result[EPOCH], result[VALUE])
        return str(TrialScheduler.CONTINUE if goes_on else TrialScheduler.STOP)

    def on_trial_complete(self, tune_controller: object, trial: Trial, result: dict[str, Any]) -> None:  # noqa: ARG002
        """Record a trial whose training ended at a rung, so that later trials are compared with it."""
        if ENDED in result:
            self._promotion.recall(trial.config[NUMBER], {result[EPOCH]: result[VALUE]}, is_paused=False)


def create_scheduler(
    config: TuneConfig, epochs: int, space: Space, promotion: Promotion | None = None
) -> TrialScheduler:
    """Return the recipe's scheduler. It reads the first objective after each of a trial's ``epochs`` but the last."""
    if promotion:
        return _PauseAtRungs(promotion)
    reading: dict[str, Any] = {"time_attr": EPOCH, "metric": VALUE, "mode": config.objectives[0].mode}
    rungs = {"max_t": epochs, "grace_period": min(config.grace_epochs, epochs)}
    match config.scheduler:
        case "hyperband":  # Li et al. 2018, asynchronous. With sampler tpe, this is BOHB (Falkner et al. 2018)
            return Halving(
                **reading,
                **rungs,
                reduction_factor=config.reduction_factor,
                brackets=_HYPERBAND_BRACKETS,
                # A trial ends by itself after its last epoch. If it were stopped, it would count as pruned.
                stop_last_trials=False,
            )
        case "median":  # Golovin et al. 2017
            return MedianRule(**reading, grace_period=config.grace_epochs, min_samples_required=_MIN_TRIALS_TO_COMPARE)
        case "pbt":  # Jaderberg et al. 2017
            return Population(
                mutations(space),
                partial(_clip, space),
                **reading,
                perturbation_interval=config.grace_epochs,
                require_attrs=False,
            )
        case _:
            return FIFOScheduler()


def replay(scheduler: TrialScheduler, ended: list[FrozenTrial]) -> None:
    """Tell a new scheduler about the trials of the resumed search, so that it compares with them. Skip failed ones."""
    for trial in ended:
        if trial.state == TrialState.FAIL:
            continue
        past = PastTrial(f"past-{trial.number}")
        results = [{EPOCH: epoch, VALUE: value} for epoch, value in sorted(trial.intermediate_values.items())]
        if not results:
            continue
        if isinstance(scheduler, MedianRule):
            scheduler.add_past_trial(past, results)
        elif isinstance(scheduler, Halving):
            scheduler.on_trial_add(None, past)
            for result in results:
                scheduler.on_trial_result(None, past, result)
            scheduler.on_trial_complete(None, past, results[-1])


class PastTrial:
    """The part of Ray Tune's ``Trial`` that schedulers read."""

    def __init__(self, trial_id: str) -> None:
        self.trial_id = trial_id


def mutations(space: Space) -> dict[str, Any]:
    """Return the keys that may change when a trial continues from another's checkpoint, each with how to draw it.

    Raises:
        RecipeError: the space has none.
    """
    mutable = {
        key: _mutation(distribution)
        for key, distribution in space.distributions.items()
        if key.startswith(_MUTABLE) and not key.startswith(_IMMUTABLE)
    }
    if not mutable:
        raise RecipeError(
            f"tune.scheduler is pbt, and tune.space {space.name!r} has no key that can change during training, such as "
            "train.optimizer.lr: add one, or set scheduler to asha"
        ).of("space.nothing_mutable", "tune.space")
    return mutable


def _mutation(distribution: BaseDistribution) -> list[Any] | Callable[..., Any]:
    match distribution:
        case CategoricalDistribution():
            return list(distribution.choices)
        case FloatDistribution():
            draw = tune.loguniform if distribution.log else tune.uniform
            return draw(distribution.low, distribution.high)  # type: ignore[no-any-return]
        case IntDistribution():
            # Ray Tune excludes the upper end.
            draw = tune.lograndint if distribution.log else tune.randint
            return draw(distribution.low, distribution.high + 1)  # type: ignore[no-any-return]
    raise AssertionError(f"unknown distribution {distribution}")


def _clip(space: Space, values: Mapping[str, Value]) -> dict[str, Value]:
    """Put values that Ray Tune scaled by a factor back into their ranges and onto their steps."""
    return {
        key: _nearest(space.distributions[key], value) if key in space.distributions else value
        for key, value in values.items()
    }


def _nearest(distribution: BaseDistribution, value: Value) -> Value:
    if not isinstance(distribution, FloatDistribution | IntDistribution):
        return value
    low, step = distribution.low, distribution.step
    stepped = low + round((value - low) / step) * step if step else value
    return min(max(stepped, low), distribution.high)
