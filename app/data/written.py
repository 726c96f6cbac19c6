"""How a value is written as a text: in one way for labels, groups and categories, whichever format it comes from."""

import math
import re
from collections.abc import Callable, Collection, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any
from uuid import UUID

_WHOLE = re.compile(r"[+-]?\d+\.0+")
_BOOLEANS = {str(True), str(False)}
_EXACT = 2**53
"""Floats have every whole number up to here."""


def digits_of(number: float | Decimal, written: str) -> str:
    """Return a number as text. A whole one has no decimals, so that 1.0 and 1 are one label."""
    is_whole = math.isfinite(number) and -_EXACT < number < _EXACT and number == int(number)
    return str(int(number)) if is_whole else written


def text_of(value: Any) -> str:
    """Return a number, a text or a date as text. Raises TypeError for an object or a list."""
    if isinstance(value, str):
        return value
    if isinstance(value, Decimal):
        return digits_of(value, format(value.normalize(), "f"))
    if isinstance(value, float):
        return digits_of(value, str(value))
    if isinstance(value, bool | int | date | time | timedelta | UUID):
        return str(value)
    raise TypeError


def name_of(value: Any) -> str:
    """Return a label, a group or a category: a text without the white space around it.

    csv has no types, and pandas writes whole numbers as ``1.0`` where others are missing. So ``1.0`` is 1.
    """
    return _name_of(text_of(value))


def label_of(value: Any) -> str:
    """Return the name of a label; an empty text if it is missing."""
    return "" if value is None or value != value else name_of(value)


@lru_cache(maxsize=4096)
def _name_of(text: str) -> str:
    text = text.strip()
    if not _WHOLE.fullmatch(text):
        return text
    whole = text.partition(".")[0]
    return "0" if whole == "-0" else whole


def spelling_of(names: Collection[str]) -> Callable[[str], str]:
    """Return how to write names: as they are, or as Python does if all are booleans, which csv has in any case."""
    return str.capitalize if names and all(name.capitalize() in _BOOLEANS for name in names) else str


def same_names(names: Sequence[str]) -> list[int]:
    """Return an index for each name. All spellings of one boolean get the index of one of them."""
    spelled = spelling_of(names)
    places = {spelled(name): place for place, name in enumerate(names)}
    return [places[spelled(name)] for name in names]
