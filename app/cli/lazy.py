"""Groups of commands that are imported when they run. Listing and completing them reads only their docstrings."""

import ast
import importlib
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


def lazy_group(commands: Mapping[str, str]) -> type[TyperGroup]:
    """Return a group of commands. Each is a function, ``module:name``, or a module's group of the command's name."""

    class LazyGroup(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            listed = {name: TyperCommand(name, help=_docstring(place)) for name, place in commands.items()}
            super().__init__(**settings | {"commands": listed})

        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
            name, listed, rest = super().resolve_command(ctx, args)
            return name, listed and _imported(str(name), commands[str(name)]), rest

    return LazyGroup


def _docstring(place: str) -> str | None:
    """Return the docstring of a module or function, without running the module."""
    module, _, function = place.partition(":")
    parsed = _parsed(module)
    owner = next((item for item in parsed.body if isinstance(item, ast.FunctionDef) and item.name == function), parsed)
    return ast.get_docstring(owner)


@lru_cache(maxsize=64)
def _parsed(module: str) -> ast.Module:
    spec = find_spec(module)
    return ast.parse(Path(str(spec and spec.origin)).read_text(encoding="utf-8"))


def _imported(name: str, place: str) -> Any:
    module, _, function = place.partition(":")
    found, holder = getattr(importlib.import_module(module), function or name), typer.Typer()
    if function:
        holder.command(name)(found)
    else:
        holder.add_typer(found, name=name)
    return typer.main.get_group(holder).commands[name]
