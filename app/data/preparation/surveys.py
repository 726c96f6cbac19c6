"""The surveys of all units, read in slices: which rows are duplicates, or have several labels."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.config import CleanConfig
from app.data.preparation.slices import Arrays, join_slices
from app.data.preparation.survey import KEPT, Survey, code_of

_ROW_BYTES = 192
"""Memory that a row takes in ``resolve``: its hash, its number, its label, and their sorted copies."""


@dataclass(frozen=True)
class Surveys:
    """The surveys of all units, in files."""

    paths: Sequence[UPath]
    label_names: Sequence[Sequence[str]]
    """The labels of each unit, in the order of ``Survey.labels``."""
    starts: NDArray[np.int64]
    """Number of the first row of each unit, and of all rows."""

    @cached_property
    def labels(self) -> list[str]:
        """All labels, sorted."""
        return sorted(set[str]().union(*self.label_names))

    def __iter__(self) -> Iterator[tuple[int, Survey]]:
        """Yield the first row of each slice, and its survey, whose ``labels`` are indices into those of all units."""
        places = {label: place for place, label in enumerate(self.labels)}
        for unit, path in enumerate(self.paths):
            start = int(self.starts[unit])
            table = np.array([*(places[name] for name in self.label_names[unit]), -1], np.int32)
            for survey in Survey.read(path):
                yield start, survey.with_labels(table[survey.labels])
                start += len(survey.codes)

    def hashes(self, part: int, parts: int, max_rows: int) -> Iterator[Arrays]:
        """Yield rows, hashes and labels of rows that are not dropped yet and whose hash is in this part."""

        def chosen() -> Iterator[Arrays]:
            for start, survey in self:
                rows = np.flatnonzero((survey.codes == KEPT) & (survey.high % np.uint64(parts) == part))
                yield start + rows, survey.high[rows], survey.low[rows], survey.labels[rows]

        return join_slices(chosen(), max_rows)


def resolve(surveys: Surveys, clean: CleanConfig, codes: NDArray[np.uint8], max_bytes: int) -> None:
    """Write the codes of duplicates and of inputs under several labels into ``codes``, of all rows.

    Rows are compared in parts, by their hash, so that ``max_bytes`` suffice. The first of equal rows is kept.
    """
    parts, max_rows = -(-len(codes) * _ROW_BYTES // max_bytes), max(1, max_bytes // _ROW_BYTES)
    for part in range(parts):
        seen: Arrays | None = None
        for rows, high, low, labels in surveys.hashes(part, parts, max_rows):
            seen, repeated = _join(seen, (rows, high, low, labels, labels))
            if clean.deduplicate:
                codes[repeated] = code_of("duplicate")
        if seen is None:
            continue
        first_rows, high, low, *_ = (column[seen[3] != seen[4]] for column in seen)
        codes[first_rows] = code_of("conflicting")
        if len(first_rows) and not clean.deduplicate:
            for rows, row_high, row_low, _ in surveys.hashes(part, parts, max_rows):
                codes[rows[np.isin(row_high, high) & np.isin(row_low, low)]] = code_of("conflicting")


def _join(seen: Arrays | None, later: Arrays) -> tuple[Arrays, NDArray[np.int64]]:
    """Return the distinct inputs so far, with those of later rows, and the rows that repeat one.

    Columns are the first row of an input, the halves of its hash, and its lowest and highest label.
    """
    columns = [np.concatenate(pair) for pair in zip(seen, later, strict=True)] if seen else later
    order = np.lexsort((columns[0], columns[2], columns[1]))
    rows, high, low, lowest, highest = (column[order] for column in columns)
    is_first = np.ones(len(rows), bool)
    is_first[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    starts = np.flatnonzero(is_first)
    if len(starts):
        lowest, highest = np.minimum.reduceat(lowest, starts), np.maximum.reduceat(highest, starts)
    return (rows[starts], high[starts], low[starts], lowest, highest), rows[~is_first]
