"""The samplers, which propose the values of the next trial, by their name in the recipe."""

import warnings
from collections.abc import Callable, Mapping
from typing import Self, cast

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import (
    BaseSampler,
    BruteForceSampler,
    CmaEsSampler,
    GPSampler,
    NSGAIISampler,
    QMCSampler,
    RandomSampler,
    TPESampler,
)
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from app.config import TuneConfig
from app.errors import RecipeError
from app.tuning.space import Space, Value
from app.tuning.trials import DUPLICATE_OF, LEARNED_FROM, is_paused, last_params

_MIN_POPULATION = 2
"""The number of parents that a child of NSGA-II has."""

STATEFUL_SAMPLERS = (CmaEsSampler, NSGAIISampler, QMCSampler)
"""Samplers that store their state in the study. They learn from complete trials only."""


def create_sampler(config: TuneConfig, past: int) -> BaseSampler:
    """Return the recipe's sampler. After a resume with ``past`` trials, it draws other random numbers than before."""
    seed, startup_trials = _seed_of(config, past), config.startup_trials
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        match config.sampler:
            case "tpe":  # Bergstra et al. 2011. Keys are drawn jointly, as in BOHB (Falkner et al. 2018)
                # With ``constant_liar``, concurrent trials keep away from each other's values.
                return TPESampler(
                    n_startup_trials=startup_trials, multivariate=True, group=True, constant_liar=True, seed=seed
                )
            case "random":
                return RandomSampler(seed=seed)
            case "cmaes":  # Hansen & Ostermeier 2001
                return CmaEsSampler(n_startup_trials=startup_trials, warn_independent_sampling=False, seed=seed)
            case "gp":
                return GPSampler(n_startup_trials=startup_trials, warn_independent_sampling=False, seed=seed)
            case "nsga2":  # Deb et al. 2002. The first generation is random
                return NSGAIISampler(population_size=max(startup_trials, _MIN_POPULATION), seed=seed)
            case "qmc":
                return QMCSampler(
                    scramble=True, warn_asynchronous_seeding=False, warn_independent_sampling=False, seed=seed
                )
            case "grid":  # every combination once, including conditional keys
                return BruteForceSampler(seed=seed)


def _seed_of(config: TuneConfig, past: int = 0) -> int:
    """Return the recipe's seed for Optuna's samplers, which take 32 bits."""
    return (config.seed + 7919 * past) % 2**32


def create_fallback_sampler(config: TuneConfig, is_finite: bool) -> BaseSampler:
    """Return the sampler for when the recipe's own only repeats itself. It finds what is left of a finite space."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return BruteForceSampler(seed=_seed_of(config)) if is_finite else RandomSampler(seed=_seed_of(config))


class TrialSampler:
    """Draws new trials of a study, with the recipe's sampler or with the fallback."""

    def __init__(self, study: Study, space: Space, config: TuneConfig) -> None:
        self._study, self._space = study, space
        sampler = study.sampler
        if not isinstance(sampler, STATEFUL_SAMPLERS):
            # The sampler works on views, and Optuna's samplers refuse a second study. The study itself needs another
            # one, for the keys that an enqueued trial leaves open.
            study.sampler = RandomSampler(seed=_seed_of(config))
        self.samplers = (sampler, create_fallback_sampler(config, space.is_finite))
        self._view_cache: ViewCache = {}

    def draw(self, sampler: BaseSampler, is_known: Callable[[Mapping[str, Value]], bool]) -> Trial | None:
        """Return a new trial, drawn by a sampler that also sees the paused trials. None if its values are known.

        Draw on a view first, so that repeated trials are not recorded. Samplers that keep their state in the study
        have to draw there.
        """
        enqueued = self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        if enqueued or isinstance(sampler, STATEFUL_SAMPLERS):
            return self._study.ask()
        drawn = _view(self._study, sampler, self._space, self._view_cache).ask()
        try:
            values = self._space.draw(drawn)
        except RecipeError:  # the trial itself will fail in the same way, and is recorded
            values = drawn.params
        if is_known(values):
            return None
        # The study now asks for the same values, and records the trial.
        self._study.enqueue_trial(drawn.params)
        return self._study.ask()


class _ViewedTrial(FrozenTrial):
    """A trial in a sampler's view. Copies of it are shallow: deep copies of 3,000 trials took a second."""

    def __deepcopy__(self, _: object) -> Self:
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        return copy


ViewCache = dict[int, _ViewedTrial]
"""Ended trials as views show them, by number. They do not change any more."""


def _view(study: Study, sampler: BaseSampler, space: Space, cache: ViewCache) -> Study:
    """Return the study as a sampler should see it. Pass the same ``cache`` for each view.

    - Paused trials count as pruned, because samplers learn nothing from running ones.
    - Failed trials count as worse than all others. A sampler that never saw them would propose them again.
    - Duplicates are left out. A duplicate of a running trial is recorded as failed, and the trial may be the best.
    - The grid sampler does not see trials of earlier studies, which may lack keys.
    """
    hidden = {DUPLICATE_OF, LEARNED_FROM} if isinstance(sampler, BruteForceSampler) else {DUPLICATE_OF}
    view = optuna.create_study(sampler=sampler, directions=study.directions)
    for trial in study.get_trials(deepcopy=False):
        if trial.state == TrialState.WAITING or hidden & trial.user_attrs.keys():
            continue
        viewed = cache.get(trial.number) or _viewed(trial, space)
        if trial.state.is_finished():
            cache[trial.number] = viewed
        view.add_trial(viewed)
    return view


def _viewed(trial: FrozenTrial, space: Space) -> _ViewedTrial:
    params, distributions = last_params(trial, space), {**space.distributions, **trial.distributions}
    viewed = create_trial(
        state=TrialState.PRUNED if is_paused(trial) or trial.state == TrialState.FAIL else trial.state,
        values=trial.values,
        params=params,
        distributions={key: distributions[key] for key in params},
        intermediate_values={} if trial.state == TrialState.FAIL else trial.intermediate_values,
    )
    viewed.__class__ = _ViewedTrial  # create_trial has no parameter for the class
    return cast(_ViewedTrial, viewed)
