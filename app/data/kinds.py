"""The kind of each column of a table: numbers, or categories because a cell is no number."""

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from app.best_effort import warn
from app.config import ColumnsConfig
from app.data.rows import is_missing, number_of
from app.data.sources.cells import Place
from app.errors import DataError

_MOST = 0.9
"""Share of numbers above which a column of categories was probably meant to hold numbers."""


class ColumnKind(BaseModel):
    """The number of cells of each kind in a column, in the rows that were read."""

    numbers: int = 0
    words: int = 0
    """Cells that are neither numbers nor missing."""
    first_word: str = ""
    """The first of these cells, with its place."""

    @property
    def are_numbers(self) -> bool:
        """Whether all cells that have a value are numbers."""
        return self.numbers > 0 and not self.words

    def add(self, cells: pa.Array, place: Place) -> None:
        """Count cells. ``place`` returns where each is."""
        if pa.types.is_integer(cells.type) or pa.types.is_floating(cells.type):
            finite = pc.sum(pc.is_finite(cells)).as_py() or 0
            self.numbers += finite
            if finite < len(cells) - cells.null_count:
                self._look_at(cells.to_pylist(), place)
            return
        self._look_at(cells.to_pylist(), place)

    def _look_at(self, cells: Iterable[Any], place: Place) -> None:
        for row, cell in enumerate(cells):
            if is_missing(cell):
                continue
            if number_of(cell) is not None:
                self.numbers += not isinstance(cell, int | float)
                continue
            self.words += 1
            self.first_word = self.first_word or f"{cell!r} in {place(row)}"

    def __add__(self, later: "ColumnKind") -> "ColumnKind":
        """Return the kind of the cells of both."""
        numbers, words = self.numbers + later.numbers, self.words + later.words
        return ColumnKind(numbers=numbers, words=words, first_word=self.first_word or later.first_word)


Kinds = Mapping[str, ColumnKind]
"""The kind of each column, by name."""


def merge_kinds(kinds: dict[str, ColumnKind], more: Kinds) -> None:
    """Add the kinds of further cells."""
    for name, kind in more.items():
        kinds[name] = kinds[name] + kind if name in kinds else kind


def resolve_kinds(kinds: Kinds, config: ColumnsConfig) -> ColumnsConfig:
    """Return the columns, each listed under ``numbers`` or ``categories``.

    Raises:
        DataError: a column of ``data.columns.numbers`` has a cell that is no number.
    """
    for name in config.numbers:
        if (kind := kinds.get(name)) and kind.words:
            raise DataError(
                f"data.columns.numbers has {name!r}, and {kind.first_word} is not a number ({kind.words:,} such cells)"
                ": correct the cells, leave them empty, or take the column out of data.columns.numbers"
            ).of("number.invalid", "data.columns.numbers")
    categories = [name for name, kind in kinds.items() if name in config.categories or not kind.are_numbers]
    named = [*config.categories, *(name for name in categories if name not in config.categories)]
    return config.model_copy(
        update={"categories": named, "numbers": [name for name in kinds if name not in categories]}
    )


def in_words(kinds: Kinds, config: ColumnsConfig) -> dict[str, str]:
    """Return what each column is and why, by name, and warn of columns that are likely meant to be numbers."""
    told = {}
    for name, kind in kinds.items():
        if name in config.categories:
            told[name] = "categories, by data.columns.categories"
        elif kind.are_numbers:
            told[name] = "numbers"
        elif not kind.words:
            told[name] = "categories: no cell has a value"
        else:
            told[name] = f"categories: {kind.first_word} is not a number"
            if kind.numbers >= _MOST * (kind.numbers + kind.words):
                warn(
                    f"column {name!r} has {kind.numbers:,} numbers, and becomes categories because of "
                    f"{kind.words:,} other cells: {kind.first_word}; correct or empty them, or name the column in "
                    "data.columns.categories"
                )
    return told
