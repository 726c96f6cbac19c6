"""The built-in sets, as rows."""

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from app.data.builtin import BUILTIN, BUILTIN_DOCUMENTS, BUILTIN_TEST
from app.data.examples import Examples, Input
from app.data.sources.cells import BATCH_ROWS, Columns, Rows, rows_from, rows_of_objects
from app.data.sources.formats.base import DOCUMENTS, Format, Piece
from app.data.sources.source import Source, find_builtin


class Builtin(Format):
    """A set by its name. Columns of any name are its texts or files, its features, and its labels."""

    name, suffixes = "builtin", ()
    has_columns: ClassVar[bool] = False

    def read(self, pieces: Sequence[Piece], columns: Columns) -> Iterator[Rows]:
        for piece in pieces:
            for place, rows in enumerate(_batches(Source(piece.path), columns)):
                yield rows_of_objects(rows, columns, piece.path, rows_from(piece.path, 1 + place * BATCH_ROWS))


def _batches(source: Source, columns: Columns) -> Iterator[Sequence[Mapping[str, Any]]]:
    if columns.contents == DOCUMENTS:
        documents = find_builtin(source, BUILTIN_DOCUMENTS)
        assert documents is not None
        yield from ([{columns.content.name: document}] for document in documents())
        return
    examples = find_examples(source)
    for start in range(0, len(examples), BATCH_ROWS):
        part = slice(start, start + BATCH_ROWS)
        rows = zip(examples.inputs[part], examples.labels[part], strict=True)
        yield [_row(item, label, columns) for item, label in rows]


def find_examples(source: Source) -> Examples:
    """Return a set of labelled examples. Raises DataError for an unknown name."""
    known: Mapping[str, Callable[[], Examples]] = BUILTIN_TEST if source.key == "data.test_source" else BUILTIN
    read = find_builtin(source, known)
    assert read is not None
    return read()


def _row(item: Input, label: str, columns: Columns) -> Mapping[str, Any]:
    if columns.contents in ("row", "record"):
        row: dict[str, Any] = json.loads(item)
        for column in columns.all:
            if column.kind == "file" and column.name in row:
                row[column.name] = base64.b64decode(row[column.name])
    else:
        row = {columns.content.name: item}
    return row | ({columns.label.name: label} if columns.label else {})
