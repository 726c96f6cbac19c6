"""PyTorch's logits on a split, and the rows of the split in batches that are encoded lazily."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.data.prepared import Batch, Dataset
from app.engines.base import Engine, Signature
from app.tensors import OUTPUT, Tensors

BATCH = 64
"""Maximum rows in one batch."""


@dataclass(frozen=True)
class Rows:
    """The rows of a split, grouped by padded length, shortest first.

    A batch has rows of one group only, so a row has the same padding as when it is served alone. Batches are not kept:
    only one is in memory at a time, whatever the size of the split.
    """

    split: Dataset
    groups: Sequence[Sequence[int]]

    @classmethod
    def of(cls, split: Dataset, signature: Signature) -> "Rows":
        """Group the rows. If the input length varies, encode each row once to find its length."""
        if (place := signature.length_axis) is None:
            return cls(split, [range(len(split))])
        name, axis = place
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for index in range(len(split)):
            groups[split.batch([index]).inputs[name].shape[axis]].append(index)
        return cls(split, [groups[length] for length in sorted(groups)])

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def batches(self, max_rows: int = BATCH) -> Iterator[Batch]:
        """Yield every row, in batches of at most ``max_rows``."""
        return (self.split.batch(indices) for group in self.groups for indices in chunks(group, max_rows))


@dataclass(frozen=True)
class Reference:
    """PyTorch's logits on a split, float32 of shape (rows, labels), and the target classes of shape (rows).

    Both are in the order of ``rows``.
    """

    rows: Rows
    logits: NDArray[np.float32]
    classes: NDArray[np.int64]

    @classmethod
    def of(cls, engine: Engine, split: Dataset) -> "Reference":
        """Run ``engine`` on the whole split."""
        rows = Rows.of(split, engine.signature)
        logits, classes = [], []
        for batch in rows.batches():
            logits.append(engine.infer(batch.inputs)[OUTPUT])
            classes.append(batch.targets)
        return cls(rows, np.concatenate(logits), np.concatenate(classes))

    @property
    def accuracy(self) -> float:
        """Share of the rows that PyTorch classifies correctly."""
        return float((self.logits.argmax(-1) == self.classes).mean())


@dataclass(frozen=True)
class EncodedBatches(Iterable[Tensors]):
    """Inputs of selected rows of a split, encoded again in each iteration."""

    split: Dataset
    indices: Sequence[Sequence[int]]

    def __iter__(self) -> Iterator[Tensors]:
        return (self.split.batch(indices).inputs for indices in self.indices)


def accuracy_on(engine: Engine, split: Dataset, max_rows: int = BATCH) -> float:
    """Return the share of rows that ``engine`` classifies correctly, in batches of at most ``max_rows``."""
    rows = Rows.of(split, engine.signature)
    answers = ((engine.infer(batch.inputs)[OUTPUT], batch.targets) for batch in rows.batches(max_rows))
    return sum(int((logits.argmax(-1) == classes).sum()) for logits, classes in answers) / len(rows)


def chunks(indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Yield ``indices`` in slices of at most ``size``."""
    return (indices[start : start + size] for start in range(0, len(indices), size))
