"""The right answers on a split, and the rows of the split in batches that are encoded lazily."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from app.data.prepared import Batch, Dataset
from app.engines.base import Engine, Signature
from app.tensors import OUTPUT, Tensors, concat_rows, slice_rows

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
    max_rows: int = BATCH
    """Maximum rows of a batch; 1 for a model that takes one row a call."""

    @classmethod
    def of(cls, split: Dataset, signature: Signature) -> "Rows":
        """Group the rows. If the input length varies, encode each row once to find its length."""
        max_rows = 1 if signature.takes_one_row else BATCH
        if (place := signature.length_axis) is None:
            return cls(split, [range(len(split))], max_rows)
        name, axis = place
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for index in range(len(split)):
            groups[split.batch([index]).inputs[name].shape[axis]].append(index)
        return cls(split, [groups[length] for length in sorted(groups)], max_rows)

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def batches(self, max_rows: int = BATCH) -> Iterator[Batch]:
        """Yield every row, in batches of at most ``max_rows``."""
        return (self.split.batch(indices) for group in self.groups for indices in self.chunks(group, max_rows))

    def chunks(self, group: Sequence[int], max_rows: int = BATCH) -> Iterator[Sequence[int]]:
        """Yield the indices of a group, in slices of at most ``max_rows``."""
        return chunks(group, min(max_rows, self.max_rows))


@dataclass(frozen=True)
class Reference:
    """The outputs of the model on a split: PyTorch's, or for an imported ONNX file those of ONNX Runtime in float32."""

    rows: Rows
    outputs: Sequence[Tensors]
    """The outputs of each group of ``rows``."""

    scores: str | None = OUTPUT
    """The output whose highest number is the predicted class. None: rows have no classes, so there is no accuracy."""

    accuracy: float | None = None
    """Share of the rows that the model classifies correctly."""

    @classmethod
    def of(cls, engine: Engine, split: Dataset, scores: str | None = OUTPUT) -> "Reference":
        """Run ``engine`` on the whole split."""
        rows = Rows.of(split, engine.signature)
        outputs, right = [], 0
        for group in rows.groups:
            parts = []
            for indices in rows.chunks(group):
                batch = rows.split.batch(indices)
                parts.append(engine.run(batch.inputs))
                right += count_right(parts[-1], batch, scores)
            outputs.append(concat_rows(parts))
        return cls(rows, outputs, scores, right / len(rows) if scores else None)

    def batches(self, max_rows: int = BATCH) -> Iterator[tuple[Batch, Tensors]]:
        """Yield every row with its outputs, in batches of at most ``max_rows``."""
        for group, outputs in zip(self.rows.groups, self.outputs, strict=True):
            start = 0
            for indices in self.rows.chunks(group, max_rows):
                yield self.rows.split.batch(indices), slice_rows(outputs, start, start + len(indices))
                start += len(indices)


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
    right = (count_right(engine.run(batch.inputs), batch, OUTPUT) for batch in rows.batches(max_rows))
    return sum(right) / len(rows)


def count_right(outputs: Tensors, batch: Batch, scores: str | None) -> int:
    """Return the number of rows whose highest score is that of their class; 0 if they have no classes."""
    return int((outputs[scores].argmax(-1) == batch.targets).sum()) if scores else 0


def chunks(indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Yield ``indices`` in slices of at most ``size``."""
    return (indices[start : start + size] for start in range(0, len(indices), size))
