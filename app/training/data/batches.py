"""Which samples form which batch: the same global batches for any number of workers."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.config import TrainConfig
from app.errors import TrainingError

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


def train_batches(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """The global batches of an epoch, as indices into the split.

    Samples are shuffled, then sorted by length within groups of batches, so that a batch pads little.
    Samples that do not fill a last batch are left out of this epoch.
    """
    generator = random.Random(f"{seed}/{epoch}")
    order = list(range(len(lengths)))
    generator.shuffle(order)
    batches: list[list[int]] = []
    for start in range(0, len(order), _GROUP * batch_size):
        group = sorted(order[start : start + _GROUP * batch_size], key=lengths.__getitem__)
        batches += [group[first : first + batch_size] for first in range(0, len(group), batch_size)]
    full = [batch for batch in batches if len(batch) == batch_size]
    generator.shuffle(full)
    return full


def micro_batches(batch: Sequence[int], shard: Shard, size: int) -> Iterator[list[int]]:
    """This rank's share of a global batch, in micro-batches of ``size``."""
    share = batch[shard.rank :: shard.size]
    for start in range(0, len(share), size):
        yield list(share[start : start + size])


def validation_batches(lengths: Sequence[int], shard: Shard, size: int) -> Iterator[list[int]]:
    """This rank's share of a split, each sample in one rank, in batches of ``size`` and similar length.

    Every rank gets as many batches as any other, since those of ZeRO 3 and of a pipeline compute together;
    where samples have run out the batch is empty.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    share = order[shard.rank :: shard.size]
    most = -(-len(order) // shard.size)
    for start in range(0, most, size):
        yield share[start : start + size]
