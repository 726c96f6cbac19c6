"""Write a new project from the template."""

import importlib.util
import keyword
import re
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from app.cluster.packages import PACKAGES
from app.errors import RequestError

_TEMPLATE_NAME = "my_project"
"""What the template's package, recipe and test are called."""
_HIDDEN = {"gitignore": ".gitignore"}
"""Files that would already have an effect in the template under their real names."""
_FOLDERS = ("data", "recipes", "storage", "tests")
"""The other folders of a project."""


def create_project(folder: Path) -> list[Path]:
    """Write a recipe, a model, a search space, data and a test that fit each other. Return the files, sorted.

    The folder's name becomes that of the package, the recipe and the model. The folder is created.

    Raises:
        RequestError: the name cannot be that of a package, another module has it, or the folder exists and is not
            empty.
    """
    name = folder.name
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,62}", name) or keyword.iskeyword(name):
        raise RequestError(
            f"project {name!r} cannot be the name of a Python package: use a lower-case letter, then lower-case "
            "letters, digits and underscores, such as my_project"
        ).of("project.name")
    if name in _FOLDERS or name in PACKAGES or _is_module(name):
        raise RequestError(
            f"project {name!r} has the name of a module or folder that it needs: choose another name"
        ).of("project.name_taken")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if next(folder.iterdir(), None):
            raise RequestError(f"{str(folder)!r} is not empty: give the name of a new folder").of("folder.taken")
        return sorted(_copy(files("app.project") / "template", folder, name))
    except OSError as error:
        raise RequestError(f"{str(folder)!r} cannot be written ({error.strerror}): give another folder").of(
            "folder.not_written"
        ) from error


def _is_module(name: str) -> bool:
    """Return True if Python imports something by that name; a folder without ``__init__.py`` does not count."""
    found = importlib.util.find_spec(name)
    return found is not None and found.loader is not None


def _copy(source: Traversable, target: Path, name: str) -> Iterator[Path]:
    """Copy a folder, with the project's name in paths and contents. Yield each file that was written."""
    for item in source.iterdir():
        written = target / _HIDDEN.get(item.name, item.name.replace(_TEMPLATE_NAME, name))
        if item.is_file():
            written.write_text(item.read_text(encoding="utf-8").replace(_TEMPLATE_NAME, name), encoding="utf-8")
            yield written
        elif item.name != "__pycache__":
            written.mkdir()
            yield from _copy(item, written, name)
