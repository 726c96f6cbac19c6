"""The order of samples that fill different inputs: each batch has samples of one group."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from app.errors import TrainingError
from app.training.data.batches import EPOCH_ORDER, Indices, MemoryOrder, train_batches


@dataclass
class GroupedOrder(MemoryOrder):
    """The order of samples in memory with groups, whose batches are shuffled together.

    All ranks leave out the same parts of the model in a step, because they work on one global batch.
    """

    name: ClassVar[str] = f"groups-1 of {EPOCH_ORDER}"

    groups: NDArray[np.str_] = field(kw_only=True)
    """The group of each sample, of shape (samples,)."""

    def __post_init__(self) -> None:
        small = next((samples for samples in self._members if len(samples) < self.size), None)
        if small is not None:
            raise TrainingError(
                f"train.global_batch_size is {self.size}, and {len(small)} training samples have only "
                f"{self.groups[small[0]]}: a batch has samples with the same fields; lower the batch size, give more "
                "of these samples, or leave them out"
            )

    @cached_property
    def _members(self) -> list[Indices]:
        """The samples of each group."""
        return [np.flatnonzero(self.groups == group) for group in np.unique(self.groups)]

    def num_batches(self, epoch: int) -> int:  # noqa: ARG002
        """Return the number of full batches of all groups. Other samples are left out of an epoch."""
        return sum(len(samples) // self.size for samples in self._members)

    def make_batches(self, epoch: int) -> Indices:
        """Return the batches of an epoch, of shape (batches, size)."""
        lengths = np.asarray(self.lengths)
        batches = np.concatenate(
            [samples[train_batches(lengths[samples], self.size, self.seed, epoch)] for samples in self._members]
        )
        shuffled: Indices = batches[self._generator(epoch).permutation(len(batches))]
        return shuffled
