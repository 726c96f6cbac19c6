"""Texts whose words are tagged: tokens with tags, or texts with spans."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from app.config import ColumnsConfig
from app.data.sources.cells import Column, Columns, Rows
from app.data.sources.formats import FORMATS
from app.data.sources.formats.base import TAGGED, SourceFile
from app.data.sources.labelled import INPUT, group_columns
from app.data.sources.units import column_names
from app.data.tags import Tags
from app.errors import DataError

_TOKENS, _TAGS, _SPANS = (f"data.columns.{key}" for key in ("tokens", "tags", "spans"))

_BEGINS, _INSIDE = ("B", "S", "U"), ("I", "E", "L", "M")
"""Prefixes of the schemes BIO, BIOES, BILOU and BMES."""


def resolve_tagged(files: Sequence[SourceFile], config: ColumnsConfig) -> ColumnsConfig:
    """Return the columns of tokens and tags; with ``tokens`` None if the first file has spans in their place.

    Without files, the recipe says which. Raises DataError if the file has neither.
    """
    if not files:
        return config
    names = column_names(files[0]) if files[0].format in FORMATS else [config.spans]
    if config.tokens in names:
        return config
    if config.spans in names:
        return config.model_copy(update={"tokens": None})
    raise DataError(
        f"{files[0].path!r} has neither tokens, data.columns.tokens {config.tokens!r}, nor spans, "
        f"data.columns.spans {config.spans!r}: it has {', '.join(names) or 'nothing'}"
    ).of("columns.missing", "data.columns")


def tagged_columns(config: ColumnsConfig, group: str | None = None) -> Columns:
    """Return the columns of tokens and tags, or of texts and spans. ``group``: the column of the group."""
    groups = group_columns(group)
    if config.tokens is None:
        return Columns(TAGGED, (Column(INPUT, config.input, "text"), Column(_SPANS, config.spans, "nested"), *groups))
    return Columns(TAGGED, (Column(_TOKENS, config.tokens, "nested"), Column(_TAGS, config.tags, "nested"), *groups))


def texts_of(rows: Rows, config: ColumnsConfig) -> Iterator[str | None]:
    """Yield the text of each row; None if it is not UTF-8. Tokens are joined by spaces, where texts are split again.

    Raises:
        DataError: a row cannot be read. Its file and number are named.
    """
    if config.tokens is None:
        yield from rows.cells[INPUT].to_pylist()
        return
    for number, cell in enumerate(rows.cells[_TOKENS].to_pylist()):
        yield " ".join(_tokens(cell, rows.place(number)))


def tags_of(rows: Rows, config: ColumnsConfig) -> Iterator[list[str]]:
    """Yield the tag of each word, row by row: O, B-TYPE or I-TYPE. Raises DataError as above."""
    keys = (_TOKENS, _TAGS) if config.tokens else (INPUT, _SPANS)
    for number, (content, given) in enumerate(zip(*(rows.cells[key].to_pylist() for key in keys), strict=True)):
        where = rows.place(number)
        if config.tokens is None:
            yield [] if content is None else _tags_by_spans(content, _list(given, _SPANS, where), where)
            continue
        tokens, tags = _tokens(content, where), _list(given, _TAGS, where)
        if len(tokens) != len(tags):
            raise DataError(f"{where} has {len(tokens)} tokens and {len(tags)} tags: expected one tag a token").of(
                "tags.count"
            )
        yield [_in_bio(_tag_name(tag, where, config), where) for tag in tags]


def _tokens(cell: str | None, where: str) -> list[str]:
    tokens = _list(cell, _TOKENS, where)
    for token in tokens:
        if not isinstance(token, str) or token.split() != [token]:
            raise DataError(f"{where} has the token {token!r}: expected texts without white space").of(
                "token.white_space"
            )
    return tokens


def _tag_name(tag: object, where: str, config: ColumnsConfig) -> str:
    """Return the name of a tag. Raises DataError for a number that ``data.columns.tag_names`` does not name."""
    names = config.tag_names
    if isinstance(tag, str):
        tag = tag.strip()
        tag = int(tag) if tag.isdecimal() else tag
    if isinstance(tag, str) and tag and not tag.endswith("-"):
        return tag
    if not isinstance(tag, int) or isinstance(tag, bool):
        raise DataError(f"{where} has the tag {tag!r}: expected a text such as O or B-NAME").of("tag.type")
    if names is None:
        raise DataError(
            f"{where} has the tag {tag}, a number: name the tags in data.columns.tag_names, in the order of their "
            "numbers, such as [O, B-PER, I-PER]"
        ).of("tag_names.missing", "data.columns.tag_names")
    if not 0 <= tag < len(names):
        raise DataError(
            f"{where} has the tag {tag}, and data.columns.tag_names has {len(names)} names: add the others"
        ).of("tag_names.too_few", "data.columns.tag_names")
    return names[tag]


def _in_bio(tag: str, where: str) -> str:
    """Return a tag in the scheme BIO. One without a prefix is an entity of its own.

    Raises:
        DataError: the tag is a prefix without a type.
    """
    if tag in ("B", "I"):
        raise DataError(f"{where} has the tag {tag!r}, a prefix without a type: write B-NAME and I-NAME").of(
            "tag.no_type"
        )
    prefix, dash, kind = tag.partition("-")
    if tag == "O" or (dash and prefix in ("B", "I")):
        return tag
    return f"{'I' if prefix in _INSIDE else 'B'}-{kind}" if dash and prefix in _BEGINS + _INSIDE else f"B-{tag}"


def _tags_by_spans(text: str, spans: Sequence[Any], where: str) -> list[str]:
    """Return the tags of words by the spans that they lie in.

    Raises:
        DataError: a span cannot be read, is not in the text, has no word, or has a word of another one.
    """
    words = Tags([], "letters").words_of(text)
    tags = ["O"] * len(words)
    for start, end, label in (_span(span, where) for span in spans):
        if not 0 <= start < end <= len(text):
            raise DataError(f"{where} has a span from {start} to {end}: the text has {len(text)} characters").of(
                "span.outside"
            )
        inside = [place for place, word in enumerate(words) if word.start < end and word.end > start]
        if not inside or any(tags[place] != "O" for place in inside):
            problem = "no word" if not inside else "a word of another span"
            raise DataError(
                f"{where}: the span from {start} to {end}, {text[start:end]!r}, has {problem}: correct it"
            ).of("span.words")
        for place in inside:
            tags[place] = f"{'B' if place == inside[0] else 'I'}-{label}"
    return tags


def _span(span: Any, where: str) -> tuple[int, int, str]:
    try:
        start, end, label = span["start"], span["end"], span["label"]
    except (TypeError, KeyError):
        start = end = label = None
    if type(start) is not int or type(end) is not int or not isinstance(label, str) or not label:
        raise DataError(
            f"{where} has the span {span!r}: expected an object with start, end and label: two whole numbers and a text"
        ).of("span.shape")
    return start, end, label


def _list(cell: str | None, key: str, where: str) -> list[Any]:
    try:
        value = None if cell is None else json.loads(cell)
    except ValueError as error:
        raise DataError(f"{where}: {key} is not a list: {cell!r}").of("cell.not_a_list", key) from error
    if not isinstance(value, list):
        raise DataError(f"{where}: {key} holds {'nothing' if value is None else repr(value)}: expected a list").of(
            "cell.not_a_list", key
        )
    return value
