"""The recipe of one trial."""

from collections.abc import Mapping

from app.config import NotifyConfig, Recipe, TuneConfig, with_values
from app.tuning.space import Value


def trial_recipe(recipe: Recipe, values: Mapping[str, Value], config: TuneConfig) -> Recipe:
    """The recipe with a trial's values, as a run of its own: nobody is alerted, one checkpoint is kept.

    Unless the recipe says how many, it has as few processes as the recipe's own plan needs. The global
    batch stays, so training stays the same.

    Raises:
        RecipeError: the values do not fit together.
    """
    changed = with_values(
        recipe,
        {
            "train.epochs": config.epochs or recipe.train.epochs,
            **values,
            "train.workers": config.workers or recipe.train.plan.model_parallel,
            "train.checkpoint.num_to_keep": 1,
            "train.resume": None,
        },
    )
    return changed.model_copy(update={"alerts": [], "notify": NotifyConfig(), "tune": None})
