"""The built-in sets, as rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

from app.data.builtin import (
    BUILTIN,
    BUILTIN_CHATS,
    BUILTIN_DOCUMENTS,
    BUILTIN_PAIRS,
    BUILTIN_SPANS,
    BUILTIN_TEST,
)
from app.data.examples import Examples, Natural
from app.data.sources.cells import BATCH_ROWS, Columns, Rows, rows_from, rows_of_objects
from app.data.sources.formats.base import CHATS, DOCUMENTS, PAIRS, TAGGED, Format, Piece
from app.data.sources.source import Source, find_builtin
from app.errors import DataError

TEST_KEY = "data.test_source"


class Builtin(Format):
    """A set by its name. Columns of any name are its texts or files, its features, and its labels."""

    suffixes = ()
    has_columns: ClassVar[bool] = False

    def __init__(self, name: str, key: str) -> None:
        """``key``: the one of the recipe that names the set. The test sets have names of their own."""
        self.name, self._key = name, key

    def known(self, contents: str) -> Mapping[str, Callable[[], Any]]:
        """Return the sets that hold these contents, by name."""
        return BUILTIN_TEST if self._key == TEST_KEY else _SETS.get(contents, BUILTIN)

    def column_names(self, path: str) -> list[str]:
        """Return the features or the fields of the first row; none if it has neither."""
        examples = find_examples(Source(path, self._key))
        first = examples.inputs[0]
        return list(first) if isinstance(first, Mapping) else []

    def read(self, pieces: Sequence[Piece], columns: Columns) -> Iterator[Rows]:
        for piece in pieces:
            for place, rows in enumerate(_batches(Source(piece.path, self._key), columns)):
                yield rows_of_objects(rows, columns, piece.path, rows_from(piece.path, 1 + place * BATCH_ROWS))


_SETS: Mapping[str, Mapping[str, Callable[[], Iterator[Any]]]] = {
    DOCUMENTS: BUILTIN_DOCUMENTS,
    TAGGED: BUILTIN_SPANS,
    PAIRS: BUILTIN_PAIRS,
    CHATS: BUILTIN_CHATS,
}
BUILTIN_SETS, BUILTIN_TEST_SETS = Builtin("builtin", "data.source"), Builtin("builtin-test", TEST_KEY)


def _batches(source: Source, columns: Columns) -> Iterator[Sequence[Mapping[str, Any]]]:
    if columns.contents in _SETS:
        read = find_builtin(source, _SETS[columns.contents])
        assert read is not None
        items = read()
        # Documents may be long.
        while some := list(islice(items, 1 if columns.contents == DOCUMENTS else BATCH_ROWS)):
            yield [_cells(item, columns) for item in some]
        return
    examples = find_examples(source)
    if examples.modality != columns.contents:
        raise DataError(
            f"{source} holds {examples.modality}s, the task takes {columns.contents}s: change one of them"
        ).of("source.contents", "data.source")
    for start in range(0, len(examples), BATCH_ROWS):
        part = slice(start, start + BATCH_ROWS)
        rows = zip(examples.inputs[part], examples.labels[part], strict=True)
        yield [_row(item, label, columns) for item, label in rows]


def _cells(item: Any, columns: Columns) -> Mapping[str, Any]:
    if columns.contents == TAGGED:
        text, spans = item
        item = text, [dict(zip(("start", "end", "label"), span, strict=True)) for span in spans]
    names = [column.name for column in columns.all if not column.is_optional]
    return dict(zip(names, item if isinstance(item, tuple) else (item,), strict=True))


def find_examples(source: Source) -> Examples:
    """Return a set of labelled examples. Raises DataError for an unknown name."""
    known: Mapping[str, Callable[[], Examples]] = BUILTIN_TEST if source.key == TEST_KEY else BUILTIN
    read = find_builtin(source, known)
    assert read is not None
    return read()


def _row(item: Natural, label: str, columns: Columns) -> Mapping[str, Any]:
    row = item if isinstance(item, Mapping) else {columns.content.name: item}
    return {**row, **({columns.label.name: label} if columns.label else {})}
