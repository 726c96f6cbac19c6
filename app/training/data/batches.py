"""The samples of each batch. Global batches are the same for any number of workers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.config import TrainConfig
from app.data.prepared import Dataset, ShardedSamples
from app.errors import TrainingError

Indices = NDArray[np.int64]
Lengths = NDArray[np.int64] | Sequence[int]
EPOCH_ORDER = "numpy-1"
"""Name of the sample order of ``train_batches``. A change of the order needs a new name."""
BATCHES_PER_SORT = 32
"""Number of batches whose samples are sorted by length together. More pad less, fewer mix better."""


@dataclass(frozen=True)
class DataRank:
    """A worker's rank among the ``size`` data-parallel ranks."""

    rank: int
    size: int


def shards_of(dataset: Dataset) -> ShardedSamples | None:
    """Return the shards that a dataset lies in; None if it is in memory."""
    shards: ShardedSamples | None = getattr(dataset, "shards", None)
    return shards


def count_steps(config: TrainConfig, num_samples: int) -> int:
    """Return the number of optimizer steps of the whole run.

    Raises:
        TrainingError: there are fewer samples than one batch takes.
    """
    per_epoch = num_samples // config.global_batch_size
    if not per_epoch:
        raise TrainingError(
            f"train.global_batch_size is {config.global_batch_size}, the training split has {num_samples} samples: "
            "lower the batch size or give more data"
        )
    return min(config.epochs * per_epoch, config.max_steps or config.epochs * per_epoch)


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
    order = shuffled[: len(lengths) // batch_size * batch_size]
    group = np.arange(len(order)) // (BATCHES_PER_SORT * batch_size)
    by_length = np.lexsort((np.asarray(lengths)[order], group))
    # Batches are shuffled again, because sorting has put the short ones of each group first.
    return generator.permutation(order[by_length].reshape(-1, batch_size))


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


def micro_batches(batch: Indices, data_rank: DataRank, count: int) -> list[Indices]:
    """Split this rank's share of a global batch into ``count`` micro-batches whose sizes differ by at most one."""
    return np.array_split(batch[data_rank.rank :: data_rank.size], count)


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
