"""Import user code by its import string ``package.module:attribute``, and suggest names for unknown ones."""

import ast
import difflib
import importlib
import importlib.util
from collections.abc import Iterable
from os.path import isfile, relpath  # isfile is False for a folder that cannot be read
from pathlib import Path
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
        ).of("import.fails") from error
    if not hasattr(module, attribute):
        public = sorted(name for name in vars(module) if not name.startswith("_"))
        raise RecipeError(
            f"{import_string!r}: module {module_name!r} has no {attribute!r}; {did_you_mean(attribute, public)}"
        ).of("import.fails")
    return getattr(module, attribute)


def require_named(import_string: str) -> None:
    """Check that a module defines the name in an import string. The module is not run: it may import torch.

    Raises:
        RecipeError: there is no such module, its syntax is wrong, or it defines nothing of this name.
    """
    module_name, _, attribute = import_string.partition(":")
    try:
        spec = importlib.util.find_spec(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            return  # a package above it imports what is missing here
        spec = None
    except Exception:  # a package above it may fail in any way, and the job says how
        return
    if spec is None:
        raise RecipeError(f"{import_string!r}: there is no module {module_name!r} here: {_remedy(module_name)}").of(
            "import.fails"
        )
    if not (spec.origin and spec.origin.endswith(".py")):
        return
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except SyntaxError as error:
        raise RecipeError(
            f"{import_string!r}: line {error.lineno} of {spec.origin!r} is not Python ({error.msg}): correct it"
        ).of("import.fails") from None
    names = {name for statement in ast.walk(tree) for name in _defined_by(statement)}
    if not names & {attribute, "*", "__getattr__"}:
        raise RecipeError(
            f"{import_string!r}: module {module_name!r} has no {attribute!r}: check its name"
            f"{suggestion(attribute, sorted(names))}"
        ).of("import.fails")


def _remedy(module_name: str) -> str:
    """Say what to do about a module that is not in the working directory: it may lie a folder below, or above."""
    here, path = Path.cwd(), module_name.replace(".", "/")
    for folder in (*sorted(here.glob("*")), *here.parents):
        if isfile(folder / f"{path}.py") or isfile(folder / path / "__init__.py"):
            return f"it is in {relpath(folder)!r}: change to that folder, and run the command again"
    return "check its name, and that it is in the working directory"


def _defined_by(node: ast.AST) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name):
            return [name]
        case ast.alias(name=name, asname=other):
            return [other or name]
    return []


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return the end of an error's sentence: the nearest known name, or all names unless they are many."""
    names = list(known)
    if near := suggestion(given, names):
        return near.removeprefix("; ")
    return f"known are {', '.join(names[:_MAX_NAMES])}{', …' if len(names) > _MAX_NAMES else ''}"


def suggestion(given: str, known: Iterable[str]) -> str:
    """Return the end of an error message with the nearest known name; an empty text if none is near."""
    near = difflib.get_close_matches(given, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
