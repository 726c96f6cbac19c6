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
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np

from app.data.prepared import Indices
from app.training.data.mixture import Mixture
from app.training.data.passes import entropy_of
from app.training.data.periods import Period, Start, starts_of
from app.training.data.ranks import DataRank, partners_of
from app.training.data.rules import Batches, Rules, Window, evenly
from app.training.data.samples import Samples

PARTNER_BLOCK = 64
"""Block of ``partners_of``: a rank has every n-th sample of a batch."""
_MAX_STREAMS = 16
_ROWS, _BATCHES = 1, 2
"""What a window shuffles. Each has random numbers of its own."""


class _Arranged(NamedTuple):
    """A window that was entered: the samples of some streams in its batches."""

    epoch: int
    numbers: range
    streams: range
    batches: Batches


@dataclass
class SampleOrder:
    """The global batches of every epoch, as indices into the split. Epochs begin at 1, numbers at 0."""

    name: ClassVar[str] = "windows-2"
    """Checkpoints record it, because they count batches. A change of the order needs a new name."""

    samples: Samples
    rules: Rules
    seed: int
    mixtures: Sequence[tuple[Start, Mixture]] = ()
    """The sources of each period of the run, and the batch with which it begins. Empty: there is one source."""
    _windows: list[_Arranged] = field(default_factory=list, init=False)

    @property
    def mixture(self) -> Mixture | None:
        """The sources, if there are several."""
        return self.periods[-1].mixture

    @cached_property
    def periods(self) -> list[Period]:
        """The periods of the run, in order."""
        found: list[Period] = []
        alone: list[tuple[Start, Mixture | None]] = [((1, 0), None)]
        for start, mixture in self.mixtures or alone:
            found.append(Period(self, start, mixture, found[-1] if found else None))
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
        last = next(period for period in reversed(self.periods) if period.start[0] <= epoch)
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
        counts = np.zeros(len(self.mixture.names), np.int64)
        for period in self.periods:
            own = {number for number in numbers if self._period_of(epoch, number) is period}
            counts[: period.num_sources] += period.count(epoch, own)
        return dict(zip(self.mixture.names, counts.tolist(), strict=True))

    def _period_of(self, epoch: int, number: int) -> Period:
        return next(period for period in reversed(self.periods) if period.start <= (epoch, number))

    def _read(self, epoch: int, number: int, streams: range) -> Indices:
        """Return the samples of some streams in a global batch."""
        for window in self._windows:
            if window.epoch == epoch and number in window.numbers and window.streams == streams:
                return window.batches[number - window.numbers.start]
        period = self._period_of(epoch, number)
        place = int(np.searchsorted(period.starts(epoch), number, side="right")) - 1
        # With streams, two ranges of them are read by turns. Of counted batches, training asks for earlier sizes.
        kept = 0 if self.num_streams == 1 and self.rules.size else 1
        self._windows = [*self._windows[-1:][:kept], self._enter(period, epoch, place, streams)]
        return self._read(epoch, number, streams)

    def _enter(self, period: Period, epoch: int, window: int, streams: range) -> "_Arranged":
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
        first, last = starts[window : window + 2].tolist()
        # Another period may begin within the window.
        ends = [number for later, number in (one.start for one in self.periods) if later == epoch and number > first]
        return _Arranged(epoch, range(first, min([last, *ends])), streams, batches)

    def _arranged(self, period: Period, epoch: int, window: int, stream: int, drawn: list[Indices]) -> Batches:
        """Return the batches of a window, or a stream's part of each, from the rows that it has drawn."""
        first, last = period.starts(epoch)[window : window + 2].tolist()
        chance = self._generator(_ROWS, epoch, first, stream)
        counts = [len(part) for part in drawn]
        # Places, not rows: rows may come twice, and their lengths are found fastest in the order of their shards.
        shuffled = [
            start + (np.arange(count) if self._has_row_shards else chance.permutation(count))
            for count, start in zip(counts, starts_of(counts), strict=False)
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
