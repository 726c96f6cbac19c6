"""Several sources in one order: an epoch has as many samples as all of them, each source its share by weight.

Each source is read in permutations of its own, one after the other, over all epochs. So its samples come equally often,
give or take one. The shares of an epoch are exact to a sample.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from app.config import DataConfig
from app.data.origins import Origins
from app.data.prepared import Dataset, PreparedData
from app.errors import RecipeError
from app.training.data.batches import (
    BATCHES_PER_SORT,
    DataRank,
    Indices,
    MemoryOrder,
    sorted_batches,
    validation_batches,
)


@dataclass(frozen=True)
class Mixture:
    """The sources of a run, and how much of an epoch each of them is."""

    names: list[str]
    shares: NDArray[np.float64]
    """Share of the training samples of each source. They add up to 1."""
    origins: Origins

    @classmethod
    def of(cls, config: DataConfig, data: PreparedData) -> "Mixture | None":
        """Return the mixture of ``data.sources``; None if there is one source."""
        origins = data.origins
        if not config.sources or origins is None:
            return None
        sizes = np.bincount(origins.train, minlength=len(config.sources)).astype(np.float64)
        given = [source.weight for source in config.sources if source.weight is not None]
        weights = np.array(given) if given else sizes ** (1.0 / config.temperature)
        return cls([source.title for source in config.sources], weights / weights.sum(), origins)

    def __str__(self) -> str:
        shares = zip(self.names, self.shares.tolist(), strict=True)
        return ", ".join(f"{name} {share:.1%}" for name, share in shares)

    def counts(self, total: int, what: str = "an epoch") -> NDArray[np.int64]:
        """Return how many of ``total`` samples, of ``what``, are of each source. Raise RecipeError if one has none."""
        exact = self.shares * total
        counts = np.floor(exact).astype(np.int64)
        # The largest remainders get the samples that are left.
        counts[np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]] += 1
        for name, count in zip(self.names, counts.tolist(), strict=True):
            if not count:
                raise RecipeError(f"data.sources {name} has no sample among {total:,} of {what}: raise its weight")
        return counts

    def validation_rows(self) -> dict[str, Indices]:
        """Return the validation samples of each source."""
        return {name: np.flatnonzero(self.origins.validation == place) for place, name in enumerate(self.names)}


def validation_batches_of(dataset: Dataset, rows: Indices, data_rank: DataRank, size: int) -> Iterator[Indices]:
    """Yield a rank's share of some rows, ascending, as ``validation_batches`` does, a part of them at a time."""
    count = data_rank.size * size * BATCHES_PER_SORT
    for start in range(0, len(rows), count):
        part = rows[start : start + count]
        yield from (part[batch] for batch in validation_batches(_lengths_of(dataset, part), data_rank, size))


def _lengths_of(dataset: Dataset, rows: Indices) -> NDArray[np.int64]:
    """Return the lengths of some rows, ascending, of shape (rows,). Of shards, only those of these rows are opened."""
    shards = dataset.shards
    if shards is None:
        return np.asarray(dataset.lengths, np.int64)[rows]
    if shards.has_one_length:
        return np.zeros(len(rows), np.int64)
    places, starts = np.unique(np.searchsorted(shards.first_rows, rows, side="right") - 1, return_index=True)
    parts = zip(places.tolist(), np.split(rows, starts[1:]), strict=True)
    found = [shards.lengths_of(place)[part - shards.first_rows[place]] for place, part in parts]
    return np.concatenate(found).astype(np.int64)


@dataclass
class MixedOrder(MemoryOrder):
    """The order of samples in memory from several sources."""

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
        # NumPy takes no negative seeds.
        generator = np.random.default_rng((self.seed % 2**64, epoch))
        return sorted_batches(order, self.lengths, self.size, generator)

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
        rounds = [
            np.random.default_rng((self.seed % 2**64, key, n)).permutation(members) for n in range(first, last + 1)
        ]
        skipped = start - first * len(members)
        return np.concatenate(rounds)[skipped : skipped + count]
