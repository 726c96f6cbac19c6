"""The recipes that the benchmarks train, with their overrides."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.config import load_recipe
from app.config.overrides import require_once
from benchmarks.compile.models import MODELS
from benchmarks.finetuning import distillation
from benchmarks.serving import cascade
from benchmarks.training.cases import CASES


def recipes() -> Iterator[tuple[str, list[str]]]:
    for model in MODELS.values():
        yield model.recipe_file, list(model.overrides)
    for case in CASES:
        recipe_file, *overrides = case.command(Path("folder"))
        yield recipe_file, overrides
    own = (distillation.LARGE, (*distillation.SMALL, *distillation.PLAIN), (*distillation.SMALL, *distillation.TAUGHT))
    for overrides in own:
        yield distillation.RECIPE, [*distillation.COMMON, *overrides]
    for overrides in (cascade._SMALL, cascade._LARGE):
        yield cascade._RECIPE, [*cascade._BOTH, *cascade._COMPILE, *overrides]


@pytest.mark.parametrize(("recipe_file", "overrides"), list(recipes()))
def test_a_benchmark_gives_recipes_that_are_accepted(recipe_file: str, overrides: list[str]) -> None:
    require_once(overrides)
    load_recipe(recipe_file, overrides)
