"""Show recipes and their schema."""

import json

import typer

from app.cli.options import Json, Overrides
from app.config import Recipe, dump_recipe, load_recipe
from app.config.overrides import require_once

recipes = typer.Typer(no_args_is_help=True, help=__doc__)


@recipes.command()
def show(recipe: str, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print the resolved recipe, every default written out."""
    require_once(overrides or [])
    loaded = load_recipe(recipe, overrides or [])
    print(loaded.model_dump_json() if as_json else dump_recipe(loaded), end="\n" if as_json else "")


@recipes.command()
def schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    print(json.dumps(Recipe.model_json_schema(), indent=2))
