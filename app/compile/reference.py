"""The right answers on a split, and the rows of the split in batches that are encoded lazily."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.data.prepared import Batch, Dataset
from app.engines.base import Engine, Signature
from app.repository.score import Score
from app.tasks.judgement import Predictions, spread
from app.tasks.metrics import Metric, SklearnMetric
from app.tasks.objective import select_counted
from app.tensors import OUTPUT, Tensors, concat_rows, magnitudes, slice_rows

if TYPE_CHECKING:
    from app.tasks.metrics import Predicted

BATCH = 64
"""Maximum rows in one batch."""
_PREDICTIONS = 2000
"""Maximum rows for a judgement. The score is of all rows."""


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
        # A file with a fixed batch size of 1 cannot take more.
        max_rows = 1 if signature.takes_one_row else BATCH
        if (place := signature.length_axis) is None:
            return cls(split, [range(len(split))], max_rows)
        name, axis = place
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for index in range(len(split)):
            # Encoded alone, because in a batch the longest row sets the length of all.
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

    judge: "Judge"
    score: Score | None
    """The score of these outputs."""

    @cached_property
    def magnitudes(self) -> Tensors:
        """The magnitude of each column of the float outputs, in arrays that broadcast to them."""
        return magnitudes(self.outputs)

    @classmethod
    def of(cls, engine: Engine, split: Dataset, judge: "Judge", max_rows: int = BATCH) -> "Reference":
        """Run ``engine`` on the whole split, in batches of at most ``max_rows``."""
        rows = Rows.of(split, engine.signature)
        outputs, tally = [], Tally(judge)
        for group in rows.groups:
            parts = []
            for indices in rows.chunks(group, max_rows):
                batch = rows.split.batch(indices)
                parts.append(engine.run(batch.inputs))
                tally.add(parts[-1], batch)
            outputs.append(concat_rows(parts))
        return cls(rows, outputs, judge, tally.score)

    def batches(self, max_rows: int = BATCH) -> Iterator[tuple[Batch, Tensors]]:
        """Yield every row with its outputs, in batches of at most ``max_rows``."""
        for group, outputs in zip(self.rows.groups, self.outputs, strict=True):
            start = 0
            for indices in self.rows.chunks(group, max_rows):
                yield self.rows.split.batch(indices), slice_rows(outputs, start, start + len(indices))
                start += len(indices)

    @property
    def predictions(self) -> Iterator[Predictions]:
        """The judged outputs and the targets of some of the rows, in batches."""
        first, chosen = 0, np.array(spread(len(self.rows), _PREDICTIONS))
        for batch, outputs in self.batches():
            counted, targets = self.judge.counted(outputs, batch)
            places = chosen[(chosen >= first) & (chosen < first + len(targets))] - first
            yield Predictions(counted[places], targets[places])
            first += len(targets)


@dataclass(frozen=True)
class EncodedBatches(Iterable[Tensors]):
    """Inputs of selected rows of a split, encoded again in each iteration."""

    split: Dataset
    indices: Sequence[Sequence[int]]

    def __iter__(self) -> Iterator[Tensors]:
        return (self.split.batch(indices).inputs for indices in self.indices)


@dataclass(frozen=True)
class Judge:
    """The metric that the gates keep, and the output that it judges."""

    metric: Metric | None
    """None: rows have no targets, or the task compares outputs only with each other."""

    output: str = OUTPUT

    def drop(self, before: Score, after: Score) -> float:
        """Return how much worse ``after`` is, as ``compile.gates.max_accuracy_drop`` limits it."""
        assert self.metric is not None
        return self.metric.drop(before.value, after.value)

    def counted(self, outputs: Tensors, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the judged output and the targets of the rows that count."""
        given = torch.from_numpy(outputs[self.output].astype(np.float32, copy=False))
        return select_counted(given, torch.from_numpy(batch.targets))

    def hits(self, outputs: Tensors, batch: Batch) -> NDArray[np.bool_] | None:
        """Return whether each target is met; None without a metric, or if it is no share of targets."""
        found = self.metric.hits(*self.counted(outputs, batch)) if self.metric else None
        return None if found is None else found.numpy()


class Tally:
    """Adds up the metric of a judge over batches."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._sums: Tensor | None = None
        self._rows: list[Predicted] = []

    def add(self, outputs: Tensors, batch: Batch) -> None:
        """Add the rows of a batch."""
        if (metric := self._judge.metric) is not None:
            counted = self._judge.counted(outputs, batch)
            # Such a metric is no sum over rows: it is computed from all of them at the end.
            if isinstance(metric, SklearnMetric):
                self._rows.append(metric.rows(*counted))
            sums = metric.sums(*counted).double()
            self._sums = sums if self._sums is None else self._sums + sums

    @property
    def score(self) -> Score | None:
        """The score of all rows so far; None without a metric."""
        if (metric := self._judge.metric) is None or self._sums is None:
            return None
        value = metric.value_of(self._rows) if isinstance(metric, SklearnMetric) else metric.value(self._sums)
        return Score(metric=metric.name, value=value, mode=metric.mode)


def chunks(indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Yield ``indices`` in slices of at most ``size``."""
    return (indices[start : start + size] for start in range(0, len(indices), size))
