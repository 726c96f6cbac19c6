"""Ray Tune's search spaces as Optuna's distributions."""

from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from ray.tune.search.sample import Categorical, Domain, Float, Integer, LogUniform, Quantized, Uniform

_GRID = "grid_search"


def is_domain(value: object) -> bool:
    """Whether ``value`` is something that Ray Tune draws from."""
    return isinstance(value, Domain) or (isinstance(value, dict) and value.keys() == {_GRID})


def from_tune(domain: Any) -> BaseDistribution:
    """The distribution that draws what ``domain`` draws; a grid becomes its choices.

    Raises:
        ValueError: Optuna has no such distribution, or the range is empty.
    """
    if isinstance(domain, dict):
        return CategoricalDistribution(domain[_GRID])
    sampler, step = domain.get_sampler(), None
    if isinstance(sampler, Quantized):
        sampler, step = sampler.get_sampler(), sampler.q
    log = isinstance(sampler, LogUniform)
    if log and step and step != 1:
        raise ValueError(f"{domain} is logarithmic and quantized, which Optuna cannot draw: leave the steps out")
    if isinstance(domain, Categorical):
        return CategoricalDistribution(domain.categories)
    if isinstance(sampler, Uniform | LogUniform):
        if isinstance(domain, Float):
            return FloatDistribution(domain.lower, domain.upper, log=log, step=None if log else step)
        if isinstance(domain, Integer):  # Ray Tune leaves the upper end out, unless it draws in steps
            return IntDistribution(domain.lower, domain.upper - (step is None), log=log, step=int(step or 1))
    raise ValueError(f"{domain} cannot be drawn by Optuna: use uniform, loguniform, randint, lograndint or choice")
