"""Rows of a table as tensors: numbers, scaled, and categories, by their index."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from upath import UPath

from app.config import ColumnsConfig, DataConfig
from app.data.examples import Modality
from app.data.rows import CATEGORIES, NUMBERS, Row, RowColumns, TableRows, category_of, is_missing, number_in, number_of
from app.data.targets import Scale
from app.data.written import spelling_of
from app.errors import DataError
from app.storage import write_atomically
from app.tensors import Tensors, TensorSpec

SETTINGS_FILE = "table.json"


class NumberColumn(Scale):
    """A column of numbers, with the mean and the standard deviation of the training rows.

    A number becomes a multiple of the deviation. A column without one says nothing, so it is always 0.
    """

    name: str


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
        self._columns = RowColumns(*(tuple(column.name for column in kind) for kind in (numbers, categories)))
        self._means = np.array([column.mean for column in numbers])
        self._deviations = np.array([column.std or np.nan for column in numbers])
        self._indices: list[dict[str, int]] = []
        self._unknown: list[int] = []
        self._spellings: list[Callable[[str], str]] = []
        first = 0
        for column in categories:
            self._unknown.append(first)
            spelled = spelling_of(column.values)
            self._spellings.append(spelled)
            self._indices.append({spelled(value): first + 1 + index for index, value in enumerate(column.values)})
            first += 1 + len(column.values)
        self._num_categories = first

    @classmethod
    def fit(cls, inputs: Sequence[Row], config: DataConfig) -> Self:
        """Find the kind of each column: numbers, unless a value is no number or ``data.columns.categories`` names it.

        Raises:
            DataError: no row has a value in a column whose kind ``config`` does not say.
        """
        names = list(inputs[0]) if inputs else []
        numbers, categories = [], []
        for name in names:
            values = [value for row in inputs if not is_missing(value := row.get(name))]
            if _are_numbers(name, values, config.columns):
                scale = Scale.of([number_in(value, name) for value in values])
                numbers.append(NumberColumn(name=name, **scale.model_dump()))
            else:
                found = {category_of(value) for value in values}
                categories.append(CategoryColumn(name=name, values=sorted({*map(spelling_of(found), found)})))
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
        return list(self._columns.names)

    def encode(self, inputs: Sequence[Row]) -> Tensors:
        rows = TableRows.of(inputs, self._columns)
        tensors: dict[str, NDArray[Any]] = {}
        if self._numbers:
            tensors[NUMBERS] = self._scaled(rows.numbers)
        if self._categories:
            tensors[CATEGORIES] = self._places(rows.categories)
        return tensors

    def _scaled(self, numbers: NDArray[np.float64]) -> NDArray[np.float32]:
        with np.errstate(over="ignore", invalid="ignore"):
            scaled: NDArray[np.float32] = ((numbers - self._means) / self._deviations).astype(np.float32)
            is_finite = math.isfinite(np.add.reduce(scaled, axis=None))
        if not is_finite:
            scaled[np.isnan(scaled)] = 0.0  # a number that is missing, or a column without a deviation
            self._require_small(numbers, np.isfinite(scaled))
        return scaled

    def _require_small(self, numbers: NDArray[np.float64], are_small: NDArray[np.bool_]) -> None:
        for row, place in np.argwhere(~are_small).tolist():
            column = self._numbers[place]
            raise DataError(
                f"a row has {float(numbers[row, place])!r} for {column.name!r}, and the training rows have "
                f"{column.mean:g} with a deviation of {column.std:g}: expected a number of their size"
            ).of("number.far", column.name)

    def _places(self, categories: NDArray[np.object_]) -> NDArray[np.int64]:
        places = np.empty(categories.shape, np.int64)
        kinds = zip(self._indices, self._spellings, self._unknown, strict=True)
        for column, (indices, spelled, unknown) in enumerate(kinds):
            found = map(indices.get, map(spelled, categories[:, column].tolist()), repeat(unknown))
            places[:, column] = np.fromiter(found, np.int64, len(categories))
        return places

    def save(self, folder: UPath) -> None:
        settings = _Settings(numbers=self._numbers, categories=self._categories)
        write_atomically(folder / SETTINGS_FILE, settings.model_dump_json(indent=1).encode())

    @classmethod
    def load(cls, folder: UPath) -> Self:
        settings = _Settings.model_validate_json((folder / SETTINGS_FILE).read_bytes())
        return cls(settings.numbers, settings.categories)


def _are_numbers(name: str, values: Sequence[Any], config: ColumnsConfig) -> bool:
    if name in (*config.numbers, *config.categories):
        return name in config.numbers
    if not values:
        raise DataError(
            f"column {name!r} has no value in the rows that the processor is fitted to: name it in "
            "data.columns.numbers or data.columns.categories, or leave it out of data.columns.features"
        ).of("column.no_values", name)
    return all(number_of(value) is not None for value in values)
