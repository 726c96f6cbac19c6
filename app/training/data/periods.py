"""The parts of a run in which its sources and their shares stay the same: what each window draws from each source."""

import zlib
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from app.data.prepared import Indices
from app.training.data.mixture import Mixture
from app.training.data.passes import NO_ROWS, Passes, entropy_of

if TYPE_CHECKING:
    from app.training.data.order import SampleOrder

Start = tuple[int, int]
"""The epoch and the number of a batch."""


class Period:
    """A part of a run in which sources and shares stay the same. An order with one source has one period."""

    def __init__(self, order: "SampleOrder", start: Start, mixture: Mixture | None, earlier: "Period | None") -> None:
        self.start, self.mixture = start, mixture
        self._order, self._earlier = order, earlier
        # An epoch's windows are asked for with every batch.
        self.starts, self.sizes = lru_cache(2)(self._find_starts), lru_cache(2)(self._find_sizes)

    @property
    def num_sources(self) -> int:
        """Number of sources."""
        return len(self._passes)

    @cached_property
    def _passes(self) -> list[Passes]:
        """The rows of each source."""
        samples, seed = self._order.samples, entropy_of(self._order.seed)
        if self.mixture is None:
            shards, unit = np.arange(len(samples.shard_rows)), self._order.rules.unit
            return [Passes(samples, shards, (*seed, 0), len(samples) // unit * unit, self._order.num_streams)]
        source_of = self.mixture.origins.train[samples.first_rows[:-1]]
        found = []
        for place, name in enumerate(self.mixture.names):
            shards = np.flatnonzero(source_of == place)
            used = int(np.asarray(samples.shard_rows)[shards].sum())
            found.append(Passes(samples, shards, (*seed, zlib.crc32(name.encode())), used))
        return found

    def _find_starts(self, epoch: int) -> Indices:
        """Return the number of the first batch of each window of an epoch, and that of all batches."""
        if self._order.rules.kinds is None:
            return self._layout(epoch)[0]
        return starts_of([sum(map(len, window)) for window in self.sizes(epoch)])

    def _find_sizes(self, epoch: int) -> list[list[list[int]]]:
        """Return the samples of each batch of each group of each window, where they are counted."""
        kinds, (edges, _) = self._order.rules.kinds, self._layout(epoch)
        assert kinds is not None
        if len(edges) == 2:
            return [self._all_sizes]
        return [kinds.sizes(self.draw(epoch, window)[0]) for window in range(len(edges) - 1)]

    @cached_property
    def _all_sizes(self) -> list[list[int]]:
        assert self._order.rules.kinds is not None
        return self._order.rules.kinds.sizes()

    def _layout(self, epoch: int) -> tuple[Indices, Indices]:
        """Return where each window of an epoch begins and the last one ends; and the rows of each source before that.

        The first are numbers of batches, or of rows where batches are counted. The second have shape (windows + 1,
        sources). They are counted from the period's start in its first epoch.
        """
        return self._first_layout if epoch == self.start[0] else self._whole_layout

    @cached_property
    def _first_layout(self) -> tuple[Indices, Indices]:
        epoch, number = self.start
        if self._earlier is None:
            return self._whole_layout
        return self._divide(number, int(self._earlier.starts(epoch)[-1]))

    @cached_property
    def _whole_layout(self) -> tuple[Indices, Indices]:
        total = self.mixture.num_samples if self.mixture else len(self._order.samples)
        return self._divide(0, total // self._order.rules.unit)

    def _divide(self, first: int, last: int) -> tuple[Indices, Indices]:
        """Return the layout of an epoch that goes from one batch or row to another."""
        unit = self._order.rules.unit
        window_rows = self.mixture.window_rows if self.mixture else self._order.samples.window_rows
        windows = max(1, min(last - first, -(-(last - first) * unit // max(1, window_rows))))
        edges = first + np.arange(windows + 1) * (last - first) // windows
        rows = (np.diff(edges) * unit // self._order.num_streams).tolist()
        shared = {count: self.mixture.split(count) if self.mixture else np.array([count]) for count in {*rows}}
        return edges, np.cumsum([np.zeros_like(shared[rows[0]]), *(shared[count] for count in rows)], axis=0)

    def require_sources(self) -> None:
        """Raise RecipeError if a source has no sample in a window of a whole epoch."""
        if self.mixture:
            for rows in {*np.diff(self._whole_layout[1].sum(axis=1)).tolist()}:
                self.mixture.counts(rows, "a window")

    def draw(self, epoch: int, window: int, stream: int = 0) -> list[Indices]:
        """Return the rows of each source in a window, before they are shuffled."""
        spans = (self._read_before(epoch) + self._layout(epoch)[1][window : window + 2]).T.tolist()
        return [self._read(source, start, stop, stream) for source, (start, stop) in enumerate(spans)]

    def _read_before(self, epoch: int) -> Indices:
        """Return how many rows of each source come between the period's start and an epoch."""
        first, whole = self._first_layout[1][-1], self._whole_layout[1][-1]
        passed = epoch - self.start[0]
        return first + (passed - 1) * whole if passed else np.zeros_like(first)

    def _read(self, source: int, start: int, stop: int, stream: int) -> Indices:
        """Return rows of a source: first those left from earlier, then those of its passes."""
        rest, passed = self._begun[source]
        first, last = (passed + max(place - len(rest), 0) for place in (start, stop))
        return np.concatenate([rest[start:stop], self._passes[source].rows(first, last, stream)])

    @cached_property
    def _begun(self) -> list[tuple[Indices, int]]:
        """Where each source continues: its rows left from earlier, and how many its passes have given."""
        begun = self._earlier.left(*self.start) if self._earlier else []
        return [*begun, *[(NO_ROWS, 0)] * (self.num_sources - len(begun))]

    def left(self, epoch: int, number: int) -> list[tuple[Indices, int]]:
        """Return the rows of each source that it has left before a batch, and how many its passes have given."""
        starts = self.starts(epoch)
        window = min(int(np.searchsorted(starts, number, side="right")) - 1, len(starts) - 2)
        used = [self._order.batch(epoch, one) for one in range(int(starts[window]), number)]
        stops = self._read_before(epoch) + self._layout(epoch)[1][window + 1]
        found = []
        for drawn, stop, (rest, passed) in zip(self.draw(epoch, window), stops.tolist(), self._begun, strict=True):
            left = np.concatenate([_without(drawn, np.concatenate([NO_ROWS, *used])), rest[stop:]])
            found.append((left, passed + max(0, stop - len(rest))))
        return found

    def count(self, epoch: int, numbers: set[int]) -> Indices:
        """Return how many rows of each source are in these batches of an epoch. Only parts of windows are arranged."""
        assert self.mixture
        starts, drawn = self._layout(epoch)
        counts = np.zeros(self.num_sources, np.int64)
        for window, (first, last) in enumerate(pairwise(starts.tolist())):
            own = numbers & {*range(first, last)}
            if len(own) == last - first:
                counts += drawn[window + 1] - drawn[window]
                continue
            for number in own:
                batch = self._order.batch(epoch, number)
                counts += np.bincount(self.mixture.origins.train[batch], minlength=len(counts))
        return counts


def starts_of(counts: Sequence[int]) -> Indices:
    """Return where each of several parts begins, and the last ends."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _without(samples: Indices, used: Indices) -> Indices:
    """Return the samples without the used ones, as multisets."""
    order = np.argsort(samples, kind="stable")
    ordered = samples[order]
    occurrence = np.empty_like(order)
    occurrence[order] = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
    times = np.bincount(used, minlength=int(samples.max(initial=0)) + 1)[samples]
    left: Indices = samples[occurrence >= times]
    return left
