"""The order of samples that fill different inputs: each batch has samples of one group."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from app.config import Recipe
from app.errors import RecipeError, TrainingError
from app.training.data.batches import DataRank, Indices, Lengths, MemoryOrder, SampleOrder, validation_batches

Groups = NDArray[np.str_]


@dataclass
class GroupedOrder:
    """The orders of several groups, whose global batches are shuffled together.

    All ranks leave out the same parts of the model in a step, because they work on one global batch.
    """

    members: Sequence[Indices]
    """The samples of each group."""
    orders: Sequence[SampleOrder]
    """The order of each group, whose indices are places in ``members``."""
    seed: int
    _epoch: tuple[int, Sequence[tuple[int, int]]] | None = field(default=None, init=False)
    """The last epoch that was asked for, and the group of each batch with the batch's number in it."""

    @property
    def name(self) -> str:
        """Name of the order, with that of the groups' orders."""
        return f"groups-1 of {self.orders[0].name}"

    def num_batches(self, epoch: int) -> int:
        """Return the number of global batches of all groups. Samples that do not fill one are left out of an epoch."""
        return sum(order.num_batches(epoch) for order in self.orders)

    def batch_size(self, epoch: int, number: int) -> int:
        """Return the number of samples of a global batch."""
        group, place = self._place(epoch, number)
        return self.orders[group].batch_size(epoch, place)

    def batch(self, epoch: int, number: int) -> Indices:
        """Return a global batch, as indices into the split."""
        group, place = self._place(epoch, number)
        return self.members[group][self.orders[group].batch(epoch, place)]

    def share(self, epoch: int, number: int, data_rank: DataRank) -> Indices:
        """Return a rank's part of a global batch."""
        group, place = self._place(epoch, number)
        return self.members[group][self.orders[group].share(epoch, place, data_rank)]

    def partners(self, epoch: int, number: int, data_rank: DataRank) -> Indices:
        """Return the sample that each one of ``share`` is mixed with."""
        group, place = self._place(epoch, number)
        return self.members[group][self.orders[group].partners(epoch, place, data_rank)]

    def _place(self, epoch: int, number: int) -> tuple[int, int]:
        if self._epoch is None or self._epoch[0] != epoch:
            places = [
                (group, place) for group, order in enumerate(self.orders) for place in range(order.num_batches(epoch))
            ]
            # NumPy takes no negative seeds.
            shuffled = np.random.default_rng((self.seed % 2**64, epoch)).permutation(len(places))
            self._epoch = epoch, [places[place] for place in shuffled]
        return self._epoch[1][number]


def grouped_order(lengths: Lengths, groups: Groups, size: int, seed: int) -> GroupedOrder:
    """Return the order of samples in memory. Raises TrainingError if a group does not fill a batch of ``size``."""
    lengths, members = np.asarray(lengths), members_of(groups)
    if (small := next((samples for samples in members if len(samples) < size), None)) is not None:
        raise TrainingError(
            f"train.global_batch_size is {size}, and {len(small)} training samples have only {groups[small[0]]}: a "
            "batch has samples with the same fields; lower the batch size, give more of these samples, or leave them "
            "out"
        )
    return GroupedOrder(members, [MemoryOrder(lengths[samples], size, seed) for samples in members], seed)


def members_of(groups: Groups) -> list[Indices]:
    """Return the samples of each group, in the order of the groups' names."""
    return [np.flatnonzero(groups == group) for group in np.unique(groups)]


def grouped_validation_batches(
    lengths: Lengths, groups: Groups, data_rank: DataRank, size: int
) -> list[tuple[Indices, int]]:
    """Return this rank's share of a split, in batches of one group, each with a sample of that group.

    The batches at one place have the same group in all ranks. The sample stands in where a batch is empty.
    """
    lengths = np.asarray(lengths)
    return [
        (members[batch], int(members[0]))
        for members in members_of(groups)
        for batch in validation_batches(lengths[members], data_rank, size)
    ]


def require_grouped_order(recipe: Recipe) -> None:
    """Raise RecipeError if a recipe, whose samples have groups, asks for another order."""
    orders = {
        "data.sampling": recipe.data.sampling != "natural",
        "train.curriculum": recipe.train.curriculum is not None,
        "data.sources": bool(recipe.data.sources),
    }
    if given := [key for key, is_given in orders.items() if is_given]:
        raise RecipeError(
            f"{given[0]} orders all samples together, and a batch of task {recipe.task} has samples with the same "
            "fields only: leave it out"
        )
