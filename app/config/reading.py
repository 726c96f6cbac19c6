"""Read the text of a recipe from a path, any fsspec URI, standard input, or a ``data:`` URI that embeds it."""

import base64
import sys
from pathlib import Path
from urllib.parse import quote, unquote

from app.errors import RecipeError
from app.import_string import suggestion
from app.storage import to_path
from app.uris import hide_secrets, without_secrets

STANDARD_INPUT = "-"
_SCHEME, _MEDIA_TYPE = "data:", "application/yaml"
_MAX_BYTES = 65_536
"""Maximum size of an embedded recipe. Linux limits a command-line argument to 128 KiB, and base64 adds a third."""


def read_text(location: str | Path) -> str:
    """Return the text at ``location``; ``-`` is standard input.

    Raises:
        RecipeError: the text cannot be read, or is not UTF-8.
    """
    try:
        if str(location) == STANDARD_INPUT:
            return sys.stdin.buffer.read().decode()
        return to_path(location).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"recipe {title_of(location)!r} is not a text in UTF-8: give a YAML file").of(
            "text.encoding"
        ) from error
    except Exception as error:  # each fsspec protocol raises its own errors
        reason = hide_secrets(getattr(error, "strerror", None) or str(error) or type(error).__name__)
        raise RecipeError(
            f"recipe {title_of(location)!r} cannot be read ({reason}): give the path or URI of a YAML file, "
            f"for example recipes/reviews.yaml{_recipe_like(location)}"
        ).of("file.unreadable") from error


def _recipe_like(location: str | Path) -> str:
    """Return the words that suggest a recipe of this folder with a similar name; empty if none has one."""
    found = {path.stem: str(path) for path in Path("recipes").glob("*.yaml")}
    stem = Path(str(location)).stem
    return suggestion(found[stem] if stem in found else str(location), list(found.values()))


def embedded(text: str, title: str) -> str:
    """Return a ``data:`` URI (RFC 2397) that embeds a recipe, for machines that cannot read its file.

    Raises:
        RecipeError: the recipe is too long for a command-line argument.
    """
    if (size := len(text.encode())) > _MAX_BYTES:
        raise RecipeError(
            f"recipe {title!r} has {size:,} bytes: expected {_MAX_BYTES:,} at most for one that is embedded in a job's "
            "command; put it into the working directory, where git does not ignore it"
        ).of("recipe.too_long")
    content = base64.b64encode(text.encode()).decode()
    return f"{_SCHEME}{_MEDIA_TYPE};name={quote(title, safe='/')};base64,{content}"


def title_of(location: str | Path) -> str:
    """Return the name of the recipe at ``location`` for messages; for an embedded recipe, its original location.

    A URI is named without its user, password, query and fragment: they may hold credentials, such as a signature.
    """
    given = str(location)
    if given == STANDARD_INPUT:
        return "standard input"
    if not given.startswith(_SCHEME):
        return without_secrets(given)
    parameters = given.removeprefix(_SCHEME).partition(",")[0].split(";")
    names = [value for name, _, value in (parameter.partition("=") for parameter in parameters) if name == "name"]
    return unquote(names[0]) if names else "data:"
