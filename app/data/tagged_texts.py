"""Reads texts whose words are tagged: tokens with tags, or texts with spans."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upath import UPath

from app.config import ColumnsConfig
from app.data.tags import OUTSIDE, Tags, Word, WordRule
from app.errors import DataError

_BEGINS, _INSIDE = ("B", "S", "U"), ("I", "E", "L", "M")
"""Prefixes of the schemes BIO, BIOES, BILOU and BMES."""

Span = tuple[int, int, str]
"""First character, end and label."""


@dataclass(frozen=True)
class TaggedText:
    """A text with its words, and for each the type of its entity, or None, and whether the entity begins there."""

    text: str
    words: Sequence[tuple[int, int]]
    tags: Sequence[tuple[str, bool] | None]

    @property
    def types(self) -> set[str]:
        """The types of its entities."""
        return {tag[0] for tag in self.tags if tag}

    def numbered(self, targets: Tags) -> tuple[str, list[Word]]:
        """Return the text, and its words with their classes. Raises DataError for a type that is not known."""
        number = {kind: index for index, kind in enumerate(targets.types)}
        if unknown := sorted(self.types - set(targets.types)):
            raise DataError(
                f"data.test_source has the label {unknown[0]!r}, but data.source has only {', '.join(targets.types)}: "
                "give a test source with these labels only"
            )
        classes = [OUTSIDE if tag is None else 2 * number[tag[0]] + 1 + (not tag[1]) for tag in self.tags]
        return self.text, [Word(*place, tag) for place, tag in zip(self.words, classes, strict=True)]


def read_jsonl(path: UPath, source: str, columns: ColumnsConfig) -> tuple[list[TaggedText], WordRule]:
    """Return the texts of a file, and how such texts are split into words.

    Tokens are joined by spaces, so a text to predict is split there. Texts with spans are also split between letters
    and other characters.

    Raises:
        DataError: a line cannot be read. Its number is named.
    """
    rows: list[tuple[str, Mapping[str, Any]]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        where = f"{source}, line {number}"
        if line.strip():
            rows.append((where, _object(line, where)))
    if not rows:
        raise DataError(f"{source} has no rows: give tokens with tags, or texts with spans")
    if columns.tokens in rows[0][1]:
        return [_tagged_tokens(row, where, columns) for where, row in rows], "spaces"
    return [_tagged_spans(row, where, columns) for where, row in rows], "letters"


def tagged_by_spans(text: str, spans: Sequence[Span], where: str) -> TaggedText:
    """Return a text whose words are tagged by the spans that they lie in.

    Raises:
        DataError: a span is not in the text, has no word, or has a word of another one.
    """
    words = [(word.start, word.end) for word in Tags([], "letters").words_of(text)]
    tags: list[tuple[str, bool] | None] = [None] * len(words)
    for start, end, label in spans:
        if not 0 <= start < end <= len(text):
            raise DataError(f"{where} has a span from {start} to {end}: the text has {len(text)} characters")
        inside = [place for place, (first, last) in enumerate(words) if first < end and last > start]
        if not inside or any(tags[place] for place in inside):
            problem = "no word" if not inside else "a word of another span"
            raise DataError(f"{where}: the span from {start} to {end}, {text[start:end]!r}, has {problem}: correct it")
        for place in inside:
            tags[place] = label, place == inside[0]
    return TaggedText(text, words, tags)


def _tagged_tokens(row: Mapping[str, Any], where: str, columns: ColumnsConfig) -> TaggedText:
    tokens, tags = (_list(row, key, getattr(columns, key), where) for key in ("tokens", "tags"))
    if len(tokens) != len(tags):
        raise DataError(f"{where} has {len(tokens)} tokens and {len(tags)} tags: expected one tag a token")
    words, start = [], 0
    for token in map(str, tokens):
        if not token or token.split() != [token]:
            raise DataError(f"{where} has the token {token!r}: expected tokens without white space")
        words.append((start, start + len(token)))
        start += len(token) + 1
    return TaggedText(" ".join(map(str, tokens)), words, [_parse(str(tag)) for tag in tags])


def _tagged_spans(row: Mapping[str, Any], where: str, columns: ColumnsConfig) -> TaggedText:
    text = row.get(columns.input)
    if not isinstance(text, str):
        raise DataError(
            f"{where} has neither tokens, data.columns.tokens {columns.tokens!r}, nor a text, data.columns.input "
            f"{columns.input!r}: it has {', '.join(row) or 'nothing'}"
        )
    spans = []
    for span in _list(row, "spans", columns.spans, where):
        try:
            spans.append((int(span["start"]), int(span["end"]), str(span["label"])))
        except (TypeError, KeyError, ValueError) as error:
            raise DataError(f"{where} has the span {span!r}: expected an object with start, end and label") from error
    return tagged_by_spans(text, spans, where)


def _parse(tag: str) -> tuple[str, bool] | None:
    """Return the type of a tag, and whether an entity begins there. A tag without a prefix is an entity of its own."""
    if tag == "O":
        return None
    prefix, dash, kind = tag.partition("-")
    if not dash or prefix not in _BEGINS + _INSIDE:
        return tag, True
    return kind, prefix in _BEGINS


def _object(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise DataError(f"{where} holds a {type(row).__name__}: expected an object")
    return row


def _list(row: Mapping[str, Any], key: str, column: str, where: str) -> list[Any]:
    value = row.get(column)
    if not isinstance(value, list):
        given = f"holds a {type(value).__name__}" if column in row else f"is missing: there are {', '.join(row)}"
        raise DataError(f"{where}: data.columns.{key} {column!r} {given}; expected a list")
    return value
