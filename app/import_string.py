"""Import user code by its import string ``package.module:attribute``, and suggest names for unknown ones."""

import difflib
import importlib
from collections.abc import Iterable
from typing import Any

from app.errors import RecipeError

_MAX_NAMES = 40
"""Maximum number of names in an error message."""


def import_attribute(import_string: str) -> Any:
    """Return the object that ``package.module:attribute`` names.

    Raises:
        RecipeError: there is no such module or attribute, or importing the module fails.
    """
    module_name, _, attribute = import_string.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may fail in any way
        raise RecipeError(
            f"{import_string!r}: module {module_name!r} cannot be imported "
            f"({type(error).__name__}: {error}): check its name and that it lies in the working directory"
        ) from error
    if not hasattr(module, attribute):
        public = sorted(name for name in vars(module) if not name.startswith("_"))
        raise RecipeError(
            f"{import_string!r}: module {module_name!r} has no {attribute!r}; {did_you_mean(attribute, public)}"
        )
    return getattr(module, attribute)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return the end of an error's sentence: the nearest known name, or all names unless they are many."""
    names = list(known)
    if near := suggestion(given, names):
        return near.removeprefix("; ")
    return f"known are {', '.join(names[:_MAX_NAMES])}{', …' if len(names) > _MAX_NAMES else ''}"


def suggestion(given: str, known: Iterable[str]) -> str:
    """Return an end of an error's sentence with the nearest known name, and nothing if none is near."""
    near = difflib.get_close_matches(given, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
