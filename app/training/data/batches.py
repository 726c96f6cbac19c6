"""The samples of each batch. Global batches are the same for any number of workers."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from app.data.prepared import Dataset, ShardedSamples
from app.training.data.mixture import Mixture

Indices = NDArray[np.int64]
Lengths = NDArray[np.int64] | Sequence[int]
EPOCH_ORDER = "numpy-1"
"""Name of the sample order of ``train_batches``. A change of the order needs a new name."""
PARTNER_BLOCK = 64
"""Block of ``partners_of`` for samples in memory: a rank has every n-th sample of a batch."""
BATCHES_PER_SORT = 32
"""Number of batches whose samples are sorted by length together. More pad less, fewer mix better."""


@dataclass(frozen=True)
class DataRank:
    """A worker's rank among the ``size`` data-parallel ranks."""

    rank: int
    size: int


class SampleOrder(ABC):
    """The global batches of every epoch. They depend on the data, the recipe and the seed, not on the workers."""

    name: ClassVar[str]
    """Name of the order, which checkpoints record. A change of the order needs a new name."""
    size: int
    """Samples of a global batch, unless ``batch_size`` says otherwise."""
    seed: int
    mixture: Mixture | None = None
    """The sources, if there are several."""

    @abstractmethod
    def num_batches(self, epoch: int) -> int:
        """Return the number of global batches of an epoch. Epochs begin at 1."""

    @abstractmethod
    def batch(self, epoch: int, number: int) -> Indices:
        """Return global batch ``number`` of an epoch, as indices into the split, of shape (samples,)."""

    def batch_size(self, epoch: int, number: int) -> int:  # noqa: ARG002
        """Return the number of samples of a global batch."""
        return self.size

    def share(self, epoch: int, number: int, data_rank: DataRank) -> Indices:
        """Return a rank's part of a global batch. The parts of all ranks are the batch."""
        return self.batch(epoch, number)[data_rank.rank :: data_rank.size]

    def partners(self, epoch: int, number: int, data_rank: DataRank) -> Indices:
        """Return the sample that each one of ``share`` is mixed with."""
        return partners_of(self.batch(epoch, number), PARTNER_BLOCK)[data_rank.rank :: data_rank.size]

    def source_samples(self, epoch: int, numbers: Sequence[int]) -> dict[str, int]:  # noqa: ARG002
        """Return how many samples of each source are in these batches of an epoch. Empty: there is one source."""
        return {}

    def _generator(self, *numbers: int) -> np.random.Generator:
        """Return a generator that is seeded for an epoch and further ``numbers``."""
        return generator_of(self.seed, *numbers)


def generator_of(seed: int, *numbers: int) -> np.random.Generator:
    """Return a generator from a seed, an epoch and further ``numbers``."""
    # NumPy takes no negative seeds.
    return np.random.default_rng((seed % 2**64, *numbers))


@dataclass
class MemoryOrder(SampleOrder):
    """The order of samples in memory: ``train_batches`` of each epoch, of which one is kept."""

    name: ClassVar[str] = EPOCH_ORDER

    lengths: Lengths
    size: int
    """Samples of a global batch."""
    seed: int
    classes: Sequence[int] | None = None
    """The class of each sample, if all classes should come equally often."""
    _epoch: tuple[int, Indices] | None = field(default=None, init=False)
    """The last epoch that was asked for, and its batches."""

    def make_batches(self, epoch: int) -> Indices:
        """Return the batches of an epoch, of shape (batches, size)."""
        return train_batches(self.lengths, self.size, self.seed, epoch, self.classes)

    def num_batches(self, epoch: int) -> int:  # noqa: ARG002
        """Return the number of full batches. Samples that do not fill a last one are left out of this epoch."""
        return len(self.lengths) // self.size

    def batch(self, epoch: int, number: int) -> Indices:
        """Return a global batch, as indices of shape (size,)."""
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self.make_batches(epoch)
        batch: Indices = self._epoch[1][number]
        return batch


def train_batches(
    lengths: Lengths, batch_size: int, seed: int, epoch: int, classes: Sequence[int] | None = None
) -> Indices:
    """Return the global batches of an epoch, as indices into the split, of shape (batches, batch_size).

    Samples are shuffled, then sorted by length within groups of batches, so that a batch pads little.
    An incomplete last batch is left out of this epoch, whatever the lengths of its samples. With ``classes``, the class
    of each sample, all classes come equally often: samples of rare ones are repeated, some of frequent ones left out.
    """
    generator = generator_of(seed, epoch)
    shuffled = generator.permutation(len(lengths)) if classes is None else _balanced(np.asarray(classes), generator)
    return sorted_batches(shuffled[: len(lengths) // batch_size * batch_size], lengths, batch_size, generator)


def sorted_batches(order: Indices, lengths: Lengths, batch_size: int, generator: np.random.Generator) -> Indices:
    """Return samples in batches, of shape (batches, batch_size), sorted by length within groups of batches."""
    group = np.arange(len(order)) // (BATCHES_PER_SORT * batch_size)
    by_length = np.lexsort((np.asarray(lengths)[order], group))
    # Batches are shuffled again, because sorting has put the short ones of each group first.
    batches: Indices = generator.permutation(order[by_length].reshape(-1, batch_size))
    return batches


def _balanced(classes: Indices, generator: np.random.Generator) -> Indices:
    """Return as many samples as there are, shuffled, with the same number of each class, give or take one.

    The samples of a class are repeated as whole permutations, so that each comes about equally often.
    """
    found = generator.permutation(np.unique(classes))
    shares = [len(part) for part in np.array_split(classes, len(found))]
    chosen = []
    for label, share in zip(found, shares, strict=True):
        members = np.flatnonzero(classes == label)
        rounds = [generator.permutation(members) for _ in range(-(-share // len(members)))]
        chosen.append(np.concatenate(rounds)[:share])
    return generator.permutation(np.concatenate(chosen))


def partners_of(batch: Indices, block: int) -> Indices:
    """Return the sample that each one of a global batch is mixed with, in the order of the batch.

    Pairs lie half a block of about ``block`` samples apart. They do not depend on the number of workers. With the block
    chosen to suit how ranks share a batch, a micro-batch nearly always holds the partners of its samples, too, so that
    they are read once.
    """
    blocks = np.array_split(batch, max(1, len(batch) // block))
    return np.concatenate([np.roll(samples, -(len(samples) // 2)) for samples in blocks])


def validation_share(
    split: Dataset, data_rank: DataRank, size: int, rows: Indices | None = None
) -> Iterator[tuple[Indices, int]]:
    """Yield this rank's batches of a split, or of some ascending rows of it. Each sample is on one rank.

    A batch has up to ``size`` samples of similar length and of one group. Every rank gets the same number of batches,
    because ranks under ZeRO 3 and in a pipeline compute together. A rank that has run out of samples gets empty
    batches. The sample that comes with each batch then stands in for it.
    """
    for part, lengths in _parts_of(split, rows, data_rank.size * size * BATCHES_PER_SORT):
        share = part[np.argsort(lengths, kind="stable")[data_rank.rank :: data_rank.size]]
        largest_share = -(-len(part) // data_rank.size)
        yield from ((share[start : start + size], int(part[0])) for start in range(0, largest_share, size))


def _parts_of(split: Dataset, rows: Indices | None, count: int) -> Iterator[tuple[Indices, Lengths]]:
    """Yield the rows that are sorted together, with their lengths: a group, or ``count`` rows in shards."""
    shards, groups = split.shards, split.groups
    if shards is None:
        lengths = np.asarray(split.lengths)
        rows = np.arange(len(split)) if rows is None else rows
        parts = [rows] if groups is None else [rows[groups[rows] == group] for group in np.unique(groups)]
        yield from ((part, lengths[part]) for part in parts)
        return
    total = len(split) if rows is None else len(rows)
    for start in range(0, total, count):
        # The next part is downloaded while this one is read.
        both = slice(start, min(start + 2 * count, total))
        found = np.arange(both.start, both.stop) if rows is None else rows[both]
        shards.prefetch(np.unique(_places(shards, found)).tolist())
        yield found[:count], _lengths_in(shards, found[:count])


def _lengths_in(shards: ShardedSamples, rows: Indices) -> Lengths:
    """Return the lengths of rows, ascending. Only their shards are opened."""
    if shards.has_one_length:
        return np.zeros(len(rows), np.int64)
    places, starts = np.unique(_places(shards, rows), return_index=True)
    parts = zip(places.tolist(), np.split(rows, starts[1:]), strict=True)
    return np.concatenate([shards.lengths_of(place)[part - shards.first_rows[place]] for place, part in parts])


def _places(shards: ShardedSamples, rows: Indices) -> Indices:
    """Return the index of the shard of each row."""
    return np.searchsorted(shards.first_rows, rows, side="right") - 1
