"""The order of training samples: windows of shards, in each of which a few rules arrange the rows into batches.

1. A source gives its rows without end, in passes over its shards (``passes``). A pass lays the shards end to end in an
   order by chance. Data in memory are the case of one window, in which each row is a shard of its own (``samples``).
2. An epoch has as many samples as all sources together, less those that fill no batch. With one source it is one pass.
   It is divided into windows of equal size. A window takes the next rows of each source, by the sources' shares. They
   are exact to one sample in a window, and every source is read to its end before it begins anew.
3. A window shuffles the rows of each source, and spreads each source evenly over the window. Then its rules act
   (``rules``), always in this order: the rows are parted by group; balanced classes choose rows; a curriculum puts easy
   rows first; rows of similar length are put together; they are cut into batches of one size, or up to a budget of
   tokens; the batches are shuffled, and those of several groups are spread evenly.
4. Sizes are known before rows are read. Without groups and a budget, a window has a whole number of batches. With them,
   samples are counted by group and length, which the order has for all rows. So the number of steps is known, too.
5. One source of more than one window has up to 16 streams, unless its batches are counted or balanced. Each reads a
   part of the pass, arranges its own rows, and gives the same part of each batch. Sample ``i`` of a batch is of stream
   ``i`` modulo the streams, and rank ``r`` of ``n`` has samples ``r``, ``r + n``, and so on. So a rank reads shards of
   its own if the number of ranks is a power of two, and batches are the same for any number of ranks.
6. When sources or shares change in a run, a new period begins at a batch. Each source goes on with the rows of the
   window under way that no batch has had, and then with the rest of its pass. The epoch under way keeps its length.
7. All follows from the data, the recipe, the seed, and the epoch and number of a batch. Nothing else is kept, so a
   resumed run enters a window anywhere. When a window is entered, the shards of the next one are fetched.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import ClassVar, NamedTuple

import numpy as np

from app.data.prepared import Indices, ShardedSamples
from app.training.data.mixture import Mixture
from app.training.data.passes import NO_ROWS, Passes
from app.training.data.ranks import DataRank, partners_of
from app.training.data.rules import Batches, Rules, Window, evenly

PARTNER_BLOCK = 64
"""Block of ``partners_of``: a rank has every n-th sample of a batch."""
_MAX_STREAMS = 16
_ROWS, _BATCHES = 1, 2
"""What a window shuffles. Each has random numbers of its own."""

Start = tuple[int, int]
"""The epoch and the number of a batch."""


@dataclass
class SampleOrder:
    """The global batches of every epoch, as indices into the split. Epochs begin at 1, numbers at 0."""

    name: ClassVar[str] = "windows-1"
    """Checkpoints record it, because they count batches. A change of the order needs a new name."""

    samples: ShardedSamples
    rules: Rules
    seed: int
    mixtures: Sequence[tuple[Start, Mixture]] = ()
    """The sources of each period of the run, and the batch with which it begins. Empty: there is one source."""
    _windows: "list[_Arranged]" = field(default_factory=list, init=False)

    @property
    def mixture(self) -> Mixture | None:
        """The sources, if there are several."""
        return self.periods[-1].mixture

    @cached_property
    def periods(self) -> "list[_Period]":
        """The periods of the run, in order."""
        found: list[_Period] = []
        alone: list[tuple[Start, Mixture | None]] = [((1, 0), None)]
        for start, mixture in self.mixtures or alone:
            found.append(_Period(self, start, mixture, found[-1] if found else None))
        return found

    @cached_property
    def num_streams(self) -> int:
        """Streams that each batch has an equal part of: a power of two."""
        streams, size = 1, self.rules.size
        is_plain = not self.mixtures and self.rules.kinds is None and not self.rules.is_balanced
        if size and is_plain and len(self.samples) > self.samples.window_rows:
            most = min(_MAX_STREAMS, len(self.samples.shard_rows))
            while size % (2 * streams) == 0 and 2 * streams <= most:
                streams *= 2
        return streams

    @cached_property
    def _has_row_shards(self) -> bool:
        """Whether each row is a shard of its own. Then a pass has shuffled the rows already."""
        return len(self.samples.shard_rows) == len(self.samples)

    def num_batches(self, epoch: int) -> int:
        """Return the number of global batches of an epoch."""
        last = max((period for period in self.periods if period.start[0] <= epoch), key=lambda period: period.start)
        return int(last.starts(epoch)[-1])

    def batch(self, epoch: int, number: int) -> Indices:
        """Return a global batch, as indices of shape (samples,)."""
        return self.share(epoch, number, DataRank(0, 1))

    def batch_size(self, epoch: int, number: int) -> int:
        """Return the number of samples of a global batch."""
        return self.rules.size or len(self.batch(epoch, number))

    def min_samples(self, epoch: int) -> int:
        """Return the number of samples of the smallest batch of an epoch."""
        sizes = self.periods[-1].sizes(epoch)
        return min((size for window in sizes for group in window for size in group), default=0)

    def share(self, epoch: int, number: int, data_rank: DataRank) -> Indices:
        """Return a rank's part of a global batch. Only the streams that it is in are computed."""
        step = math.gcd(self.num_streams, data_rank.size)
        streams = range(data_rank.rank % step, self.num_streams, step)
        return self._read(epoch, number, streams)[data_rank.rank // step :: data_rank.size // step]

    def partners(self, epoch: int, number: int, data_rank: DataRank) -> Indices:
        """Return the sample that each one of ``share`` is mixed with."""
        return partners_of(self.batch(epoch, number), PARTNER_BLOCK)[data_rank.rank :: data_rank.size]

    def source_samples(self, epoch: int, numbers: Sequence[int]) -> dict[str, int]:
        """Return how many samples of each source are in these batches of an epoch. Empty: there is one source."""
        if self.mixture is None:
            return {}
        counts, wanted = np.zeros(len(self.mixture.names), np.int64), set(numbers)
        for place, period in enumerate(self.periods):
            stop = self.periods[place + 1].start if place + 1 < len(self.periods) else (epoch + 1, 0)
            own = {number for number in wanted if period.start <= (epoch, number) < stop}
            counted = period.count(epoch, own) if own else NO_ROWS
            counts[: len(counted)] += counted
        return dict(zip(self.mixture.names, counts.tolist(), strict=True))

    def _read(self, epoch: int, number: int, streams: range) -> Indices:
        """Return the samples of some streams in a global batch."""
        for window in self._windows:
            if window.epoch == epoch and number in window.numbers and window.streams == streams:
                return window.batches[number - window.numbers.start]
        period = next(period for period in reversed(self.periods) if period.start <= (epoch, number))
        place = int(np.searchsorted(period.starts(epoch), number, side="right")) - 1
        # The last one, too: training asks for the sizes of batches that were read ahead.
        self._windows = [*self._windows[-1:], self._enter(period, epoch, place, streams)]
        return self._read(epoch, number, streams)

    def _enter(self, period: "_Period", epoch: int, window: int, streams: range) -> "_Arranged":
        """Arrange a window for some streams, and have the next one's shards fetched."""
        starts = period.starts(epoch)
        # All of the window is on its way before the first lengths are read.
        drawn = [period.draw(epoch, window, stream) for stream in streams]
        for parts in drawn:
            self.samples.prefetch(np.concatenate(parts))
        made = [self._arranged(period, epoch, window, *given) for given in zip(streams, drawn, strict=True)]
        batches = made[0] if len(made) == 1 else np.stack(made, axis=2).reshape(len(made[0]), -1)
        if len(starts) > 2:  # otherwise the next one has the same shards
            following = (epoch + 1, 0) if window + 2 == len(starts) else (epoch, window + 1)
            for stream in streams:
                self.samples.prefetch(np.concatenate(period.draw(*following, stream)))
        # A later period may have begun within the window.
        ends = [number for later, number in (one.start for one in self.periods) if later == epoch]
        numbers = range(int(starts[window]), int(starts[window + 1]))
        stop = min((number for number in ends if number > numbers.start), default=numbers.stop)
        return _Arranged(epoch, range(numbers.start, min(stop, numbers.stop)), streams, batches)

    def _arranged(self, period: "_Period", epoch: int, window: int, stream: int, drawn: list[Indices]) -> Batches:
        """Return the batches of a window, or a stream's part of each, from the rows that it has drawn."""
        first, last = period.starts(epoch)[window : window + 2].tolist()
        chance = self._generator(_ROWS, epoch, first, stream)
        counts = [len(part) for part in drawn]
        # Places, not rows: rows may come twice, and their lengths are found fastest in the order of their shards.
        shuffled = [
            start + (np.arange(count) if self._has_row_shards else chance.permutation(count))
            for count, start in zip(counts, _starts(counts), strict=False)
        ]
        total = self.num_batches(epoch)
        return self.rules.arrange(
            Window(
                samples=self.samples,
                rows=np.concatenate(drawn),
                places=np.concatenate(shuffled)[evenly(counts)] if len(counts) > 1 else shuffled[0],
                streams=self.num_streams,
                sizes=period.sizes(epoch)[window] if self.rules.kinds else [],
                epochs_done=(epoch - 1 + first / total, epoch - 1 + last / total),
                chance=chance,
                # All streams shuffle their parts alike, so that the parts of a batch have similar lengths.
                shuffle=self._generator(_BATCHES, epoch, first),
            )
        )

    def _generator(self, *numbers: int) -> np.random.Generator:
        return np.random.default_rng((*entropy_of(self.seed), *numbers))


def entropy_of(seed: int) -> tuple[int]:
    """Return a seed as NumPy takes it, which is never negative."""
    return (seed % 2**64,)


class _Arranged(NamedTuple):
    """A window that was entered: the samples of some streams in its batches."""

    epoch: int
    numbers: range
    streams: range
    batches: Batches


class _Period:
    """A part of a run in which sources and shares stay the same. An order with one source has one period."""

    def __init__(self, order: SampleOrder, start: Start, mixture: Mixture | None, earlier: "_Period | None") -> None:
        self.start, self.mixture = start, mixture
        self._order, self._earlier = order, earlier
        # An epoch's windows are asked for with every batch.
        self.starts, self.sizes = lru_cache(2)(self._find_starts), lru_cache(2)(self._find_sizes)

    @cached_property
    def _passes(self) -> list[Passes]:
        """The rows of each source."""
        samples, seed = self._order.samples, entropy_of(self._order.seed)
        if self.mixture is None:
            shards, size = np.arange(len(samples.shard_rows)), self._order.rules.size
            is_counted = self._order.rules.kinds is not None or not size
            used = len(samples) if is_counted or not size else len(samples) // size * size
            return [Passes(samples, shards, (*seed, 0), used, self._order.num_streams)]
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
        return _starts([sum(map(len, window)) for window in self.sizes(epoch)])

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
        return self._divide(0, total if self._order.rules.kinds else total // (self._order.rules.size or 1))

    def _divide(self, first: int, last: int) -> tuple[Indices, Indices]:
        rules, window_rows = self._order.rules, self._order.samples.window_rows
        if self.mixture:
            window_rows = self.mixture.window_rows
        unit = 1 if rules.kinds or not rules.size else rules.size
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
        return [*begun, *[(NO_ROWS, 0)] * (len(self._passes) - len(begun))]

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
        counts = np.zeros(len(self.mixture.names), np.int64)
        for window, (first, last) in enumerate(pairwise(starts.tolist())):
            own = numbers & {*range(first, last)}
            if len(own) == last - first:
                counts += drawn[window + 1] - drawn[window]
                continue
            for number in own:
                batch = self._order.batch(epoch, number)
                counts += np.bincount(self.mixture.origins.train[batch], minlength=len(counts))
        return counts


def _starts(counts: Sequence[int]) -> Indices:
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
