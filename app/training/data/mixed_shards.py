"""Several sources in shards: each global batch has the same number of samples of each source."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from app.data.prepared import ShardedSamples
from app.errors import TrainingError
from app.training.data.batches import Indices
from app.training.data.mixed_orders import MixtureOrder
from app.training.data.mixture import Mixture
from app.training.data.shard_order import ShardOrder


@dataclass
class SourceShards:
    """The shards of one source, as samples numbered from 0."""

    samples: ShardedSamples
    shards: Sequence[int]
    """Their indices among all shards."""
    window_rows: int
    """This source's part of the window."""
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
        """Return the indices of these rows among the rows of all sources."""
        places = np.searchsorted(self.first_rows, indices, side="right") - 1
        firsts = np.array([self.samples.first_rows[shard] for shard in self.shards], np.int64)
        moved: Indices = firsts[places] + indices - self.first_rows[places]
        return moved


@dataclass
class _SourceReader:
    """The batches of one source in a period: the rest of an earlier period's pass, then whole passes."""

    shards: SourceShards
    order: ShardOrder
    earlier: "_SourceReader | None"
    passed: int
    """Number of batches of ``earlier`` that have been read."""

    @cached_property
    def _rest(self) -> int:
        """Number of whole batches in the rest. Its last rows are skipped if they fill no batch."""
        return self.earlier.left(self.passed) * self.earlier.order.size // self.order.size if self.earlier else 0

    @cached_property
    def _first_pass(self) -> int:
        """Number of the first whole pass."""
        return self.earlier.next_pass(self.passed) if self.earlier else 1

    def batch(self, number: int) -> Indices:
        """Return a batch of the period, as rows of the source."""
        if self.earlier and number < self._rest:
            size, step = self.order.size, self.earlier.order.size
            start, stop = number * size, (number + 1) * size
            numbers = range(self.passed + start // step, self.passed - (-stop // step))
            rows = np.concatenate([self.earlier.batch(one) for one in numbers])
            return rows[start % step : start % step + size]
        passes, place = divmod(number - self._rest, self.order.num_batches(1))
        return self.order.batch(self._first_pass + passes, place)

    def left(self, number: int) -> int:
        """Return how many batches the current pass has left after ``number`` batches of the period."""
        return self._rest - number if number < self._rest else (self._rest - number) % self.order.num_batches(1)

    def next_pass(self, number: int) -> int:
        """Return the number of the whole pass after the current one, after ``number`` batches of the period."""
        return self._first_pass - (-max(0, number - self._rest) // self.order.num_batches(1))


@dataclass
class MixedShardOrder(MixtureOrder):
    """The order of samples in shards from several sources: each batch has the same number of samples of each.

    Each source has its own canonical streams and its own passes. A batch consists of the next batch of each
    source, and a rank takes every n-th sample. Ranks therefore read the shards of all streams.
    """

    name: ClassVar[str] = "mixed-streams-2"

    samples: ShardedSamples
    size: int
    seed: int
    mixture: Mixture = field(kw_only=True)
    start: tuple[int, int] = field(default=(1, 0), kw_only=True)
    earlier: "MixedShardOrder | None" = field(default=None, kw_only=True)
    _readers: list[_SourceReader] = field(default_factory=list, init=False)
    _batch: tuple[tuple[int, int], Indices] | None = field(default=None, init=False)
    """Epoch and number of the last batch requested, and its samples."""

    def __post_init__(self) -> None:
        source_of = self.mixture.origins.train[self.samples.first_rows[:-1]]
        counts, total = self.mixture.counts(self.size, "a batch").tolist(), self.mixture.num_samples
        before = self.earlier.readers if self.earlier else []
        passed = self.earlier.passed(*self.start) if self.earlier else 0
        for place, (name, count) in enumerate(zip(self.mixture.names, counts, strict=True)):
            found = np.flatnonzero(source_of == place).tolist()
            rows = sum(self.samples.shard_rows[shard] for shard in found)
            if rows < count:
                raise TrainingError(
                    f"data.sources {name} has {rows:,} training rows, and a batch takes {count:,}: lower its weight or "
                    "train.global_batch_size"
                )
            shards = SourceShards(self.samples, found, max(1, self.mixture.window_rows * rows // max(1, total)))
            order = ShardOrder(shards, count, self.seed + zlib.crc32(name.encode()))
            earlier = before[place] if place < len(before) else None
            self._readers.append(_SourceReader(shards, order, earlier, passed))

    @property
    def readers(self) -> list[_SourceReader]:
        """The reader of each source."""
        return self._readers

    def passed(self, epoch: int, number: int) -> int:
        """Return how many batches of this order come before a batch."""
        first, begun = self.start
        if epoch == first:
            return number - begun
        return self.num_batches(first) - begun + (epoch - first - 1) * self.num_batches(epoch) + number

    def own_batch(self, epoch: int, number: int) -> Indices:
        """Return a global batch from ``start`` on."""
        if self._batch is None or self._batch[0] != (epoch, number):
            place = self.passed(epoch, number)
            parts = [reader.shards.rows(reader.batch(place)) for reader in self._readers]
            self._batch = (epoch, number), np.concatenate(parts)
        return self._batch[1]

    def _count(self, epoch: int, numbers: Sequence[int]) -> list[int]:  # noqa: ARG002
        return [reader.order.size * len(numbers) for reader in self._readers]
