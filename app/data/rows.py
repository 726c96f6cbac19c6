"""Rows of a table by columns: what shards hold, what a processor encodes, and what a request becomes."""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, overload

import numpy as np
from numpy.typing import NDArray

from app.data.written import name_of
from app.errors import DataError

Row = Mapping[str, Any]
"""A row of a table: a value for each column, and None for one that is unknown."""
Record = Mapping[str, Any]
"""The fields that a record has: texts, the contents of files, and rows."""
NUMBERS, CATEGORIES = "numbers", "categories"
"""The two kinds of columns: the names of their cells in shards, and of the tensors that they become."""


@dataclass(frozen=True)
class RowColumns:
    """The names of a table's columns by their kind, once it is decided."""

    numbers: tuple[str, ...]
    categories: tuple[str, ...]

    @classmethod
    def of(cls, names: Sequence[str], categories: Collection[str]) -> Self:
        """Return the columns of a table. Those that are no ``categories`` have numbers."""
        return cls(*(tuple(name for name in names if (name in categories) is named) for named in (False, True)))

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return self.numbers + self.categories

    @property
    def kept(self) -> list[str]:
        """The kinds that there are, which are the columns of shards that hold the cells."""
        return [*([NUMBERS] if self.numbers else []), *([CATEGORIES] if self.categories else [])]

    def read(self, rows: Sequence[Row]) -> "TableRows":
        """Return rows by columns. Raises DataError as ``TableRows.of``."""
        return TableRows.of(rows, self)

    def open(self, cells: Mapping[str, NDArray[Any]]) -> "TableRows":
        """Return rows whose cells are in an array for each of ``kept``."""
        none = np.empty((len(next(iter(cells.values()))), 0))
        return TableRows(self, cells.get(NUMBERS, none), cells.get(CATEGORIES, none))


class TableRows(Sequence[Row]):
    """Rows of a table. They are alike wherever they come from: equal cells have equal bits."""

    def __init__(self, columns: RowColumns, numbers: NDArray[np.float64], categories: NDArray[np.object_]) -> None:
        """Both arrays have the shape (rows, columns). A number that is missing is NaN, and a category an empty text."""
        self.columns, self.numbers, self.categories = columns, numbers, categories

    @classmethod
    def of(cls, rows: Sequence[Row], columns: RowColumns) -> Self:
        """Return rows with these columns.

        Raises:
            DataError: a row is no object, lacks a column, or has a word in a column of numbers.
        """
        if isinstance(rows, cls) and rows.columns == columns:
            return rows
        for row in rows:
            _require(row, columns)
        return cls.of_cells({name: [row[name] for row in rows] for name in columns.names}, columns)

    @classmethod
    def of_cells(cls, cells: Mapping[str, Sequence[Any]], columns: RowColumns) -> Self:
        """Return rows with the cells of each column. Raises DataError for a word in a column of numbers."""
        count = len(next(iter(cells.values())))
        numbers = np.empty((count, len(columns.numbers)))
        categories = np.empty((count, len(columns.categories)), object)
        for place, name in enumerate(columns.numbers):
            numbers[:, place] = [number_in(cell, name) for cell in cells[name]]
        for place, name in enumerate(columns.categories):
            categories[:, place] = [category_of(cell) for cell in cells[name]]
        return cls(columns, numbers, categories)

    @property
    def cells(self) -> dict[str, NDArray[Any]]:
        """The cells of each of ``columns.kept``."""
        cells: dict[str, NDArray[Any]] = {NUMBERS: self.numbers, CATEGORIES: self.categories}
        return {name: cells[name] for name in self.columns.kept}

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Row]:
        return (self[place] for place in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Row | Self:
        if isinstance(index, slice):
            return type(self)(self.columns, self.numbers[index], self.categories[index])
        numbers = (None if math.isnan(number) else number for number in self.numbers[index].tolist())
        categories = (category or None for category in self.categories[index].tolist())
        return dict(zip(self.columns.names, (*numbers, *categories), strict=True))


@dataclass(frozen=True)
class RecordColumns:
    """The fields of records by name: the columns of a row, once their kinds are decided, or what else it is."""

    fields: dict[str, RowColumns | Literal["text", "file"]]

    @property
    def kept(self) -> list[str]:
        """The columns of shards that hold the fields."""
        return [name for names in self.kept_of.values() for name in names]

    @property
    def kept_of(self) -> dict[str, dict[str, str]]:
        """The columns of shards of each field, with the kind of those of a row; of others there is one."""
        return {
            name: {f"field.{name}.{kind}": kind for kind in field.kept}
            if isinstance(field, RowColumns)
            else {f"field.{name}": field}
            for name, field in self.fields.items()
        }

    def read(self, records: Sequence[Record]) -> "Records":
        """Return records by fields. Raises DataError as ``TableRows.of``."""
        found = Records.of(records, list(self.fields))
        rows = {name: field for name, field in self.fields.items() if isinstance(field, RowColumns)}
        return Records(found.has, {**found.contents, **{n: of.read(found.contents[n]) for n, of in rows.items()}}, self)

    def open(self, cells: Mapping[str, NDArray[Any]]) -> "Records":
        """Return records whose cells are in an array for each of ``kept``. A text or a file that is missing is None."""
        has: dict[str, NDArray[np.bool_]] = {}
        contents: dict[str, Sequence[Any]] = {}
        for name, field in self.fields.items():
            own = {kind: cells[kept] for kept, kind in self.kept_of[name].items()}
            if isinstance(field, RowColumns):
                rows = field.open(own)
                has[name] = ~np.isnan(rows.numbers).all(axis=1) | (rows.categories != "").any(axis=1)
                contents[name] = TableRows(field, rows.numbers[has[name]], rows.categories[has[name]])
            else:
                found = own[field].tolist()
                has[name] = np.array([cell is not None for cell in found], bool)
                contents[name] = [cell for cell in found if cell is not None]
        return Records(has, contents, self)


class Records(Sequence[Record]):
    """Records by fields."""

    def __init__(
        self,
        has: Mapping[str, NDArray[np.bool_]],
        contents: Mapping[str, Sequence[Any]],
        columns: RecordColumns = RecordColumns({}),
    ) -> None:
        """``has`` tells which records have a field, of shape (records,), and ``contents`` the field of these."""
        self.has, self.contents, self.columns = has, contents, columns

    @classmethod
    def of(cls, records: Sequence[Record], names: Sequence[str]) -> Self:
        """Return records that may have the fields ``names``."""
        has = {name: np.array([name in record for record in records], bool) for name in names}
        return cls(has, {name: [record[name] for record in records if name in record] for name in names})

    @property
    def cells(self) -> dict[str, Sequence[Any] | NDArray[Any]]:
        """The cells of each of ``columns.kept``."""
        cells: dict[str, Sequence[Any] | NDArray[Any]] = {}
        for name, kept in self.columns.kept_of.items():
            contents, has = self.contents[name], self.has[name]
            if isinstance(contents, TableRows):
                for column, kind in kept.items():
                    given = contents.cells[kind]
                    filled = np.full((len(has), given.shape[1]), math.nan if kind == NUMBERS else "", given.dtype)
                    filled[has] = given
                    cells[column] = filled
            else:
                found = iter(contents)
                cells[next(iter(kept))] = [next(found) if is_there else None for is_there in has.tolist()]
        return cells

    def __len__(self) -> int:
        return len(next(iter(self.has.values())))

    def __iter__(self) -> Iterator[Record]:
        found = {name: iter(contents) for name, contents in self.contents.items()}
        for number in range(len(self)):
            yield {name: next(items) for name, items in found.items() if self.has[name][number]}

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        return list(self)[index]


def _require(row: Row, columns: RowColumns) -> None:
    if not isinstance(row, Mapping):
        raise DataError(f"a row is {row!r}: expected an object with a value for each column").of("row.not_an_object")
    if missing := [name for name in columns.names if name not in row]:
        raise DataError(
            f"a row has no {missing[0]!r}: expected {', '.join(columns.names)}, and null for a value that is unknown"
        ).of("row.incomplete", missing[0])


def number_in(value: Any, name: str) -> float:
    """Return a cell of a column of numbers; NaN if it is missing."""
    if (number := number_of(value)) is not None:
        return number
    if is_missing(value):
        return math.nan
    raise DataError(f"a row has {value!r} for {name!r}: expected a number, or null if it is unknown").of(
        "number.invalid", name
    )


def number_of(value: Any) -> float | None:
    """Return a value as a finite number; None if it is none. ``1,234`` and ``1_000`` are none: nothing is guessed."""
    if isinstance(value, bool) or (isinstance(value, str) and "_" in value):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number + 0.0 if math.isfinite(number) else None  # -0.0 is 0


_MISSING = frozenset({"", "?", "na", "n/a", "#n/a", "<na>", "nan", "-nan", "null", "none"})
"""Words for a missing value, in lower case: those of pandas' readers, and that of the UCI repository."""


def is_missing(value: Any) -> bool:
    """Return whether a cell has no value."""
    return value is None or (isinstance(value, str) and value.strip().lower() in _MISSING)


def category_of(value: Any) -> str:
    """Return the name of a cell's category, which csv and typed files have alike; an empty text if it is missing."""
    if is_missing(value):
        return ""
    return json.dumps(value) if isinstance(value, list | dict) else name_of(value)
