"""The rows of a source without end: pass after pass over its shards, laid end to end in a new order each time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from app.data.prepared import Indices
from app.training.data.samples import Samples

NO_ROWS: Indices = np.empty(0, np.int64)
_SHARDS = 0
"""The random numbers of the order of shards. Those of windows have other keys."""


def entropy_of(seed: int) -> tuple[int]:
    """Return a seed as NumPy takes it, which is never negative."""
    return (seed % 2**64,)


@dataclass
class Passes:
    """The rows of a source, of which each of ``streams`` streams has an equal part of every pass."""

    samples: Samples
    shards: Indices
    """The source's shards among all of ``samples``."""
    entropy: Sequence[int]
    """Seed sequence of the passes."""
    pass_rows: int
    """Rows that a pass reads. The others are left out, and differ from pass to pass."""
    streams: int = 1
    _last: "tuple[int, _Pass] | None" = field(default=None, init=False)
    """The last pass that was read, and its number."""

    def rows(self, start: int, stop: int, stream: int = 0) -> Indices:
        """Return a stream's rows from one place to another, counted over all passes."""
        length, parts = self.pass_rows // self.streams, [NO_ROWS]
        while start < stop:
            number, place = divmod(start, length)
            count = min(stop - start, length - place)
            first = _part_of(stream, self.streams) * length + place
            parts += self._pass(number).rows(first, first + count)
            start += count
        return np.concatenate(parts)

    def _pass(self, number: int) -> "_Pass":
        if self._last is None or self._last[0] != number:
            generator = np.random.default_rng((*self.entropy, _SHARDS, number))
            shards = self.shards[generator.permutation(len(self.shards))]
            self._last = number, _Pass(self.samples, shards, self.pass_rows, generator)
        return self._last[1]


def _part_of(stream: int, streams: int) -> int:
    """Return the part of a pass that a stream reads: its number with the bits reversed.

    So streams that are equal modulo the ranks, which one rank reads, have neighbouring parts.
    """
    return int(f"{stream:0{streams.bit_length() - 1}b}"[::-1], 2)


class _Pass:
    """The rows of shards in one order, from a random row on. After the last row comes the first one."""

    def __init__(self, samples: Samples, shards: Indices, pass_rows: int, generator: np.random.Generator) -> None:
        self._first_rows = samples.first_rows[shards]
        self._starts = np.concatenate([[0], np.cumsum(np.asarray(samples.shard_rows)[shards])])
        """Place of the first row of each shard, and the number of all rows."""
        total = int(self._starts[-1])
        self._has_row_shards = total == len(shards)
        # Rows that are left out are of another shard, or another part of it, in each pass.
        self._offset = int(generator.integers(total)) if pass_rows < total else 0

    def rows(self, start: int, stop: int) -> Iterator[Indices]:
        """Yield the rows from one place to another, in one or two parts."""
        total, start, stop = int(self._starts[-1]), start + self._offset, stop + self._offset
        for first, last in ((start, min(stop, total)), (max(start, total) - total, stop - total)):
            if first < last:
                yield self._between(first, last)

    def _between(self, start: int, stop: int) -> Indices:
        pieces = slice(np.searchsorted(self._starts, start, "right") - 1, np.searchsorted(self._starts, stop, "left"))
        if self._has_row_shards:
            return self._first_rows[pieces]
        starts = self._starts[pieces]
        skipped = np.maximum(start - starts, 0)
        first_rows = self._first_rows[pieces] + skipped
        counts = np.minimum(self._starts[1:][pieces], stop) - starts - skipped
        # Each shard's rows follow one another.
        return np.repeat(first_rows - np.cumsum(counts) + counts, counts) + np.arange(stop - start)
