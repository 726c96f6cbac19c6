"""Which samples form which batch: the same global batches for any number of workers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.config import TrainConfig
from app.errors import TrainingError

Indices = NDArray[np.int64]
Lengths = NDArray[np.int64] | Sequence[int]
EPOCH_ORDER = "numpy-1"
"""Name of the sample order of ``train_batches``. A change of the order needs a new name."""
_GROUP = 32  # batches whose samples are sorted by length together: more pads less, fewer mixes better


@dataclass(frozen=True)
class Shard:
    """A worker's place among the data-parallel ranks."""

    rank: int
    size: int


def count_steps(config: TrainConfig, num_samples: int) -> int:
    """Optimizer steps of the whole run.

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


def train_batches(lengths: Lengths, batch_size: int, seed: int, epoch: int) -> Indices:
    """Return the global batches of an epoch, as indices into the split, of shape (batches, batch_size).

    Samples are shuffled, then sorted by length within groups of batches, so that a batch pads little.
    An incomplete last batch is left out of this epoch, whatever the lengths of its samples.
    """
    generator = np.random.default_rng((seed % 2**64, epoch))
    order = generator.permutation(len(lengths))[: len(lengths) // batch_size * batch_size]
    group = np.arange(len(order)) // (_GROUP * batch_size)
    by_length = np.lexsort((np.asarray(lengths)[order], group))
    return generator.permutation(order[by_length].reshape(-1, batch_size))


def micro_batches(batch: Indices, shard: Shard, count: int) -> list[Indices]:
    """Split this rank's share of a global batch into ``count`` micro-batches whose sizes differ by at most one."""
    return np.array_split(batch[shard.rank :: shard.size], count)


def validation_batches(lengths: Lengths, shard: Shard, size: int) -> list[Indices]:
    """This rank's share of a split, each sample in one rank, in batches of ``size`` and similar length.

    Every rank gets as many batches as any other, since those of ZeRO 3 and of a pipeline compute together;
    where samples have run out the batch is empty.
    """
    share = np.argsort(lengths, kind="stable")[shard.rank :: shard.size]
    largest_share = -(-len(lengths) // shard.size)
    return [share[start : start + size] for start in range(0, largest_share, size)]
