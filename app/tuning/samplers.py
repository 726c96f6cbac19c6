"""Who proposes the values of the next trial, by name."""

import warnings

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

from app.config import TuneConfig

_LEAST_PARENTS = 2
"""Of whom a child has its values."""

KEEPS_STATE = (CmaEsSampler, NSGAIISampler, QMCSampler)
"""They note in the study itself what they proposed, and learn from complete trials alone."""


def create_sampler(config: TuneConfig, past: int) -> BaseSampler:
    """The recipe's sampler; a study that goes on after ``past`` trials draws other random numbers than at first."""
    seed, first = config.seed + 7919 * past, config.startup_trials
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        match config.sampler:
            case "tpe":  # Bergstra et al. 2011; several keys at once as in BOHB (Falkner et al. 2018)
                return TPESampler(n_startup_trials=first, multivariate=True, group=True, constant_liar=True, seed=seed)
            case "random":
                return RandomSampler(seed=seed)
            case "cmaes":  # Hansen & Ostermeier 2001
                return CmaEsSampler(n_startup_trials=first, warn_independent_sampling=False, seed=seed)
            case "gp":
                return GPSampler(n_startup_trials=first, warn_independent_sampling=False, seed=seed)
            case "nsga2":  # Deb et al. 2002; its first generation is drawn at random
                return NSGAIISampler(population_size=max(first, _LEAST_PARENTS), seed=seed)
            case "qmc":
                return QMCSampler(
                    scramble=True, warn_asynchronous_seeding=False, warn_independent_sampling=False, seed=seed
                )
            case "grid":  # every combination once, those of conditional keys too
                return BruteForceSampler(seed=seed)


def create_substitute(config: TuneConfig, is_finite: bool) -> BaseSampler:
    """Who proposes once the recipe's sampler only repeats: it finds whatever is left of a finite space."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return BruteForceSampler(seed=config.seed) if is_finite else RandomSampler(seed=config.seed)
