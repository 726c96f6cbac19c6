"""Pydantic's errors in plain words: the key, the given value and the expected one."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from app.import_string import suggestion

_EXPECTED = {
    "bool": "true or false",
    "dict": "keys with values",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "model": "keys with values",
    "string": "a text",
    "tuple": "a list",
}
"""Kinds of values, by the first word of Pydantic's name for the error."""

_WORDS = {"missing": "a value", "extra_forbidden": "no such key"}
"""What is expected where a key is missing or unknown, by Pydantic's name for the error."""


@dataclass(frozen=True)
class Problem:
    """A refused value. If it may be of several kinds, each kind has its own reason."""

    key: str
    """A dotted key; empty for the whole input."""
    given: Any
    reasons: Sequence[ErrorDetails]

    @property
    def first(self) -> ErrorDetails:
        """The reason of the first kind."""
        return self.reasons[0]

    @property
    def expected(self) -> str:
        """The values that are accepted, with the nearest name for a mistyped one."""
        of_names = [reason["ctx"]["expected"] for reason in self.reasons if reason["type"] == "literal_error"]
        names = re.split(", | or ", " or ".join(of_names)) if of_names else []
        kinds = [_expected(reason) for reason in self.reasons if reason["type"] not in ("literal_error", "bytes_type")]
        *most, last = dict.fromkeys([*names, *kinds])
        near = suggestion(self.given, [name.strip("'") for name in names]) if isinstance(self.given, str) else ""
        return f"{', '.join(most)}{' or ' if most else ''}{last}{near}"


def problems_of(error: ValidationError, given: object) -> Iterator[Problem]:
    """Yield the problems of an input. A value of several possible kinds is one problem."""
    groups: dict[str, list[tuple[str, Any, ErrorDetails]]] = {}
    for reason in error.errors(include_url=False):
        value, key, found = _places(reason, given)
        groups.setdefault(value, []).append((key, found, reason))
    for group in groups.values():
        # The kind that failed at the deepest key is the one that was meant.
        key, found, _ = max(group, key=lambda one: (one[0].count("."), one[2]["type"] not in _WORDS))
        reasons = [reason for place, _, reason in group if place == key]
        # A kind that has the key says more about its value than one that has not.
        known = [reason for reason in reasons if reason["type"] not in _WORDS]
        yield Problem(key, found, known or reasons)


def _places(reason: ErrorDetails, given: Any) -> tuple[str, str, Any]:
    """Return the key of a value of several possible kinds, and the refused key and value in it.

    Pydantic inserts the name of a kind between them, which the input does not have.
    """
    keys: list[str] = []
    value: str | None = None
    for index, part in enumerate(reason["loc"], start=1):
        is_given = part in given if isinstance(given, dict) else _is_item(part, given)
        if is_given or (reason["type"] == "missing" and index == len(reason["loc"])):
            given = given[part] if is_given else None
            keys.append(str(part))
        elif value is None:
            value = ".".join(keys)
    return (".".join(keys) if value is None else value), ".".join(keys), given


def _is_item(part: int | str, given: Any) -> bool:
    return isinstance(given, list | tuple) and isinstance(part, int) and part < len(given)


def _expected(reason: ErrorDetails) -> str:
    kind, _, what = reason["type"].partition("_")
    if reason["type"] in _WORDS:
        return _WORDS[reason["type"]]
    if kind in _EXPECTED and what in ("type", "parsing", "from_float", "attributes_type"):
        return _EXPECTED[kind]
    match kind, what:
        case "value", "error":
            return str(reason["ctx"]["error"])
        case "greater" | "less", _:
            return reason["msg"].replace("Input should be", "a number")
        case "too", "short":
            return f"{reason['ctx']['min_length']} or more of them"
        case "too", "long":
            return f"{reason['ctx']['max_length']} or fewer of them"
        case _:
            return reason["msg"].removeprefix("Input should be ")
