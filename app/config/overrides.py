"""Dotted overrides: ``train.optimizer.lr=1e-3`` sets one value in the YAML tree before it is validated."""

import re
from collections.abc import Iterable
from typing import Any

import yaml

from app.errors import RecipeError


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with the floats of YAML 1.2, so that ``1e-3`` is a number and not a text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    # The characters that such a number may begin with.
    list("-+0123456789."),
)


def parse_yaml(text: str) -> Any:
    """Parse a YAML text. Raises ``yaml.YAMLError``."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader


def apply_overrides(tree: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Set each ``dotted.key=value`` in ``tree``, in place, and return it.

    A number in the key indexes a list. A value is read as YAML: ``a=[1, 2]``, ``a=null``.

    Raises:
        RecipeError: an override has no ``=`` or no key, is broken YAML, or has an index past the end of a list.
    """
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not all(key.split(".")):
            raise RecipeError(f"override {override!r} is not key=value: write it like train.epochs=3")
        try:
            value = parse_yaml(text)
        except yaml.YAMLError as error:
            raise RecipeError(f"override {override!r}: {text!r} is not a YAML value") from error
        _set(tree, key.split("."), value, override)
    return tree


def set_value(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of one dotted key in ``tree``, in place. Raise RecipeError past the end of a list."""
    _set(tree, key.split("."), value, f"{key}={value}")


def _set(tree: dict[str, Any], path: list[str], value: Any, override: str) -> None:
    node: Any = tree
    for part, following in zip(path, [*path[1:], None], strict=True):
        key: Any = _index(node, part, override) if isinstance(node, list) else part
        if following is None:
            node[key] = value
        else:
            child = node[key] if isinstance(node, list) else node.get(key)
            if not isinstance(child, dict | list):
                child = node[key] = {}  # replace a word by a section: plan=auto, then plan.zero_stage=2
            node = child


def _index(items: list[Any], part: str, override: str) -> int:
    if not part.isdecimal() or int(part) >= len(items):
        raise RecipeError(f"override {override!r}: {part!r} is not an index into {items} (0 to {len(items) - 1})")
    return int(part)
