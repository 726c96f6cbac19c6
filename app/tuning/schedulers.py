"""Who ends trials that are behind, by name."""

from types import SimpleNamespace
from typing import Any

from optuna.trial import FrozenTrial, TrialState
from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)

from app.config import TrainConfig, TuneConfig
from app.errors import RecipeError
from app.tuning.pbt import mutations, within
from app.tuning.promotion import Promotion
from app.tuning.results import CLONED, EPOCH, LAST_REPORTED_EPOCH, NUMBER, VALUE, VALUES
from app.tuning.space import Space
from app.tuning.trials import waits

_HYPERBAND_BRACKETS = 3
_FEWEST_TO_COMPARE = 3


def check_scheduler(config: TuneConfig, train: TrainConfig, space: Space) -> None:
    """Refuse a scheduler that cannot compare such trials, before anything is begun.

    Raises:
        RecipeError: a population's have several workers, or the space has nothing that a population may change.
    """
    if config.scheduler != "pbt":
        return
    if train.workers_range[1] > 1:
        raise RecipeError(
            f"a trial has {train.workers} workers, which cannot go on from another's checkpoint, as scheduler pbt has "
            "them do: set tune.scheduler to asha, or tune.workers to 1"
        )
    mutations(space)


def create_promotion(config: TuneConfig, epochs: int, known: list[FrozenTrial]) -> Promotion | None:
    """The rungs of scheduler asha, with the trials of the search that this one goes on with; None for any other."""
    if config.scheduler != "asha":
        return None
    promotion = Promotion(epochs, config.grace_epochs, config.reduction_factor, config.objectives[0].mode)
    for trial in known:
        if trial.state != TrialState.FAIL:
            promotion.recall(trial.number, trial.intermediate_values, waits(trial))
    return promotion


class _AtRungs(FIFOScheduler):  # type: ignore[misc] # Ray has no types
    """Lets trials wait where ``Promotion`` says so: to Ray Tune they end, and come again as new ones."""

    def __init__(self, promotion: Promotion) -> None:
        super().__init__()
        self._promotion = promotion

    def on_trial_result(self, tune_controller: object, trial: Trial, result: dict[str, Any]) -> str:  # noqa: ARG002
        """Whether the trial goes on now."""
        goes_on = self._promotion.goes_on(trial.config[NUMBER], result[EPOCH], result[VALUE])
        return str(TrialScheduler.CONTINUE if goes_on else TrialScheduler.STOP)


class _Median(MedianStoppingRule):  # type: ignore[misc] # Ray has no types
    """Ray Tune's, without its pauses."""

    def remember(self, past: object, results: list[dict[str, Any]]) -> None:
        """Compare others with a trial that has ended, and judge it no more."""
        self._results[past] += results

    def _on_insufficient_samples(self, tune_controller: object, trial: Trial, time: float) -> str:  # noqa: ARG002
        """A trial that cannot be judged yet goes on."""
        return str(TrialScheduler.CONTINUE)


class _Population(PopulationBasedTraining):  # type: ignore[misc] # Ray has no types
    """Ray Tune's, which refuses a searcher although one that only starts trials does not disturb it."""

    def __init__(self, space: Space, **settings: Any) -> None:
        self._space, self._mutations = space, mutations(space)
        super().__init__(hyperparam_mutations={VALUES: self._mutations}, **settings)

    def on_trial_add(self, tune_controller: object, trial: Trial) -> None:  # noqa: ARG002
        """One more in the population."""
        super().on_trial_add(SimpleNamespace(search_alg=None), trial)

    def _get_new_config(self, trial: Trial, trial_to_clone: Trial) -> tuple[dict[str, Any], dict[str, Any]]:
        """The other trial's values, perturbed, and the epoch of its checkpoint, under this trial's own number."""
        cloned = trial_to_clone.config[VALUES]  # without the keys of other branches
        self._hyperparam_mutations = {VALUES: {key: self._mutations[key] for key in self._mutations if key in cloned}}
        config, operations = super()._get_new_config(trial, trial_to_clone)
        config[VALUES] = within(self._space, config[VALUES])
        epoch = self._trial_state[trial_to_clone].last_result[EPOCH]
        return {**config, NUMBER: trial.config[NUMBER], LAST_REPORTED_EPOCH: epoch, CLONED: True}, operations


def create_scheduler(
    config: TuneConfig, epochs: int, space: Space, promotion: Promotion | None = None
) -> TrialScheduler:
    """The recipe's scheduler, reading the first objective after each of a trial's ``epochs`` but the last."""
    if promotion:
        return _AtRungs(promotion)
    reading: dict[str, Any] = {"time_attr": EPOCH, "metric": VALUE, "mode": config.objectives[0].mode}
    rungs = {"max_t": epochs, "grace_period": min(config.grace_epochs, epochs)}
    match config.scheduler:
        case "hyperband":  # Li et al. 2018, asynchronous; with sampler tpe it is BOHB's (Falkner et al. 2018)
            return AsyncHyperBandScheduler(
                **reading,
                **rungs,
                reduction_factor=config.reduction_factor,
                brackets=_HYPERBAND_BRACKETS,
                stop_last_trials=False,
            )
        case "median":  # Golovin et al. 2017
            return _Median(**reading, grace_period=config.grace_epochs, min_samples_required=_FEWEST_TO_COMPARE)
        case "pbt":  # Jaderberg et al. 2017
            return _Population(space, **reading, perturbation_interval=config.grace_epochs, require_attrs=False)
        case _:
            return FIFOScheduler()


def replay(scheduler: TrialScheduler, ended: list[FrozenTrial]) -> None:
    """Tell a new scheduler of the trials that ended before the search was cut off, so that it compares with them.

    Those that failed are none to compare with.
    """
    for trial in ended:
        if trial.state == TrialState.FAIL:
            continue
        past = SeenTrial(f"past-{trial.number}")
        results = [{EPOCH: epoch, VALUE: value} for epoch, value in sorted(trial.intermediate_values.items())]
        if not results:
            continue
        if isinstance(scheduler, _Median):
            scheduler.remember(past, results)
        elif isinstance(scheduler, AsyncHyperBandScheduler):
            scheduler.on_trial_add(None, past)
            for result in results:
                scheduler.on_trial_result(None, past, result)
            scheduler.on_trial_complete(None, past, results[-1])


class SeenTrial:
    """As much of a trial of Ray Tune's as schedulers look at."""

    def __init__(self, trial_id: str) -> None:
        self.trial_id = trial_id
