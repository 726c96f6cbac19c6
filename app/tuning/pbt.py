"""Population-based training: what of a trial may change while it trains."""

from collections.abc import Callable, Mapping
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from ray import tune

from app.errors import RecipeError
from app.tuning.space import Space, Value

_LIVE = ("train.optimizer.", "train.label_smoothing", "train.gradient_clipping", "model.args.dropout")
_FIXED = ("train.optimizer.name",)
"""A checkpoint of one optimizer means nothing to another."""


def mutations(space: Space) -> dict[str, Any]:
    """The keys that a trial may change when it goes on from another's checkpoint, with where from to draw.

    Raises:
        RecipeError: the space has none.
    """
    live = {
        key: _draw(each)
        for key, each in space.distributions.items()
        if key.startswith(_LIVE) and not key.startswith(_FIXED)
    }
    if not live:
        raise RecipeError(
            f"tune.scheduler is pbt, and tune.space {space.name!r} has no key that can change during training, such as "
            "train.optimizer.lr: add one, or set scheduler to asha"
        )
    return live


def within(space: Space, values: Mapping[str, Value]) -> dict[str, Value]:
    """The values, which Ray Tune scales by a factor, back in their ranges and on their steps."""
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


def _draw(distribution: BaseDistribution) -> list[Any] | Callable[..., Any]:
    match distribution:
        case CategoricalDistribution():
            return list(distribution.choices)
        case FloatDistribution():
            draw = tune.loguniform if distribution.log else tune.uniform
            return draw(distribution.low, distribution.high)  # type: ignore[no-any-return]
        case IntDistribution():
            draw = tune.lograndint if distribution.log else tune.randint
            return draw(distribution.low, distribution.high + 1)  # type: ignore[no-any-return]
    raise AssertionError(f"unknown distribution {distribution}")
