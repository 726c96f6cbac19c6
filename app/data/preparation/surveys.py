"""The surveys of all units, read in slices: which rows are duplicates, or have several labels."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from app.data.preparation.slices import Arrays, join_slices
from app.data.preparation.survey import KEPT, Survey, code_of
from app.data.written import same_names

_ROW_BYTES = 192
"""Memory that a row takes in ``resolve``: its hash, its number, its label, and their sorted copies."""


@dataclass(frozen=True)
class Surveys:
    """The surveys of all units."""

    units: Sequence[Iterable[Survey]]
    """The slices of each unit."""
    label_names: Sequence[Sequence[str]]
    """The labels of each unit, in the order of ``Survey.labels``."""
    starts: NDArray[np.int64]
    """Number of the first row of each unit, and of all rows."""

    @cached_property
    def labels(self) -> list[str]:
        """All labels, sorted."""
        return sorted(set[str]().union(*self.label_names))

    @cached_property
    def classes(self) -> NDArray[np.int32]:
        """The class index of each label. Spellings of one boolean share a class. The last entry, -1, means no label."""
        return np.array([*same_names(self.labels), -1], np.int32)

    def __iter__(self) -> Iterator[tuple[int, Survey]]:
        """Yield the first row of each slice, and its survey, whose ``labels`` are indices into those of all units."""
        places = {label: place for place, label in enumerate(self.labels)}
        for unit, slices in enumerate(self.units):
            start = int(self.starts[unit])
            table = np.array([*(places[name] for name in self.label_names[unit]), -1], np.int32)
            for survey in slices:
                yield start, survey.with_labels(table[survey.labels])
                start += len(survey.codes)

    def hashes(self, part: int, parts: int, max_rows: int) -> Iterator[Arrays]:
        """Yield rows, hashes and classes of rows that are not dropped yet and whose hash is in this part."""

        def chosen() -> Iterator[Arrays]:
            for start, survey in self:
                rows = np.flatnonzero((survey.codes == KEPT) & ((survey.high ^ survey.low) % np.uint64(parts) == part))
                yield start + rows, survey.high[rows], survey.low[rows], self.classes[survey.labels[rows]]

        return join_slices(chosen(), max_rows)


def resolve(surveys: Surveys, rules: "Duplicates", codes: NDArray[np.uint8], max_bytes: int) -> None:
    """Write the codes of duplicates and of inputs under several labels into ``codes``, of all rows.

    Rows are compared in parts, by their hash, so that ``max_bytes`` suffice. The first of equal rows is kept.
    """
    parts, max_rows = -(-len(codes) * _ROW_BYTES // max_bytes), max(1, max_bytes // _ROW_BYTES)
    for part in range(parts):
        seen: Arrays | None = None
        for rows, high, low, labels in surveys.hashes(part, parts, max_rows):
            seen, repeated, in_test = _join(seen, (rows, high, low, labels, labels), rules.test_rows)
            if rules.deduplicate:
                codes[repeated] = code_of("duplicate")
            codes[in_test] = code_of("in_test")
        if seen is None or not rules.drops_conflicts:
            continue
        first_rows, high, low, *_ = (column[seen[3] < seen[4]] for column in seen)
        codes[first_rows] = code_of("conflicting")
        if len(first_rows) and not rules.deduplicate:
            for rows, row_high, row_low, _ in surveys.hashes(part, parts, max_rows):
                again = rows[np.isin(row_high, high) & np.isin(row_low, low)]
                codes[again[codes[again] == KEPT]] = code_of("conflicting")


@dataclass(frozen=True)
class Duplicates:
    """What happens to rows that are equal."""

    deduplicate: bool
    """Whether one of them is kept."""
    drops_conflicts: bool
    """Whether all are dropped if they have several labels."""
    test_rows: int
    """The number of rows of ``data.test_source``, which come first. Others that equal one of them are dropped."""


def _join(seen: Arrays | None, later: Arrays, test_rows: int) -> tuple[Arrays, NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct inputs so far, with those of later rows; the rows that repeat one; those that repeat a test.

    Columns are the first row of an input, the halves of its hash, and its lowest and highest label.
    """
    columns = [np.concatenate(pair) for pair in zip(seen, later, strict=True)] if seen else later
    order = np.lexsort((columns[0], columns[2], columns[1]))
    rows, high, low, lowest, highest = (column[order] for column in columns)
    is_first = np.ones(len(rows), bool)
    is_first[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    starts = np.flatnonzero(is_first)
    if not len(starts):
        return (rows, high, low, lowest, highest), rows, rows
    first_of = rows[starts][np.cumsum(is_first) - 1]
    in_test = (rows >= test_rows) & (first_of < test_rows)
    # The label of a row that is dropped does not count.
    bounds = np.iinfo(np.int32)
    lowest = np.minimum.reduceat(np.where(in_test, bounds.max, lowest), starts)
    highest = np.maximum.reduceat(np.where(in_test, bounds.min, highest), starts)
    return (rows[starts], high[starts], low[starts], lowest, highest), rows[~is_first & ~in_test], rows[in_test]
