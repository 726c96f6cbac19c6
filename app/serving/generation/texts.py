"""Texts within JSON values, and names within texts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from app.errors import RequestError

_PART_CHARACTERS = 16
"""The minimum number of characters that each text of a message counts as."""
PRIVATE = range(0xF0000, 0xFFFFE)
"""Private-use characters, which have no standard meaning."""


def split_at_names(text: str, names: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Split a text at some names. Yield the names and the parts between them. The longest name counts."""
    # A regular expression of all names would hold the GIL for the whole of a long text.
    found: list[tuple[int, int]] = []
    for name in names:
        start = text.find(name)
        while start >= 0:
            found.append((start, -len(name)))
            start = text.find(name, start + len(name))
    place = 0
    for start, negative in sorted(found):
        if start < place:
            continue
        if start > place:
            yield text[place:start], False
        place = start - negative
        yield text[start:place], True
    if place < len(text):
        yield text[place:], False


def is_longer(value: Any, characters: int) -> bool:
    """Return whether a JSON value has more characters than a limit, or so many parts that it takes as long."""
    left = characters
    for text in strings(value):
        left -= len(text) + _PART_CHARACTERS
        if left < 0:
            return True
    return False


def strings(value: Any) -> Iterator[str]:
    """Yield all texts of a JSON value, and the keys of its objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with all its texts and keys changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


def unused_characters(text: str, number: int) -> list[str]:
    """Return private-use characters that a text does not contain. Raises RequestError if it contains nearly all."""
    used = {ord(character) for character in text}
    unused = [chr(code) for code in PRIVATE if code not in used][:number]
    if len(unused) < number:
        raise RequestError("messages has all private characters of Unicode: leave them out").of("text.unicode")
    return unused
