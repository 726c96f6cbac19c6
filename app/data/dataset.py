"""What a model is trained on: samples by index, of any kind of data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from app.tensors import Tensors

IGNORED = -100
"""A target that counts in no loss and no accuracy."""


@dataclass(frozen=True)
class Batch:
    """A few samples.

    Attributes:
        inputs: the model's tensors by name, each with the batch first.
        targets: int64; classes of shape (batch,), or the next token of each position, (batch, length).
    """

    inputs: Tensors
    targets: NDArray[np.int64]


class Dataset(Protocol):
    """Samples with their targets, made into tensors as they are asked for."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> NDArray[np.int64] | Sequence[int]:
        """A key for each sample: samples of like keys pad alike."""
        ...

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples of ``indices``, in this order. Raises DataError for one that cannot be read."""
        ...
