"""What passes between the search and a trial's actor: the trial's configuration, its recipe, and its results.

Ray Tune pickles configurations and results between processes, so they are plain dictionaries.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel

from app.config import NotifyConfig, Recipe, TrackingConfig, TuneConfig, with_values
from app.tuning.space import Value

NUMBER, VALUES, LAST_REPORTED_EPOCH = "number", "values", "last_reported_epoch"
"""A trial's configuration: its number in the study, its values of recipe keys, the last epoch reported to the study."""

CLONED = "cloned"
"""In the configuration of a trial that will continue from another trial's checkpoint.

``LAST_REPORTED_EPOCH`` is then the epoch of that checkpoint.
"""

EPOCH, VALUE, ENDED = "epoch", "value", "ended"
"""Keys of a result that schedulers read: the time, the first objective, and whether training came to its end."""


class EpochResult(BaseModel):
    """The result of one epoch."""

    epoch: int
    value: float | None
    """The first objective, which may be infinite; None if it is only measured after the last epoch."""
    cost: tuple[float, float]
    """Training keeps the weights of the epoch with the lowest cost."""


class FinalResult(EpochResult):
    """The result of a trained trial.

    It comes with the last epoch. It repeats that epoch if an earlier attempt has already reported it.
    """

    ended: Literal[True] = True
    done: Literal[True] = True
    """Ray Tune's own key for a trial that has ended."""
    final_values: list[float]
    """All objectives at the epoch whose weights training keeps."""
    stopped_early: bool


def with_drawn(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Return the recipe with the values of a trial. A pretrained model that is drawn has not been described yet."""
    return with_values(recipe.as_given if "model.pretrained" in values else recipe, values)


def trial_recipe(recipe: Recipe, values: Mapping[str, Value], config: TuneConfig) -> Recipe:
    """Return the recipe of one trial: a run without alerts and trackers of its own, that keeps one checkpoint.

    Unless ``tune.workers`` is set, the trial has as few processes as the recipe's plan needs. The global batch size
    stays the same, and so does training.

    Raises:
        RecipeError: the values do not fit together.
    """
    changed = with_drawn(
        recipe,
        {
            "train.epochs": config.epochs or recipe.train.epochs,
            "train.max_steps": config.max_steps or recipe.train.max_steps,
            **values,
            "train.workers": config.workers or recipe.train.plan.model_parallel,
            "train.checkpoint.num_to_keep": 1,
            "train.resume": None,
        },
    )
    return changed.model_copy(
        update={"alerts": [], "notify": NotifyConfig(), "tracking": TrackingConfig(), "tune": None}
    )
