"""Dotted overrides: ``train.optimizer.lr=1e-3`` sets one value in the YAML tree before it is validated."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from app.config.yaml_text import has_comment, parse_yaml, yaml_problem
from app.errors import RecipeError
from app.uris import shown

_QUOTED = """quote a text for the shell and for YAML, as in 'data.source="part #2.csv"'"""
"""The way out if YAML does not read a value as the text that it is."""


def apply_overrides(tree: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Set each ``dotted.key=value`` in ``tree``, in place, and return it.

    A number in the key indexes a list. A value is read as YAML: ``a=[1, 2]``, ``a=null``.

    Raises:
        RecipeError: an override has no ``=`` or no key, is broken YAML, has a comment, or has an index past the end
            of a list.
    """
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not all(key.split(".")):
            raise RecipeError(
                f"override {shown(override)} is not key=value: write it like train.epochs=3, without spaces"
            ).of("override.incomplete")
        try:
            value = parse_yaml(text)
        except yaml.YAMLError as error:
            raise RecipeError(f"override {key}: not a YAML value ({yaml_problem(error)}): {_QUOTED}").of(
                "yaml.invalid", key
            ) from None
        if has_comment(text):
            raise RecipeError(f"override {key}: YAML reads what follows # as a comment: leave it out, or {_QUOTED}").of(
                "override.comment", key
            )
        set_value(tree, key, value)
    return tree


def override_of(key: str, text: str) -> str:
    """Return the override that sets a key to a text, quoted if YAML would read the text as something else."""
    try:
        is_plain = parse_yaml(text) == text
    except yaml.YAMLError:
        is_plain = False
    return f"{key}={text if is_plain else json.dumps(text, ensure_ascii=False)}"


def require_once(overrides: Sequence[str]) -> None:
    """Raise RecipeError if a later override sets a key again, alone or with its section."""
    keys = [override.partition("=")[0] for override in overrides]
    for number, key in enumerate(keys):
        for earlier, given in zip(keys[:number], overrides, strict=False):
            if f"{earlier}.".startswith(f"{key}."):
                raise RecipeError(
                    f"override {shown(overrides[number])} replaces {shown(given)}, which is given before it: leave out "
                    "one of them"
                ).of("override.repeated", key)


def set_value(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of one dotted key in ``tree``, in place. Raise RecipeError past the end of a list."""
    node: Any = tree
    path = key.split(".")
    for part, following in zip(path, [*path[1:], None], strict=True):
        position: Any = _index(node, part, key) if isinstance(node, list) else part
        if following is None:
            node[position] = value
        else:
            child = node[position] if isinstance(node, list) else node.get(position)
            if not isinstance(child, dict | list):
                child = node[position] = {}  # replace a word by a section: plan=auto, then plan.zero_stage=2
            node = child


def _index(items: list[Any], part: str, key: str) -> int:
    if not part.isdecimal() or int(part) >= len(items):
        raise RecipeError(f"override {key}: {part!r} is not an index into its list (0 to {len(items) - 1})").of(
            "index.unknown", key
        )
    return int(part)
