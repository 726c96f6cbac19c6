"""The searches that are compared. Each proposes a configuration and says after every epoch whether it goes on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import optuna
from optuna.trial import Trial
from ray.tune.schedulers import AsyncHyperBandScheduler, TrialScheduler
from sqlalchemy import make_url

from app.config import Recipe, TuneConfig
from app.tuning.samplers import create_sampler
from app.tuning.schedulers import PastTrial, create_promotion
from app.tuning.searcher import StudySearcher
from app.tuning.space import Space
from app.tuning.storage import StudyLocation
from app.tuning.study import SearchStudy
from app.tuning.trial_config import EPOCH, NUMBER, VALUE, VALUES
from app.tuning.trials import epochs_of

Values = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A configuration to train, from an epoch on."""

    values: Values
    epochs_done: int = 0
    """Epochs that the same configuration trained before it was paused."""


class Contender(Protocol):
    """A search that is asked and told, one trial after another."""

    def propose(self) -> Task | None:
        """Return the next configuration to train; None if there is none."""
        ...

    def goes_on(self, epoch: int, value: float) -> bool:
        """Whether the trial trains another epoch."""
        ...

    def pruned(self) -> None:
        """The trial was stopped because it should not go on, or not now."""
        ...

    def ended(self, best: float | None) -> None:
        """The trial trained to its end; None if it broke before its first epoch ended."""
        ...


class _OptunaSearch:
    """Optuna alone: a sampler, and a pruner that Optuna asks."""

    def __init__(self, space: Space, sampler: optuna.samplers.BaseSampler, pruner: optuna.pruners.BasePruner) -> None:
        self._space = space
        self._study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
        self._trial: Trial

    def propose(self) -> Task | None:
        self._trial = self._study.ask()
        derived = self._space.suggest(self._trial)
        return Task({**self._trial.params, **derived})

    def goes_on(self, epoch: int, value: float) -> bool:
        self._trial.report(value, epoch)
        return not self._trial.should_prune()

    def pruned(self) -> None:
        self._study.tell(self._trial, state=optuna.trial.TrialState.PRUNED)

    def ended(self, best: float | None) -> None:
        state = optuna.trial.TrialState.FAIL if best is None else optuna.trial.TrialState.COMPLETE
        self._study.tell(self._trial, best, state)


class _RayAsha(_OptunaSearch):
    """Ray Tune's ASHA as it is by default, over random configurations."""

    def __init__(self, space: Space, epochs: int, seed: int) -> None:
        super().__init__(space, optuna.samplers.RandomSampler(seed=seed), optuna.pruners.NopPruner())
        self._scheduler = AsyncHyperBandScheduler(time_attr=EPOCH, metric=VALUE, mode="max", max_t=epochs)

    def propose(self) -> Task | None:
        task = super().propose()
        self._ray_trial = PastTrial(str(self._trial.number))
        self._scheduler.on_trial_add(None, self._ray_trial)
        return task

    def goes_on(self, epoch: int, value: float) -> bool:
        decision = self._scheduler.on_trial_result(None, self._ray_trial, {EPOCH: epoch, VALUE: value})
        return bool(decision == TrialScheduler.CONTINUE)


class _Rayloom:
    """Rayloom's own searcher, study and promotion, as a recipe that only names a space has them.

    Training keeps the epoch that is best by what is searched for, as in the recipes that come with Rayloom.
    """

    def __init__(self, space: Space, config: TuneConfig, epochs: int) -> None:
        study = optuna.create_study(direction="maximize", sampler=create_sampler(config, past=0))
        self.study = SearchStudy(study, StudyLocation(make_url("sqlite://")), space, config)
        promotion = create_promotion(config, epochs, known=[])
        assert promotion is not None
        self._promotion = promotion
        self._searcher = StudySearcher(self.study, max_trials=10**6, promotion=promotion, concurrency=lambda: 10**6)
        self._number = 0

    def propose(self) -> Task | None:
        suggested = self._searcher.suggest("")
        if not isinstance(suggested, dict):
            return None
        self._number = suggested[NUMBER]
        return Task(suggested[VALUES], epochs_of(self.study.study.get_trials(deepcopy=False)[self._number]))

    def goes_on(self, epoch: int, value: float) -> bool:
        self.study.report(self._number, epoch, value, cost=(-value, 0.0))
        return self._promotion.goes_on(self._number, epoch, value)

    def pruned(self) -> None:
        self._searcher.on_trial_complete("")
        self.study.pause(self._number)

    def ended(self, best: float | None) -> None:
        self._searcher.on_trial_complete("")
        if best is None:
            self.study.fail(self._number, "broke")
            self._promotion.drop(self._number)
        else:
            self.study.complete(self._number, [best], stopped_early=False)


RAYLOOM, RANDOM = "Rayloom", "random, no pruning"

CONTENDERS: dict[str, Callable[[Space, Recipe, int], Contender]] = {
    RAYLOOM: lambda space, recipe, seed: _Rayloom(space, TuneConfig(space=space.name, seed=seed), recipe.train.epochs),
    RANDOM: lambda space, recipe, seed: _OptunaSearch(  # noqa: ARG005
        space, optuna.samplers.RandomSampler(seed=seed), optuna.pruners.NopPruner()
    ),
    "Optuna, median pruner": lambda space, recipe, seed: _OptunaSearch(  # noqa: ARG005
        space, optuna.samplers.TPESampler(seed=seed), optuna.pruners.MedianPruner()
    ),
    "Ray Tune, ASHA, random": lambda space, recipe, seed: _RayAsha(space, recipe.train.epochs, seed),
}
"""Peers with the defaults that they come with."""
