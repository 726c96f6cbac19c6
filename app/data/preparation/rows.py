"""Rows as the readers of all formats return them, their hashes, and the types of their cells."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import repeat
from typing import Literal

from app.data.examples import Input
from app.errors import DataError

BATCH_ROWS, BATCH_BYTES = 4096, 4 * 2**20
"""Maximum that is read of a table at a time."""
CellType = Literal["text", "integer", "number", "boolean", "time"]
Types = Mapping[str, Mapping[CellType, str]]
"""The file and row of the first cell, by column and cell type. Cells of csv have no type."""


@dataclass(frozen=True)
class Columns:
    """The columns that are read, by their keys in the recipe."""

    input: str
    label: str | None
    group: str | None
    is_image: bool = False
    """Whether inputs are pictures."""

    @property
    def names(self) -> dict[str, str]:
        """The name of each column that is read, by its key."""
        keys = {"data.columns.input": self.input, "data.columns.label": self.label, "data.group_column": self.group}
        return {key: name for key, name in keys.items() if name is not None}

    def require_in(self, path: str, found: Sequence[str]) -> None:
        """Raise DataError if a table lacks one of them, or has two of one name."""
        for key, column in self.names.items():
            if column not in found:
                raise DataError(f"{key} is {column!r}, which {path!r} does not have: it has {', '.join(found)}")
            if (count := found.count(column)) > 1:
                raise DataError(f"{key} is {column!r}, and {path!r} has {count} columns of this name: rename one")


@dataclass(frozen=True)
class Rows:
    """A few rows. ``bytes`` is a text of unknown encoding, or the content of an image file."""

    inputs: Sequence[Input]
    labels: Sequence[str] | None = None
    groups: Sequence[str] | None = None
    files: Sequence[str] | None = None
    """The file of each row, if each row has its own."""
    types: Types = field(default_factory=dict)


class RowsDigest:
    """A hash of rows in their order, however they come in batches. Two passes over a source compare theirs."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)

    def add(self, rows: Rows) -> None:
        """Add rows, with their labels and groups."""
        for row in zip(rows.inputs, rows.labels or repeat(""), rows.groups or repeat("")):  # noqa: B905
            for cell in row:
                content = cell.encode("utf-8", "surrogatepass") if isinstance(cell, str) else cell
                self._hash.update(len(content).to_bytes(8))
                self._hash.update(content)

    def digest(self) -> bytes:
        """Return the hash of all rows that were added."""
        return self._hash.digest()


def merge_types(found: Iterable[Types]) -> dict[str, dict[CellType, str]]:
    """Return the types of the cells of several parts of a source, each with its first place.

    Raises:
        DataError: a column has cells of two types. The same label could be two classes, such as 1 and 1.0.
    """
    merged: dict[str, dict[CellType, str]] = {}
    for types in found:
        for column, places in types.items():
            for cell_type, place in places.items():
                merged.setdefault(column, {}).setdefault(cell_type, place)
    for column, places in merged.items():
        if len(places) > 1:
            (one, first), (other, second), *_ = places.items()
            raise DataError(
                f"column {column!r} has cells of two types: {one} in {first}, and {other} in {second}; write all of "
                "them as one type"
            )
    return merged


def rows_of_cells(
    cells: Mapping[str, list[Input]],
    columns: Columns,
    types: Mapping[str, Mapping[CellType, str]],
    place: Callable[[int], str],
) -> Rows:
    """Return rows, from their cells by column.

    Raises:
        DataError: a label or a group is not text in UTF-8. ``place`` says where a row is.
    """
    keys: dict[str, list[str]] = {}
    for name in {columns.label, columns.group} - {None}:
        assert name is not None
        bad = next((row for row, cell in enumerate(cells[name]) if isinstance(cell, bytes)), None)
        if bad is not None:
            raise DataError(f"{place(bad)}: {name!r} is not text in UTF-8: correct it")
        keys[name] = [cell for cell in cells[name] if isinstance(cell, str)]
    return Rows(
        cells[columns.input],
        None if columns.label is None else keys[columns.label],
        None if columns.group is None else keys[columns.group],
        types=types,
    )


def cell_text(value: object) -> Input:
    """Return a cell as text. Empty cells become empty texts, as in tables that are held in memory."""
    if isinstance(value, bytes):
        return value
    return "" if value is None or value != value else str(value)


def decode(cell: bytes) -> Input:
    """Return a text; the bytes themselves if they are not UTF-8."""
    try:
        return cell.decode()
    except UnicodeDecodeError:
        return cell
