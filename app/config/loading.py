"""Load recipes from YAML and overrides, and validate them. Every error names the key."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from app.config.alert_rules import CLOCK_TIMES, TIMES
from app.config.overrides import apply_overrides, set_value
from app.config.reading import read_text, title_of
from app.config.recipe import BUILT_IN_TASKS, Recipe, texts
from app.config.section import LOCATION, STORED
from app.config.yaml_text import dump_yaml, parse_yaml, yaml_problem
from app.errors import RecipeError
from app.import_string import did_you_mean, suggestion
from app.problems import Problem, problems_of
from app.uris import hide_secrets, shown

_PATTERNS = {
    "task": f"{', '.join(BUILT_IN_TASKS)}, or an import string, package.module:name",
    "model.factory": "an import string, package.module:name",
    **dict.fromkeys(("alerts.no_improvement_for", "alerts.for"), TIMES),
    "alerts.nothing_reported_for": CLOCK_TIMES,
    "alerts.fallen_by": "a share such as 50 %",
    "alerts.metric": "the name of a metric, such as val_loss",
    **dict.fromkeys(("serve.cascade.before", "train.teacher.model"), "a model, NAME or NAME/VERSION"),
}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read the recipe at ``path``, which may be any URI, apply ``overrides``, and validate it.

    Raises:
        RecipeError: ``path`` cannot be read, the YAML is broken, or keys, types or combinations are invalid.
    """
    return parse_recipe(apply_overrides(_read_tree(path), overrides), source=title_of(path))


def load_stored_recipe(path: str | Path) -> Recipe:
    """Read the recipe of a run or of a weights folder. Its plan is not checked, because it has trained already.

    Raises:
        RecipeError: ``path`` cannot be read, the YAML is broken, or keys or types are invalid.
    """
    return parse_stored_recipe(_read_tree(path), source=title_of(path))


def parse_recipe(tree: dict[str, Any], source: str = "recipe") -> Recipe:
    """Validate a tree of plain values. Raise RecipeError with one line for each problem, and the first one's rule."""
    return _parse(tree, source, context=None)


def parse_stored_recipe(tree: dict[str, Any], source: str = "recipe") -> Recipe:
    """Validate a stored tree, but not its plan. Missing keys get defaults. Raise RecipeError like ``parse_recipe``."""
    return _parse(tree, source, context=STORED)


def _read_tree(path: str | Path) -> dict[str, Any]:
    title = title_of(path)
    try:
        tree = parse_yaml(read_text(path))
    except yaml.YAMLError as error:
        raise RecipeError(f"recipe {title!r} is not YAML: {yaml_problem(error)}").of("yaml.invalid") from None
    if not isinstance(tree, dict):
        raise RecipeError(f"recipe {title!r} holds {_show(tree)}: expected keys such as name, task and data").of(
            "recipe.not_keys"
        )
    return tree


def _parse(tree: dict[str, Any], source: str, context: dict[str, bool] | None) -> Recipe:
    try:
        return Recipe.model_validate(tree, context=context)
    except ValidationError as error:
        problems = list(problems_of(error, tree))
        text = "\n".join(hide_secrets(f"{source}: {_explain(problem)}") for problem in problems)
        raise RecipeError(text).of(*_rule_and_key(problems[0])) from None


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Return the recipe with other values of some dotted keys. Raise RecipeError if it is invalid."""
    tree = recipe.model_dump(mode="json")
    for key, value in values.items():
        set_value(tree, key, value)
    return parse_recipe(tree, source="the recipe with " + ", ".join(f"{key}={value}" for key, value in values.items()))


def dump_recipe(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML, with all defaults."""
    return dump_yaml(recipe.model_dump(mode="json"))


def recipe_keys() -> list[str]:
    """Return every dotted key of a recipe, also those of sections that a recipe may leave out."""
    return list(_keys(Recipe))


def local_paths(recipe: Recipe) -> list[tuple[str, str]]:
    """Return every relative path that jobs read files from, with its dotted key. Sets and models by name may be among
    them: only the disk tells a folder from such a name.
    """
    keys = {key for key, field in _fields(Recipe) if LOCATION in field.metadata}
    given = [(key, text) for key, text in texts(recipe.model_dump()) if key in keys]
    return [(key, text) for key, text in given if "://" not in text and not text.startswith(("/", "~"))]


def _rule_and_key(problem: Problem) -> tuple[str, str | None]:
    """Return what a problem breaks. Our validators raise RecipeError; other rules are named as in Pydantic."""
    error, key = problem.first.get("ctx", {}).get("error"), problem.key or None
    return (
        (error.rule, error.key or key) if isinstance(error, RecipeError) else (f"recipe.{problem.first['type']}", key)
    )


def _explain(problem: Problem) -> str:
    key, reason = problem.key, problem.first
    match reason["type"]:
        case "extra_forbidden":
            return f"unknown key {key}; {_suggestion(key)}"
        case "missing":
            return f"{key} is missing: add it"
        case "value_error":
            return f"{key}: {reason['ctx']['error']}".removeprefix(": ")
        case "string_pattern_mismatch" | "string_type" if _without_indices(key) in _PATTERNS:
            expected = _PATTERNS[_without_indices(key)]
            expected += suggestion(str(problem.given), BUILT_IN_TASKS) if key == "task" else ""
        case "string_pattern_mismatch":
            expected = f"a text that matches {reason['ctx']['pattern']}"
        case _:
            expected = problem.expected
    return f"{key or 'the recipe'} is {_show(problem.given)}: expected {expected}"


def _suggestion(key: str) -> str:
    """Suggest another key: the same name in another section, the nearest name in this one, or all its names."""
    section, _, leaf = _without_indices(key).rpartition(".")
    known = [known.rpartition(".")[2] for known in _keys(Recipe) if known.rpartition(".")[0] == section]
    elsewhere = [known for known in _keys(Recipe) if known.rpartition(".")[2] == leaf]
    return f"did you mean {elsewhere[0]!r}?" if elsewhere else did_you_mean(leaf, known)


def _without_indices(key: str) -> str:
    """Remove the indices of lists from a key."""
    return re.sub(r"\.\d+", "", key)


def _keys(model: type[BaseModel]) -> Iterator[str]:
    """Yield every dotted key of a recipe."""
    return (key for key, _ in _fields(model))


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every dotted key of a recipe with its field."""
    for name, field in model.model_fields.items():
        yield prefix + (field.alias or name), field
        if section := _section_of(field.annotation):
            yield from _fields(section, f"{prefix}{name}.")


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (None, Literal):
        return None
    return next((found for part in get_args(annotation) if (found := _section_of(part))), None)


def _show(value: Any) -> str:
    text = "empty (null)" if value is None else shown(value)
    return text if len(text) <= 60 else text[:57] + "..."
