"""Several sources in one order: an epoch has as many samples as all of them, each source its share by weight.

The samples of a source come equally often, give or take one.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from app.data.prepared import ShardedSamples
from app.errors import TrainingError
from app.training.data.batches import Indices, MemoryOrder, SampleOrder, sorted_batches
from app.training.data.mixture import Mixture
from app.training.data.shard_order import ShardOrder


@dataclass
class MixedOrder(MemoryOrder):
    """The order of samples in memory from several sources.

    Each source is read in permutations of its own, one after the other, over all epochs. The shares of an epoch are
    exact to a sample.
    """

    name: ClassVar[str] = "mixed-1"

    mixture: Mixture = field(kw_only=True)
    _counts: list[int] = field(default_factory=list, init=False)
    """Samples of each source in an epoch."""

    def __post_init__(self) -> None:
        self._counts = self.mixture.counts(len(self.lengths) // self.size * self.size).tolist()

    def make_batches(self, epoch: int) -> Indices:
        """Return the batches of an epoch, of shape (batches, size)."""
        drawn = [self._draw(place, (epoch - 1) * count, count) for place, count in enumerate(self._counts)]
        # Each source is spread evenly over the epoch.
        times = np.concatenate([(np.arange(count) + 0.5) / count for count in self._counts])
        order = np.concatenate(drawn)[np.argsort(times, kind="stable")]
        return sorted_batches(order, self.lengths, self.size, self._generator(epoch))

    def source_samples(self, epoch: int, numbers: Sequence[int]) -> dict[str, int]:
        """Return how many samples of each source are in these batches of an epoch."""
        seen = np.zeros(len(self._counts), np.int64)
        for number in numbers:
            seen += np.bincount(self.mixture.origins.train[self.batch(epoch, number)], minlength=len(seen))
        return dict(zip(self.mixture.names, seen.tolist(), strict=True))

    def _draw(self, place: int, start: int, count: int) -> Indices:
        """Return samples of a source, from the ``start``-th that the run reads of it."""
        members = np.flatnonzero(self.mixture.origins.train == place)
        key = zlib.crc32(self.mixture.names[place].encode())
        first, last = start // len(members), (start + count - 1) // len(members)
        rounds = [self._generator(key, number).permutation(members) for number in range(first, last + 1)]
        skipped = start - first * len(members)
        return np.concatenate(rounds)[skipped : skipped + count]


@dataclass
class SourceShards:
    """The shards of one source, as samples numbered from 0."""

    samples: ShardedSamples
    shards: Sequence[int]
    """Their indices among all shards."""
    shard_rows: list[int] = field(init=False)
    """Number of rows of each shard."""
    first_rows: NDArray[np.int64] = field(init=False)
    """Index of the first row of each shard, and the number of all rows."""

    def __post_init__(self) -> None:
        self.shard_rows = [self.samples.shard_rows[shard] for shard in self.shards]
        self.first_rows = np.concatenate([[0], np.cumsum(self.shard_rows)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.first_rows[-1])

    @property
    def window_rows(self) -> int:
        """This source's part of the window, by its share of all rows."""
        return max(1, self.samples.window_rows * len(self) // max(1, len(self.samples)))

    @property
    def has_one_length(self) -> bool:
        """Whether all rows, of other sources too, have the same length."""
        return self.samples.has_one_length

    def lengths_of(self, shard: int) -> NDArray[np.int32]:
        """Return the length of each row of a shard."""
        return self.samples.lengths_of(self.shards[shard])

    def prefetch(self, shards: Sequence[int]) -> None:
        """Have these shards downloaded in the background."""
        self.samples.prefetch([self.shards[shard] for shard in shards])

    def rows(self, indices: Indices) -> Indices:
        """Return the numbers that these rows have among the rows of all sources."""
        places = np.searchsorted(self.first_rows, indices, side="right") - 1
        firsts = np.array([self.samples.first_rows[shard] for shard in self.shards], np.int64)
        moved: Indices = firsts[places] + indices - self.first_rows[places]
        return moved


@dataclass
class MixedShardOrder(SampleOrder):
    """The order of samples in shards from several sources: each batch has the same number of samples of each.

    Each source has canonical streams of its own, over its own epochs. A batch consists of the next batch of each
    source, and a rank takes every n-th sample. Ranks therefore read the shards of all streams.
    """

    name: ClassVar[str] = "mixed-streams-1"

    samples: ShardedSamples
    size: int
    seed: int
    mixture: Mixture = field(kw_only=True)
    _sources: list[tuple[SourceShards, ShardOrder]] = field(default_factory=list, init=False)
    _batch: tuple[tuple[int, int], Indices] | None = field(default=None, init=False)
    """Epoch and number of the last batch that was asked for, and its samples."""

    def __post_init__(self) -> None:
        source_of = self.mixture.origins.train[self.samples.first_rows[:-1]]
        counts = self.mixture.counts(self.size, "a batch").tolist()
        for place, (name, count) in enumerate(zip(self.mixture.names, counts, strict=True)):
            shards = SourceShards(self.samples, np.flatnonzero(source_of == place).tolist())
            if len(shards) < count:
                raise TrainingError(
                    f"data.sources {name} has {len(shards):,} training rows, and a batch takes {count:,}: lower its "
                    "weight or train.global_batch_size"
                )
            self._sources.append((shards, ShardOrder(shards, count, self.seed + place)))

    def num_batches(self, epoch: int) -> int:  # noqa: ARG002
        """Return the number of batches that have as many samples as all sources together."""
        return len(self.samples) // self.size

    def batch(self, epoch: int, number: int) -> Indices:
        """Return a global batch, as indices of shape (size,)."""
        if self._batch is None or self._batch[0] != (epoch, number):
            passed = (epoch - 1) * self.num_batches(epoch) + number
            parts = [shards.rows(_batch_of(order, passed)) for shards, order in self._sources]
            self._batch = (epoch, number), np.concatenate(parts)
        return self._batch[1]

    def source_samples(self, epoch: int, numbers: Sequence[int]) -> dict[str, int]:  # noqa: ARG002
        """Return how many samples of each source are in these batches: the same number in each."""
        counts = [order.size * len(numbers) for _, order in self._sources]
        return dict(zip(self.mixture.names, counts, strict=True))


def _batch_of(order: ShardOrder, passed: int) -> Indices:
    """Return the batch of a source after so many of the run. Its epochs end at other batches than the run's."""
    epoch, number = divmod(passed, order.num_batches(1))
    return order.batch(epoch + 1, number)
