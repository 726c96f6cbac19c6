"""The recipe of a model that is called by its name: a published one that is deployed, or one that is imported."""

import re
from collections.abc import Sequence

from app.config.loading import parse_recipe
from app.config.overrides import apply_overrides
from app.config.recipe import TENSORS, Recipe
from app.config.section import NAME
from app.errors import RecipeError

_COMMON = ("storage",)


def is_model_name(text: str) -> bool:
    """Return whether a text can be a model's name. A recipe's path has a suffix or a folder."""
    return re.fullmatch(NAME, text) is not None


def recipe_of_model(name: str, section: str, overrides: Sequence[str] = ()) -> Recipe:
    """Return a recipe that has only a name and the overrides of one section. It has no data, and is not trained.

    Raises:
        RecipeError: the name or an override is invalid, or an override is of another section.
    """
    for override in overrides:
        key = override.partition("=")[0]
        if key.partition(".")[0] not in (section, *_COMMON):
            raise RecipeError(
                f"override {override!r}: model {name!r} is named without a recipe, and has only {section} and storage: "
                f"leave {key} out, or give a recipe"
            )
    tree = {"name": name, "task": TENSORS, "data": {"source": "none"}, "model": {"factory": "none:none"}}
    return parse_recipe(apply_overrides(tree, overrides), source=name)
