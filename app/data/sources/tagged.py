"""Reads texts whose words are tagged: tokens with tags, or texts with spans."""

import json
from typing import Any

from app.config import ColumnsConfig
from app.data.sources.cells import Column, Columns
from app.data.sources.source import Source
from app.data.sources.units import column_names, list_files, read_source
from app.data.tagged_texts import TaggedText, tagged_by_spans
from app.data.tags import WordRule
from app.errors import DataError

_TOKENS, _TAGS, _INPUT, _SPANS = (f"data.columns.{key}" for key in ("tokens", "tags", "input", "spans"))

_BEGINS, _INSIDE = ("B", "S", "U"), ("I", "E", "L", "M")
"""Prefixes of the schemes BIO, BIOES, BILOU and BMES."""


def read_tagged(source: Source, config: ColumnsConfig) -> tuple[list[TaggedText], WordRule]:
    """Return the texts of a source, and how such texts are split into words.

    Tokens are joined by spaces, so a text to predict is split there. Texts with spans are also split between letters
    and other characters.

    Raises:
        DataError: the source has no texts, or a row cannot be read. Its file and number are named.
    """
    files = list_files(source, "row")
    names = column_names(files[0])
    has_tokens = config.tokens in names
    if not has_tokens and config.spans not in names:
        raise DataError(
            f"{files[0].path!r} has neither tokens, data.columns.tokens {config.tokens!r}, nor spans, "
            f"data.columns.spans {config.spans!r}: it has {', '.join(names) or 'nothing'}"
        )
    keys: tuple[Column, ...] = (
        (Column(_TOKENS, config.tokens, "nested"), Column(_TAGS, config.tags, "nested"))
        if has_tokens
        else (Column(_INPUT, config.input, "text"), Column(_SPANS, config.spans, "nested"))
    )
    read = _tagged_tokens if has_tokens else _tagged_spans
    texts = [
        read(content, tags, rows.place(number), config)
        for rows in read_source(source, Columns("row", keys))
        for number, (content, tags) in enumerate(zip(*(rows.cells[key.key].to_pylist() for key in keys), strict=True))
    ]
    if not texts:
        raise DataError(f"{source} has no rows: give tokens with tags, or texts with spans")
    return texts, "spaces" if has_tokens else "letters"


def _tagged_tokens(tokens_cell: str | None, tags_cell: str | None, where: str, config: ColumnsConfig) -> TaggedText:
    tokens, given = _list(tokens_cell, _TOKENS, where), _list(tags_cell, _TAGS, where)
    if len(tokens) != len(given):
        raise DataError(f"{where} has {len(tokens)} tokens and {len(given)} tags: expected one tag a token")
    words, start = [], 0
    for token in tokens:
        if not isinstance(token, str) or token.split() != [token]:
            raise DataError(f"{where} has the token {token!r}: expected texts without white space")
        words.append((start, start + len(token)))
        start += len(token) + 1
    return TaggedText(" ".join(tokens), words, [_parse(_tag_name(tag, where, config)) for tag in given])


def _tag_name(tag: object, where: str, config: ColumnsConfig) -> str:
    """Return the name of a tag. Raises DataError for a number that ``data.columns.tag_names`` does not name."""
    names = config.tag_names
    if isinstance(tag, str):
        tag = tag.strip()
        tag = int(tag) if tag.isdecimal() else tag
    if isinstance(tag, str) and tag and not tag.endswith("-"):
        return tag
    if not isinstance(tag, int) or isinstance(tag, bool):
        raise DataError(f"{where} has the tag {tag!r}: expected a text such as O or B-NAME")
    if names is None:
        raise DataError(
            f"{where} has the tag {tag}, a number: name the tags in data.columns.tag_names, in the order of their "
            "numbers, such as [O, B-PER, I-PER]"
        )
    if not 0 <= tag < len(names):
        raise DataError(f"{where} has the tag {tag}, and data.columns.tag_names has {len(names)} names: add the others")
    return names[tag]


def _tagged_spans(text: str | None, spans_cell: str | None, where: str, config: ColumnsConfig) -> TaggedText:  # noqa: ARG001
    if text is None:
        raise DataError(f"{where}: the text is not UTF-8: repair or remove it")
    spans = []
    for span in _list(spans_cell, _SPANS, where):
        try:
            start, end, label = span["start"], span["end"], span["label"]
        except (TypeError, KeyError):
            start = end = label = None
        if type(start) is not int or type(end) is not int or not isinstance(label, str) or not label:
            raise DataError(
                f"{where} has the span {span!r}: expected an object with start, end and label: two whole numbers and a "
                "text"
            )
        spans.append((start, end, label))
    return tagged_by_spans(text, spans, where)


def _parse(tag: str) -> tuple[str, bool] | None:
    """Return the type of a tag, and whether an entity begins there. A tag without a prefix is an entity of its own."""
    if tag == "O":
        return None
    prefix, dash, kind = tag.partition("-")
    if not dash or prefix not in _BEGINS + _INSIDE:
        return tag, True
    return kind, prefix in _BEGINS


def _list(cell: str | None, key: str, where: str) -> list[Any]:
    try:
        value = None if cell is None else json.loads(cell)
    except ValueError as error:
        raise DataError(f"{where}: {key} is not a list: {cell!r}") from error
    if not isinstance(value, list):
        raise DataError(f"{where}: {key} holds {'nothing' if value is None else repr(value)}: expected a list")
    return value
