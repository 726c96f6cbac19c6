"""Slices of rows: arrays of bounded size, in which the rows of a unit are written and read."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

SLICE_ROWS = 16_384
"""Rows of a slice. Only the last one of a unit has fewer."""
Arrays = tuple[NDArray[Any], ...]
"""Arrays with the same number of rows."""


class Slices:
    """Cuts rows into slices, however many arrive at a time."""

    def __init__(self) -> None:
        self._parts: list[Arrays] = []
        self._rows = 0

    def add(self, *columns: NDArray[Any]) -> Iterator[Arrays]:
        """Add rows, and yield the slices that are full."""
        self._parts.append(columns)
        self._rows += len(columns[0])
        if self._rows < SLICE_ROWS:
            return
        joined = _join(self._parts)
        full = self._rows // SLICE_ROWS * SLICE_ROWS
        self._parts, self._rows = [tuple(column[full:] for column in joined)], self._rows - full
        for start in range(0, full, SLICE_ROWS):
            yield tuple(column[start : start + SLICE_ROWS] for column in joined)

    def rest(self) -> Iterator[Arrays]:
        """Yield the rows that are left, if there are any."""
        if self._rows:
            yield _join(self._parts)


def join_slices(slices: Iterable[Arrays], max_rows: int) -> Iterator[Arrays]:
    """Join slices to parts of about ``max_rows``, so that few are worked on."""
    parts: list[Arrays] = []
    rows = 0
    for columns in slices:
        parts.append(columns)
        rows += len(columns[0])
        if rows >= max_rows:
            yield _join(parts)
            parts, rows = [], 0
    if parts:
        yield _join(parts)


def _join(parts: list[Arrays]) -> Arrays:
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))
