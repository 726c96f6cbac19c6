"""PyTorch's answers on a split, and the split's rows in batches that are encoded as they are asked for."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.data.dataset import Batch, Dataset
from app.engines.base import Engine, Signature
from app.tensors import OUTPUT, Tensors

BATCH = 64
"""Rows that are answered at once, at most."""


@dataclass(frozen=True)
class Rows:
    """The rows of a split, in groups that alone are padded to one length, the shortest first.

    A row shares batches with rows of its group alone, so it is answered as when it is served alone. No batch is kept:
    what is in memory of the tensors is one batch, however long the split is.
    """

    split: Dataset
    groups: Sequence[Sequence[int]]

    @classmethod
    def of(cls, split: Dataset, signature: Signature) -> "Rows":
        """Group the rows; where a length varies each is encoded once, to see it."""
        if (place := varying_axis(signature)) is None:
            return cls(split, [range(len(split))])
        name, axis = place
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for index in range(len(split)):
            groups[split.batch([index]).inputs[name].shape[axis]].append(index)
        return cls(split, [groups[length] for length in sorted(groups)])

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def batches(self, max_rows: int = BATCH) -> Iterator[Batch]:
        """Yield every row, in batches of ``max_rows`` at most."""
        return (self.split.batch(indices) for group in self.groups for indices in cut(group, max_rows))


@dataclass(frozen=True)
class Reference:
    """PyTorch's logits on a split, float32 of shape (rows, labels), and the right classes of shape (rows).

    Both are in the order of ``rows``.
    """

    rows: Rows
    logits: NDArray[np.float32]
    classes: NDArray[np.int64]

    @classmethod
    def of(cls, engine: Engine, split: Dataset) -> "Reference":
        """Answer the whole split with ``engine``."""
        rows = Rows.of(split, engine.signature)
        logits, classes = [], []
        for batch in rows.batches():
            logits.append(engine.infer(batch.inputs)[OUTPUT])
            classes.append(batch.targets)
        return cls(rows, np.concatenate(logits), np.concatenate(classes))

    @property
    def accuracy(self) -> float:
        """Share of the rows that PyTorch answers right."""
        return float((self.logits.argmax(-1) == self.classes).mean())


@dataclass(frozen=True)
class EncodedBatches(Iterable[Tensors]):
    """The inputs of some rows of a split, which are encoded anew in each iteration."""

    split: Dataset
    indices: Sequence[Sequence[int]]

    def __iter__(self) -> Iterator[Tensors]:
        return (self.split.batch(indices).inputs for indices in self.indices)


def accuracy_on(engine: Engine, split: Dataset, max_rows: int = BATCH) -> float:
    """Return the share of the split's rows that ``engine`` answers right, asked ``max_rows`` at once at most."""
    rows = Rows.of(split, engine.signature)
    answers = ((engine.infer(batch.inputs)[OUTPUT], batch.targets) for batch in rows.batches(max_rows))
    return sum(int((logits.argmax(-1) == classes).sum()) for logits, classes in answers) / len(rows)


def varying_axis(signature: Signature) -> tuple[str, int] | None:
    """Return an input and its axis beside the rows that varies; None where inputs are of one size."""
    places = (
        (spec.name, axis) for spec in signature.inputs for axis, size in enumerate(spec.shape) if axis and size < 0
    )
    return next(places, None)


def cut(indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Yield ``indices`` in slices of ``size`` at most."""
    return (indices[start : start + size] for start in range(0, len(indices), size))
