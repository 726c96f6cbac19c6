"""The recipe of a model that is called by its name: a published one that is deployed, or one that is imported."""

import re
from collections.abc import Sequence
from pathlib import Path

from app.config.loading import load_recipe, parse_recipe
from app.config.overrides import apply_overrides
from app.config.recipe import TENSORS, Recipe
from app.config.section import NAME
from app.errors import RecipeError

_JOBS = ("deploy", "undeploy")
"""Jobs that need no more than a published model and settings of ``serve``."""

_COMMON = ("storage",)


def names_model(job: str, location: str) -> bool:
    """Return whether a job gets a published model's name in place of a recipe."""
    return job in _JOBS and re.fullmatch(NAME, location) is not None and not Path(location).is_file()


def reads_files(job: str) -> bool:
    """Return whether a job reads the files that its recipe names."""
    return job not in _JOBS


def load_job_recipe(job: str, location: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read the recipe of a job. Jobs that only serve also take a model's name, and then the overrides of ``serve``.

    Raises:
        RecipeError: as ``load_recipe`` and ``recipe_of_model``.
    """
    if names_model(job, location):
        return recipe_of_model(location, "serve", overrides)
    return load_recipe(location, overrides)


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
            ).of("override.not_of_model", key)
    # A recipe needs data and a model. Nothing loads these, because the version has both.
    tree = {"name": name, "task": TENSORS, "data": {"source": "none"}, "model": {"factory": "none:none"}}
    return parse_recipe(apply_overrides(tree, overrides), source=name)
