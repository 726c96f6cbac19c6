"""The protocols between data and training: batches, splits, and prepared data as jobs save and load it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.tensors import Tensors

IGNORED = -100
"""A target that counts in no loss and no accuracy."""


@dataclass(frozen=True)
class Batch:
    """A few samples.

    Attributes:
        inputs: the model's tensors by name. The first dimension is the batch.
        targets: int64. Classes of shape (batch,), or the next token at each position, of shape (batch, length).
    """

    inputs: Tensors
    targets: NDArray[np.int64]


class Dataset(Protocol):
    """Samples with their targets, made into tensors on demand."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> NDArray[np.int64] | Sequence[int]:
        """A length for each sample. Batches of samples with similar lengths need little padding."""
        ...

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the samples of ``indices``, in this order. Raises DataError for one that cannot be read."""
        ...


class PreparedData(Protocol):
    """Cleaned and split data of any kind, kept in a folder that workers and later jobs read. ``app.tasks`` makes it."""

    @property
    def train(self) -> Dataset: ...

    @property
    def validation(self) -> Dataset:
        """The split that the model is measured on, and not trained on."""
        ...

    @property
    def facts(self) -> Mapping[str, int]:
        """Properties of the data that a model factory may need, by the name of its argument."""
        ...

    @property
    def tokens_per_sample(self) -> int | None:
        """Number of targets per sample if each token is one, as in language modelling. None if a sample has one."""
        ...

    @property
    def fingerprint(self) -> str:
        """sha256 over everything that the model can see, in order."""
        ...

    @property
    def summary(self) -> str:
        """One or two lines for the log: what was kept, and how it was split."""
        ...

    def save(self, folder: UPath) -> None:
        """Write everything, with checksums. Every worker loads it."""
        ...

    def save_codec(self, folder: UPath) -> None:
        """Write the files that turn inputs into a trained model's tensors, and its answers into words."""
        ...
