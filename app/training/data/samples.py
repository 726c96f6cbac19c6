"""The samples that an order arranges: those in shards, and those in memory, which look like shards to it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.data.labelled import LabelledDataset
from app.data.prepared import Dataset, Indices
from app.data.sharded import ShardedRows


@dataclass(frozen=True)
class InMemory:
    """Samples in memory. One window has them all, and each row is a shard of its own, because none is slow to read."""

    lengths: NDArray[np.integer[Any]]
    classes: Sequence[Any] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def shard_rows(self) -> Indices:
        """Number of rows of each shard."""
        return np.broadcast_to(np.int64(1), len(self))

    @cached_property
    def first_rows(self) -> Indices:
        """Index of the first row of each shard, and the number of all rows."""
        return np.arange(len(self) + 1)

    @property
    def window_rows(self) -> int:
        """All of them."""
        return len(self)

    @cached_property
    def has_one_length(self) -> bool:
        """Whether all rows have the same length."""
        return len(self) == 0 or bool(self.lengths.min() == self.lengths.max())

    def lengths_at(self, rows: Indices) -> NDArray[np.integer[Any]]:
        """Return the length of each row."""
        return self.lengths[rows]

    def classes_at(self, rows: Indices) -> NDArray[np.integer[Any]]:
        """Return the class of each row."""
        return self._classes[rows]

    @cached_property
    def _classes(self) -> NDArray[np.int64]:
        return np.asarray(self.classes, np.int64)

    def prefetch(self, rows: Indices) -> None:
        """Do nothing: they are here."""


Samples = ShardedRows | InMemory
"""The samples of a split, as an order reads them."""


def samples_of(dataset: Dataset) -> Samples:
    """Return the samples of a split as an order reads them."""
    if dataset.shards is not None:
        return dataset.shards
    classes = dataset.split.classes if isinstance(dataset, LabelledDataset) else None
    return InMemory(np.asarray(dataset.lengths, np.int64), classes)
