"""Properties of a single text: its language, and its share of symbols."""

import re
import unicodedata
from functools import cache
from typing import Any

from app.errors import RecipeError

_SYMBOL = re.compile(r"[^\w\s]")
_MAX_CHARACTERS = 2000
"""Characters of a text from which its language is detected. More take longer, and change little."""


def has_many_symbols(text: str, max_share: float) -> bool:
    """Return whether a larger share of the characters is neither letters, digits nor white space."""
    symbols = _SYMBOL.findall(text)
    # Combining vowel signs and accents are parts of letters.
    count = sum(not unicodedata.category(symbol).startswith("M") for symbol in symbols)
    return count > max_share * len(text)


def language_of(text: str, expected: tuple[str, ...]) -> str:
    """Return the likeliest language of a text, as its code in ISO 639-1.

    Raises:
        RecipeError: the library is not installed, or does not know a language of ``expected``.
    """
    code: str = _identifier(expected).classify(text[:_MAX_CHARACTERS])[0]
    return code


@cache
def _identifier(expected: tuple[str, ...]) -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise RecipeError(
            "data.clean.languages needs py3langid, which is not installed: pip install 'rayloom[languages]'"
        ).of("package.not_installed", "data.clean.languages") from error
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    if unknown := [code for code in expected if code not in identifier.labels]:
        raise RecipeError(
            f"data.clean.languages has {', '.join(unknown)}: expected codes of ISO 639-1 among "
            f"{', '.join(sorted(identifier.labels))}"
        ).of("language.unknown", "data.clean.languages")
    return identifier
