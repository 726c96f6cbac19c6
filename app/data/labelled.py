"""Labelled examples in splits, with the processor that reads the inputs and the targets of the labels."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from app.data.examples import Input
from app.data.prepared import Batch, Columns, KeptSplit, SplitData
from app.data.processor import GroupingProcessor, PaddingProcessor, Processor
from app.data.targets import Outputs, Targets
from app.tensors import Tensors

if TYPE_CHECKING:  # it imports pyarrow
    from app.data.sharded import ShardedRows


class LabelledSplit(Protocol):
    """Inputs with their classes as indices into the labels, in memory or in shards."""

    @property
    def shards(self) -> "ShardedRows | None": ...

    @property
    def inputs(self) -> Sequence[Input]: ...

    @property
    def classes(self) -> Sequence[Any]: ...

    @property
    def lengths(self) -> Sequence[int]:
        """Number of characters of each text; 0 for pictures, which all have one size."""
        ...

    def __len__(self) -> int: ...

    def class_counts(self, num_classes: int) -> NDArray[np.int64]:
        """Return the number of rows of each class, of shape (num_classes,)."""
        ...

    def take(self, indices: Sequence[int]) -> tuple[list[Input], list[Any]]:
        """Return inputs and classes in the order of ``indices``."""
        ...


@dataclass(frozen=True)
class Split:
    """Inputs with their classes as indices into the labels, or with the values of other targets."""

    shards: ClassVar[None] = None

    inputs: list[Input]
    classes: list[Any]

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def lengths(self) -> list[int]:
        """Number of characters of each text; 0 for pictures, which all have one size."""
        return [len(item) if isinstance(item, str) else 0 for item in self.inputs]

    def class_counts(self, num_classes: int) -> NDArray[np.int64]:
        """Return the number of rows of each class, of shape (num_classes,)."""
        return np.bincount(self.classes, minlength=num_classes)

    def take(self, indices: Sequence[int]) -> tuple[list[Input], list[Any]]:
        """Return inputs and classes in the order of ``indices``."""
        return [self.inputs[index] for index in indices], [self.classes[index] for index in indices]


@dataclass(frozen=True)
class LabelledDataset(KeptSplit):
    """A split whose inputs a processor turns into tensors."""

    split: LabelledSplit
    processor: Processor
    targets: Targets

    def __len__(self) -> int:
        return len(self.split)

    @property
    def shards(self) -> "ShardedRows | None":
        """The shards that the split lies in; None if it is in memory."""
        return self.split.shards

    @cached_property
    def lengths(self) -> NDArray[np.int64] | Sequence[int]:
        """Number of characters of each text, of shape (samples,). 0 for other inputs, which all have one size."""
        if self.processor.modality == "row":
            return np.zeros(len(self), np.int64)
        if self._measured is not None:
            return self._measured[0]
        lengths = self.split.lengths
        return lengths if self.shards else np.array(lengths, np.int64)

    @cached_property
    def padded_lengths(self) -> NDArray[np.int32] | None:
        """Tokens of each text with its padding, of shape (samples,); None for other inputs. All texts are encoded."""
        if not isinstance(self.processor, PaddingProcessor):
            return None
        return self.processor.padded_lengths(self.split.inputs)

    @property
    def columns(self) -> Mapping[str, Sequence[Any]]:
        """``input`` and ``class``."""
        return {"input": self.split.inputs, "class": self.split.classes}

    def content(self) -> Iterator[bytes]:
        """Yield each input after its value."""
        for item, label in zip(self.split.inputs, self.split.classes, strict=True):
            content = item.encode() if isinstance(item, str) else item
            # With its length, an input cannot run into the next one.
            yield f"{label} {len(content)} ".encode() + content

    @property
    def groups(self) -> NDArray[np.str_] | None:
        """The group of each sample, of shape (samples,), if a batch may have samples of one group only."""
        return None if self._measured is None else self._measured[1]

    @cached_property
    def _measured(self) -> tuple[NDArray[np.int64], NDArray[np.str_]] | None:
        return self.processor.measure(self.split.inputs) if isinstance(self.processor, GroupingProcessor) else None

    def batch(self, indices: Sequence[int]) -> Batch:
        inputs, values = self.split.take(indices)
        return self.to_batch(self.processor.encode(inputs), values)

    def to_batch(self, tensors: Tensors, values: Sequence[Any]) -> Batch:
        """Return encoded inputs with the targets that ``values`` stand for."""
        batch = Batch(tensors, self.targets.batch(values))
        if not isinstance(self.processor, GroupingProcessor):
            return batch
        return replace(batch, absent=self.processor.absent(tensors))


@dataclass(frozen=True)
class LabelledData(SplitData):
    """Inputs, each with a class, several classes, a number, or another value that the targets read."""

    train: LabelledDataset
    validation: LabelledDataset
    targets: Targets
    test: LabelledDataset | None = None

    @classmethod
    def open_split(cls, name: str, columns: Columns, processor: Processor, targets: Outputs) -> LabelledDataset:  # noqa: ARG003
        return LabelledDataset(Split(columns["input"], columns["class"]), processor, cast(Targets, targets))
