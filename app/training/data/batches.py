"""The samples of each batch. Global batches are the same for any number of workers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from app.config import StreamConfig, TrainConfig
from app.data.prepared import PreparedData
from app.errors import TrainingError

if TYPE_CHECKING:  # it builds on this module
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


class SampleOrder(Protocol):
    """The global batches of every epoch. They depend on the data, the recipe and the seed, not on the workers."""

    @property
    def name(self) -> str:
        """Name of the order, which checkpoints record. A change of the order needs a new name."""
        ...

    def num_batches(self, epoch: int) -> int:
        """Return the number of global batches of an epoch. Epochs begin at 1."""
        ...

    def batch_size(self, epoch: int, number: int) -> int:
        """Return the number of samples of a global batch."""
        ...

    def batch(self, epoch: int, number: int) -> Indices:
        """Return global batch ``number`` of an epoch, as indices into the split, of shape (samples,)."""
        ...

    def share(self, epoch: int, number: int, data_rank: DataRank) -> Indices:
        """Return a rank's part of a global batch. The parts of all ranks are the batch."""
        ...

    def partners(self, epoch: int, number: int, data_rank: DataRank) -> Indices:
        """Return the sample that each one of ``share`` is mixed with."""
        ...


@runtime_checkable
class MixingOrder(SampleOrder, Protocol):
    """An order of several sources."""

    mixture: "Mixture"

    def source_samples(self, epoch: int, numbers: Sequence[int]) -> dict[str, int]:
        """Return how many samples of each source are in these batches of an epoch."""
        ...


def order_of(
    config: TrainConfig,
    data: PreparedData,
    classes: Sequence[int] | None = None,
    difficulty: NDArray[np.float32] | None = None,
    mixture: "Mixture | None" = None,
) -> SampleOrder:
    """Return the order of a recipe's training samples.

    Args:
        config: the section ``train``.
        data: the prepared data.
        classes: the class of each sample, if all classes should come equally often.
        difficulty: how hard each sample is, for a curriculum. Without it, batches have other samples, but as many.
        mixture: the sources and their shares, for several sources. The same holds without it.

    Raises:
        RecipeError: batches are sized in tokens, and the samples have no length in tokens.
        TrainingError: there are fewer samples than one batch takes.
    """
    if config.tokens_per_batch is not None:
        from app.training.data.tokens import token_order_of  # it builds on this module

        return token_order_of(config, data)
    assert config.global_batch_size is not None
    if (num_samples := len(data.train)) < config.global_batch_size:
        raise TrainingError(
            f"train.global_batch_size is {config.global_batch_size}, the training split has {num_samples} samples: "
            "lower the batch size or give more data"
        )
    shards = data.train.shards
    if shards and mixture:
        from app.training.data.mixed_shards import MixedShardOrder  # it builds on this module

        return MixedShardOrder(shards, config.global_batch_size, config.seed, mixture)
    if shards:
        from app.training.data.shard_order import ShardOrder  # it builds on this module

        return ShardOrder(shards, config.global_batch_size, config.seed)
    if (groups := data.train.groups) is not None:
        from app.training.data.groups import grouped_order  # so does this

        return grouped_order(data.train.lengths, groups, config.global_batch_size, config.seed)
    if config.curriculum and difficulty is not None:
        from app.training.data.curriculum import CurriculumOrder  # it builds on this module

        lengths, size, seed = data.train.lengths, config.global_batch_size, config.seed
        return CurriculumOrder(lengths, size, seed, difficulty=difficulty, config=config.curriculum)
    if mixture:
        from app.training.data.mixture import MixedOrder  # it builds on this module

        return MixedOrder(data.train.lengths, config.global_batch_size, config.seed, mixture=mixture)
    return MemoryOrder(data.train.lengths, config.global_batch_size, config.seed, classes)


def count_steps(config: TrainConfig, order: SampleOrder, stream: StreamConfig | None = None) -> int:
    """Return the number of optimizer steps of the whole run. For a stream, return the maximum."""
    if stream:
        total = config.epochs * (stream.samples // config.batch_size)
    else:
        total = sum(order.num_batches(epoch) for epoch in range(1, config.epochs + 1))
    return min(total, config.max_steps or total)


@dataclass
class MemoryOrder:
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

    def batch_size(self, epoch: int, number: int) -> int:  # noqa: ARG002
        """Return the number of samples of each batch."""
        return self.size

    def batch(self, epoch: int, number: int) -> Indices:
        """Return a global batch, as indices of shape (size,)."""
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self.make_batches(epoch)
        batch: Indices = self._epoch[1][number]
        return batch

    def share(self, epoch: int, number: int, data_rank: DataRank) -> Indices:
        """Return a rank's part of a global batch."""
        return self.batch(epoch, number)[data_rank.rank :: data_rank.size]

    def partners(self, epoch: int, number: int, data_rank: DataRank) -> Indices:
        """Return the sample that each one of ``share`` is mixed with."""
        return partners_of(self.batch(epoch, number), PARTNER_BLOCK)[data_rank.rank :: data_rank.size]


def train_batches(
    lengths: Lengths, batch_size: int, seed: int, epoch: int, classes: Sequence[int] | None = None
) -> Indices:
    """Return the global batches of an epoch, as indices into the split, of shape (batches, batch_size).

    Samples are shuffled, then sorted by length within groups of batches, so that a batch pads little.
    An incomplete last batch is left out of this epoch, whatever the lengths of its samples. With ``classes``, the class
    of each sample, all classes come equally often: samples of rare ones are repeated, some of frequent ones left out.
    """
    # NumPy takes no negative seeds.
    generator = np.random.default_rng((seed % 2**64, epoch))
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


def validation_batches(lengths: Lengths, data_rank: DataRank, size: int) -> list[Indices]:
    """Return this rank's share of a split, in batches of ``size`` and similar length. Each sample is in one rank.

    Every rank gets the same number of batches, because ranks under ZeRO 3 and in a pipeline compute together. When the
    samples have run out, the batch is empty.
    """
    share = np.argsort(lengths, kind="stable")[data_rank.rank :: data_rank.size]
    largest_share = -(-len(lengths) // data_rank.size)
    return [share[start : start + size] for start in range(0, largest_share, size)]
