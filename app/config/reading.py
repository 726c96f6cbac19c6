"""Read the text of a recipe: from a path, any URI of fsspec, standard input, or a ``data:`` URI that carries it."""

import base64
import sys
from pathlib import Path
from urllib.parse import quote, unquote

from app.errors import RecipeError
from app.storage import to_path

STANDARD_INPUT = "-"
_SCHEME, _MEDIA_TYPE = "data:", "application/yaml"
_MAX_BYTES = 65_536
"""What a recipe that is sent along may have: Linux takes 128 KiB in one argument of a command, base64 included."""


def read_text(location: str | Path) -> str:
    """Return the text at ``location``; ``-`` is standard input.

    Raises:
        RecipeError: it cannot be read, or is not UTF-8.
    """
    try:
        if str(location) == STANDARD_INPUT:
            return sys.stdin.read()
        return to_path(location).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"recipe {title_of(location)!r} is not a text in UTF-8: give a YAML file") from error
    except Exception as error:  # each protocol's driver has errors of its own
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise RecipeError(
            f"recipe {title_of(location)!r} cannot be read ({reason}): give the path or URI of a YAML file, "
            "for example recipes/reviews.yaml"
        ) from error


def embedded(text: str, title: str) -> str:
    """Return a ``data:`` URI (RFC 2397) that carries a recipe to where its file cannot be read.

    Raises:
        RecipeError: it is too long to be an argument of a command.
    """
    if (size := len(text.encode())) > _MAX_BYTES:
        raise RecipeError(
            f"recipe {title!r} has {size:,} bytes: expected {_MAX_BYTES:,} at most of one that is sent along; put it "
            "into the working directory"
        )
    content = base64.b64encode(text.encode()).decode()
    return f"{_SCHEME}{_MEDIA_TYPE};name={quote(title, safe='/')};base64,{content}"


def title_of(location: str | Path) -> str:
    """Return what to call the recipe at ``location`` in messages: of one that was sent along, where it came from."""
    given = str(location)
    if given == STANDARD_INPUT:
        return "standard input"
    if not given.startswith(_SCHEME):
        return given
    parameters = given.removeprefix(_SCHEME).partition(",")[0].split(";")
    names = [value for name, _, value in (parameter.partition("=") for parameter in parameters) if name == "name"]
    return unquote(names[0]) if names else "data:"
