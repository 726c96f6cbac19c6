"""Rows of a table as tensors: numbers, scaled, and categories, by their index."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from upath import UPath

from app.config import DataConfig
from app.data.examples import Input, Modality
from app.data.targets import Scale
from app.data.written import name_of
from app.errors import DataError
from app.storage import write_atomically
from app.tensors import Tensors, TensorSpec

SETTINGS_FILE = "table.json"
NUMBERS, CATEGORIES = "numbers", "categories"
_MAX_SCALED = float(np.finfo(np.float32).max)


class NumberColumn(Scale):
    """A column of numbers, with the mean and the standard deviation of the training rows."""

    name: str

    def scaled(self, number: float) -> float:
        """Return a number as a multiple of the deviation. A column without one says nothing, so it is always 0."""
        return (number - self.mean) / self.std if self.std else 0.0


class CategoryColumn(BaseModel):
    """A column of categories, with those of the training rows in order."""

    name: str
    values: list[str]


class _Settings(BaseModel):
    numbers: list[NumberColumn]
    categories: list[CategoryColumn]


class TabularProcessor:
    """``numbers``, float32 of shape (rows, columns), and ``categories``, int64 of shape (rows, columns).

    A table without columns of one kind has no such tensor. A missing number is the mean. A category that is missing, or
    that no training row had, is 0 in its column, and the others follow. Each column has indices of its own.
    """

    modality: ClassVar[Modality] = "row"

    def __init__(self, numbers: Sequence[NumberColumn], categories: Sequence[CategoryColumn]) -> None:
        self._numbers, self._categories = list(numbers), list(categories)
        self._indices: list[dict[str, int]] = []
        self._unknown: list[int] = []
        first = 0
        for column in categories:
            self._unknown.append(first)
            self._indices.append({value: first + 1 + index for index, value in enumerate(column.values)})
            first += 1 + len(column.values)
        self._num_categories = first

    @classmethod
    def fit(cls, inputs: Sequence[Input], config: DataConfig) -> Self:
        """Find the kind of each column: numbers, unless a value is none or ``data.columns.categories`` names it."""
        rows = [_read(item) for item in inputs]
        names = list(rows[0]) if rows else []
        if unknown := [name for name in config.columns.categories if name not in names]:
            raise DataError(f"data.columns.categories has {unknown[0]!r}: the columns are {', '.join(names)}")
        numbers, categories = [], []
        for name in names:
            values = [row[name] for row in rows if not is_missing(row.get(name))]
            parsed = None if name in config.columns.categories else _parse_numbers(values)
            if parsed is None:
                categories.append(CategoryColumn(name=name, values=sorted({_category(value) for value in values})))
            else:
                numbers.append(NumberColumn(name=name, **Scale.of(parsed).model_dump()))
        return cls(numbers, categories)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        numbers = TensorSpec(NUMBERS, np.dtype(np.float32), (-1, len(self._numbers)))
        categories = TensorSpec(
            CATEGORIES, np.dtype(np.int64), (-1, len(self._categories)), values_below=self._num_categories
        )
        return (*([numbers] if self._numbers else []), *([categories] if self._categories else []))

    @property
    def facts(self) -> Mapping[str, int]:
        return {
            "num_numbers": len(self._numbers),
            "num_categories": self._num_categories,
            "num_category_columns": len(self._categories),
        }

    @property
    def columns(self) -> list[str]:
        """The names of the columns that a row has."""
        return [column.name for column in self._numbers] + [column.name for column in self._categories]

    def encode(self, inputs: Sequence[Input]) -> Tensors:
        rows = [self._checked(_read(item)) for item in inputs]
        tensors: dict[str, NDArray[Any]] = {}
        if self._numbers:
            numbers = np.array([[self._number(row, column) for column in self._numbers] for row in rows])
            tensors[NUMBERS] = numbers.astype(np.float32)
        if self._categories:
            tensors[CATEGORIES] = np.array([self._row_categories(row) for row in rows], np.int64)
        return tensors

    def _checked(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        if missing := [name for name in self.columns if name not in row]:
            raise DataError(
                f"a row has no {missing[0]!r}: expected {', '.join(self.columns)}, and null for a value that is unknown"
            )
        return row

    def _number(self, row: Mapping[str, Any], column: NumberColumn) -> float:
        if is_missing(value := row[column.name]):
            return 0.0
        if (number := number_of(value)) is None:
            raise DataError(f"a row has {value!r} for {column.name!r}: expected a number, or null if it is unknown")
        if abs(scaled := column.scaled(number)) > _MAX_SCALED:
            raise DataError(
                f"a row has {value!r} for {column.name!r}, and the training rows have {column.mean:g} with a deviation "
                f"of {column.std:g}: expected a number of their size"
            )
        return scaled

    def _row_categories(self, row: Mapping[str, Any]) -> list[int]:
        columns = zip(self._categories, self._indices, self._unknown, strict=True)
        return [
            unknown if is_missing(value := row[column.name]) else indices.get(_category(value), unknown)
            for column, indices, unknown in columns
        ]

    def save(self, folder: UPath) -> None:
        settings = _Settings(numbers=self._numbers, categories=self._categories)
        write_atomically(folder / SETTINGS_FILE, settings.model_dump_json(indent=1).encode())

    @classmethod
    def load(cls, folder: UPath) -> Self:
        settings = _Settings.model_validate_json((folder / SETTINGS_FILE).read_bytes())
        return cls(settings.numbers, settings.categories)


def _read(item: Input) -> dict[str, Any]:
    try:
        row = json.loads(item)
    except ValueError as error:
        raise DataError(f"a row is not JSON ({error}): expected an object with a value for each column") from error
    if not isinstance(row, dict):
        raise DataError(f"a row is {item!r}: expected an object with a value for each column")
    return row


def _parse_numbers(values: Sequence[Any]) -> list[float] | None:
    """Return the values as finite numbers; None if one is none, or there are none."""
    numbers = [number for value in values if (number := number_of(value)) is not None]
    return numbers if numbers and len(numbers) == len(values) else None


def number_of(value: Any) -> float | None:
    """Return a value as a finite number; None if it is none. ``1,234`` and ``1_000`` are none: nothing is guessed."""
    if isinstance(value, bool) or (isinstance(value, str) and "_" in value):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


_MISSING = frozenset({"", "?", "na", "n/a", "#n/a", "<na>", "nan", "-nan", "null", "none"})
"""Words for a missing value, in lower case: those of pandas' readers, and that of the UCI repository."""


def is_missing(value: Any) -> bool:
    """Return whether a cell has no value."""
    return value is None or (isinstance(value, str) and value.strip().lower() in _MISSING)


def _category(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list | dict) else name_of(value)
