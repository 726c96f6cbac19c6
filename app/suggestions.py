"""What a person may have meant."""

import difflib
from collections.abc import Iterable


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The nearest of the ``known`` names, or all of them, as the end of an error's sentence."""
    names = list(known)
    near = difflib.get_close_matches(given, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
