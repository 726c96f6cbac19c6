"""Import user code by its import string ``package.module:attribute``."""

import importlib
from typing import Any

from app.errors import RecipeError
from app.suggestions import did_you_mean


def import_attribute(import_string: str) -> Any:
    """The object that ``package.module:attribute`` names.

    Raises:
        RecipeError: no such module, an error while importing it, or no such attribute.
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
