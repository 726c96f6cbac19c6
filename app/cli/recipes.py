"""Look at recipes."""

import json

import typer

from app.cli.options import Json, Overrides
from app.config import Recipe, dump_recipe, load_recipe

recipes = typer.Typer(no_args_is_help=True, help=__doc__)


@recipes.command()
def show(recipe: str, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print the resolved recipe, every default written out."""
    if as_json:
        print(load_recipe(recipe, overrides or []).model_dump_json())
        return
    print(dump_recipe(load_recipe(recipe, overrides or [])), end="")


@recipes.command()
def schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    print(json.dumps(Recipe.model_json_schema(), indent=2))
