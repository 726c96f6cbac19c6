"""Several sources in one order: an epoch has as many samples as all of them together, shared out by weight.

The samples of a source come equally often, give or take one. If sources or weights change in a run, an order keeps the
earlier one for the batches before. Every source continues where it stopped, and the current epoch keeps its length.
"""

import zlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np

from app.training.data.batches import Indices, Lengths, SampleOrder, sorted_batches
from app.training.data.mixture import Mixture

_NONE: Indices = np.empty(0, np.int64)


class MixtureOrder(SampleOrder):
    """Base class of the orders in memory and in shards."""

    mixture: Mixture
    start: tuple[int, int]
    """Epoch and number of the first batch that this order makes itself."""
    earlier: "MixtureOrder | None"
    """The order of the batches before; None if there are none."""

    @abstractmethod
    def own_batch(self, epoch: int, number: int) -> Indices:
        """Return a global batch from ``start`` on."""

    @abstractmethod
    def _count(self, epoch: int, numbers: Sequence[int]) -> list[int]:
        """Return the number of samples of each source in these batches, which are not before ``start``."""

    def num_batches(self, epoch: int) -> int:
        """Return the number of batches that have as many samples as all sources together."""
        if self.earlier and epoch <= self.start[0]:
            return self.earlier.num_batches(epoch)
        return self.mixture.num_samples // self.size

    def batch(self, epoch: int, number: int) -> Indices:
        """Return a global batch, as indices of shape (size,)."""
        if self.earlier and (epoch, number) < self.start:
            return self.earlier.batch(epoch, number)
        return self.own_batch(epoch, number)

    def source_samples(self, epoch: int, numbers: Sequence[int]) -> dict[str, int]:
        """Return how many samples of each source are in these batches of an epoch."""
        before = [number for number in numbers if (epoch, number) < self.start]
        seen = dict.fromkeys(self.mixture.names, 0)
        if self.earlier and before:
            seen |= self.earlier.source_samples(epoch, before)
        own = self._count(epoch, [number for number in numbers if (epoch, number) >= self.start])
        return {name: seen[name] + count for name, count in zip(self.mixture.names, own, strict=True)}

    def _first_number(self, epoch: int) -> int:
        """Return the number of the first batch of an epoch that this order makes itself."""
        return self.start[1] if epoch == self.start[0] else 0


@dataclass
class MixedOrder(MixtureOrder):
    """The order of samples in memory from several sources.

    Each source is read in its own permutations, one after the other, over all epochs. The shares of an epoch are
    exact to one sample.
    """

    name: ClassVar[str] = "mixed-1"

    lengths: Lengths
    size: int
    seed: int
    mixture: Mixture = field(kw_only=True)
    start: tuple[int, int] = field(default=(1, 0), kw_only=True)
    earlier: "MixedOrder | None" = field(default=None, kw_only=True)
    _counts: list[int] = field(default_factory=list, init=False)
    """Samples of each source in a whole epoch."""
    _epoch: tuple[int, Indices] | None = field(default=None, init=False)
    """The last epoch requested, and the batches that this order makes in it."""

    def __post_init__(self) -> None:
        self._counts = self.mixture.counts(self.mixture.num_samples // self.size * self.size).tolist()

    def own_batch(self, epoch: int, number: int) -> Indices:
        """Return a global batch from ``start`` on."""
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._make_batches(epoch)
        batch: Indices = self._epoch[1][number - self._first_number(epoch)]
        return batch

    def _make_batches(self, epoch: int) -> Indices:
        """Return the batches that this order makes in an epoch, of shape (batches, size)."""
        drawn = self._drawn(epoch)
        # Each source is spread evenly over the epoch.
        times = np.concatenate([(np.arange(len(rows)) + 0.5) / max(1, len(rows)) for rows in drawn])
        order = np.concatenate(drawn)[np.argsort(times, kind="stable")]
        return sorted_batches(order, self.lengths, self.size, self._generator(epoch))

    def _count(self, epoch: int, numbers: Sequence[int]) -> list[int]:
        seen = np.zeros(len(self._counts), np.int64)
        for number in numbers:
            seen += np.bincount(self.mixture.origins.train[self.batch(epoch, number)], minlength=len(seen))
        counted: list[int] = seen.tolist()
        return counted

    @cached_property
    def _first_counts(self) -> list[int]:
        """Samples of each source in the batches that this order makes in its first epoch."""
        epoch, number = self.start
        counts: list[int] = self.mixture.split((self.num_batches(epoch) - number) * self.size).tolist()
        return counts

    @cached_property
    def _begun(self) -> list[tuple[Indices, int]]:
        """Where each source continues: its samples left from earlier, and how many it has read including these."""
        begun = self.earlier.rests(*self.start) if self.earlier else []
        return [*begun, *[(_NONE, 0)] * (len(self._counts) - len(begun))]

    def _drawn(self, epoch: int) -> list[Indices]:
        """Return the samples of each source in the batches that this order makes in an epoch, in reading order."""
        return [self._read(place, *self._span(epoch, place)) for place in range(len(self._counts))]

    def _span(self, epoch: int, place: int) -> tuple[int, int]:
        """Return how many samples a source has read since ``start``, before the epoch and after it."""
        first, count, passed = self._first_counts[place], self._counts[place], epoch - self.start[0]
        return (0, first) if passed == 0 else (first + (passed - 1) * count, first + passed * count)

    def _read(self, place: int, start: int, stop: int) -> Indices:
        """Return samples of a source: first those left from earlier, then its next permutations."""
        rest, passed = self._begun[place]
        further = max(start, len(rest)), max(stop, len(rest))
        first, last = (passed + number - len(rest) for number in further)
        return np.concatenate([rest[start:stop], self._permuted(place, first, last)])

    def _permuted(self, place: int, start: int, stop: int) -> Indices:
        """Return samples from the concatenated permutations of a source."""
        members = np.flatnonzero(self.mixture.origins.train == place)
        key = zlib.crc32(self.mixture.names[place].encode())
        first = start // len(members)
        rounds = [
            self._generator(key, number).permutation(members) for number in range(first, -(-stop // len(members)))
        ]
        skipped = first * len(members)
        return np.concatenate([_NONE, *rounds])[start - skipped : stop - skipped]

    def rests(self, epoch: int, number: int) -> list[tuple[Indices, int]]:
        """Return the unused samples of each source before a batch, and how many it has read including these."""
        numbers = range(self._first_number(epoch), number)
        used = np.concatenate([_NONE, *[self.own_batch(epoch, one) for one in numbers]])
        found = []
        for place, drawn in enumerate(self._drawn(epoch)):
            rest, passed = self._begun[place]
            stop = self._span(epoch, place)[1]
            left = np.concatenate([_without(drawn, used), rest[stop:]])
            found.append((left, passed + max(0, stop - len(rest))))
        return found


def _without(samples: Indices, used: Indices) -> Indices:
    """Return the samples without the used ones, as multisets."""
    order = np.argsort(samples, kind="stable")
    ordered = samples[order]
    occurrence = np.empty_like(order)
    occurrence[order] = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
    times = np.bincount(used, minlength=int(samples.max(initial=0)) + 1)[samples]
    left: Indices = samples[occurrence >= times]
    return left
