"""What a person may have meant."""

import difflib
from collections.abc import Iterable

_MOST = 40


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The nearest of the ``known`` names, or all of them unless they are many, as the end of an error's sentence."""
    names = list(known)
    if near := difflib.get_close_matches(given, names, n=1):
        return f"did you mean {near[0]!r}?"
    return f"known are {', '.join(names[:_MOST])}{', …' if len(names) > _MOST else ''}"
