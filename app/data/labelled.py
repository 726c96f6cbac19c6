"""Labelled examples in splits, with the processor that reads the inputs and the targets of the labels."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.checksums import sha256_of
from app.data.examples import CleaningReport, Input
from app.data.prepared import (
    TEST,
    TRAIN,
    VALIDATION,
    Batch,
    Dataset,
    PreparedData,
    SplitData,
    finish_saving,
    load_padded_lengths,
    save_padded_lengths,
)
from app.data.processor import GroupingProcessor, PaddingProcessor, Processor
from app.data.sharded import ShardedRows, ShardedSplit, ShardReference
from app.data.targets import Outputs, Targets
from app.errors import DataError
from app.tensors import Tensors


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

    def take(self, indices: Sequence[int]) -> tuple[Sequence[Any], list[Any]]:
        """Return inputs and classes in the order of ``indices``."""
        return [self.inputs[index] for index in indices], self.values(indices)

    def values(self, indices: Sequence[int]) -> list[Any]:
        """Return classes in the order of ``indices``."""
        return [self.classes[index] for index in indices]


LabelledSplit = Split | ShardedSplit
"""Inputs with what their labels mean, in memory or in shards."""


@runtime_checkable
class CollatingTargets(Protocol):
    """Targets that depend on how an input is encoded, such as one for each word that the model reads."""

    def collate(self, processor: Processor, inputs: Sequence[Input], values: Sequence[Any]) -> Batch:
        """Return encoded inputs with their targets."""
        ...

    def count(self, processor: Processor, inputs: Iterable[Input]) -> NDArray[np.int64]:
        """Return the number of targets of each input, of shape (inputs,). The loss of a step is a mean over these."""
        ...


@dataclass(frozen=True)
class LabelledDataset(Dataset):
    """A split whose inputs a processor turns into tensors."""

    split: LabelledSplit
    processor: Processor
    targets: Targets

    def __len__(self) -> int:
        return len(self.split)

    @property
    def shards(self) -> ShardedRows | None:
        """The shards that the split lies in; None if it is in memory."""
        return self.split.shards

    @cached_property
    def lengths(self) -> NDArray[np.int64] | Sequence[int]:
        """Number of characters of each text, of shape (samples,). 0 for other inputs, which all have one size."""
        if self.processor.modality == "row":
            return np.zeros(len(self), np.int64)
        if self._measured is not None:
            return self._measured[0]
        return self.split.lengths if self.shards else np.array(self.split.lengths, np.int64)

    @cached_property
    def padded_lengths(self) -> NDArray[np.int32] | None:
        """Tokens of each text with its padding, of shape (samples,); None for other inputs. All texts are encoded."""
        if not isinstance(self.processor, PaddingProcessor):
            return None
        return self.processor.padded_lengths(self.split.inputs)

    @property
    def groups(self) -> NDArray[np.str_] | None:
        """The group of each sample, of shape (samples,), if a batch may have samples of one group only."""
        return None if self._measured is None else self._measured[1]

    @cached_property
    def _grouping(self) -> GroupingProcessor | None:
        return self.processor if isinstance(self.processor, GroupingProcessor) else None

    @cached_property
    def _collating(self) -> CollatingTargets | None:
        # For a protocol isinstance takes longer than a batch of numbers.
        return self.targets if isinstance(self.targets, CollatingTargets) else None

    @cached_property
    def _measured(self) -> tuple[NDArray[np.int64], NDArray[np.str_]] | None:
        return self._grouping.measure(self.split.inputs) if self._grouping else None

    @cached_property
    def num_targets(self) -> NDArray[np.int64] | None:
        """Number of targets of each sample, of shape (samples,); None if all have as many. All texts are encoded."""
        return self._collating.count(self.processor, self.split.inputs) if self._collating else None

    def batch(self, indices: Sequence[int]) -> Batch:
        inputs, values = self.split.take(indices)
        if self._collating:
            return self._collating.collate(self.processor, inputs, values)
        try:
            tensors = self.processor.encode(inputs)
        except DataError:
            self._refuse_each(indices)
            raise
        return self.to_batch(tensors, values)

    def _refuse_each(self, indices: Sequence[int]) -> None:
        """Raise DataError for the first sample that cannot be encoded, with its place."""
        for index in indices:
            try:
                self.processor.encode(self.split.take([index])[0])
            except DataError as error:
                place = self.shards.place(index) if self.shards else f"row {1 + index:,}"
                raise DataError(f"{place}: {error}").of(error.rule, error.key) from error

    def to_batch(self, tensors: Tensors, values: Sequence[Any]) -> Batch:
        """Return encoded inputs with the targets that ``values`` stand for."""
        absent = self._grouping.absent(tensors) if self._grouping else frozenset[str]()
        return Batch(tensors, self.targets.batch(values), absent=absent)


@dataclass(frozen=True)
class ShardedData(SplitData):
    """Data whose splits lie in shards."""

    reference: ShardReference = field(kw_only=True)

    @classmethod
    @abstractmethod
    def open_split(cls, name: str, rows: ShardedRows, processor: Processor, targets: Outputs) -> Dataset:
        """Return the split of this name, which has these rows."""

    @classmethod
    def open(cls, reference: ShardReference, processor: Processor, targets: Outputs, report: CleaningReport) -> Self:
        """Return the data in these shards, without the test split."""
        train, validation = (
            cls.open_split(name, reference.open(name), processor, targets) for name in (TRAIN, VALIDATION)
        )
        origins = reference.origins
        return cls(train, validation, targets, processor, report, origins=origins, reference=reference)

    def with_test(self) -> Self:
        """Return the data with the test split, if there is one."""
        return replace(self, test=self._open_test(self.reference, self.processor, self.targets))

    @classmethod
    def _open_test(cls, reference: ShardReference, processor: Processor, targets: Outputs) -> Dataset | None:
        rows = reference.open(TEST)
        return cls.open_split(TEST, rows, processor, targets) if len(rows) else None

    @property
    def fingerprint(self) -> str:
        """sha256 over the labels and the checksums of all shards."""
        return sha256_of(f"{self.labels} {self.reference.sha256}".encode())

    @property
    def summary(self) -> str:
        return f"{super().summary}, in shards in {self.reference.location}"

    def with_train(self, rows: ShardedRows) -> Self:
        """Return the data with other training rows, such as those of a stream's next micro-epoch."""
        return replace(self, train=self.open_split(TRAIN, rows, self.processor, self.targets))

    def grown(self, prepared: PreparedData) -> Self:
        """Return the data, extended by the sources that ``prepared`` appends. Labels and processor stay.

        Raises:
            DataError: an added source has other labels, or the existing sources have changed.
        """
        assert isinstance(prepared, ShardedData)
        if unknown := sorted({*prepared.labels} - {*self.labels}):
            raise DataError(
                f"an added source has the label {unknown[0]!r}, which the run's model lacks: leave it out"
            ).of("labels.unknown")
        self.reference.require_within(prepared.reference)
        return self.open(prepared.reference, self.processor, self.targets, prepared.report)

    def save(self, folder: UPath) -> None:
        """Write the reference, the labels, the report and the processor's own files."""
        folder.mkdir(parents=True, exist_ok=True)
        self.reference.save(folder)
        save_padded_lengths(self.train, folder)
        finish_saving(self, folder)

    @classmethod
    def load(cls, folder: UPath, processor_type: type[Processor], targets_type: type[Outputs]) -> Self:
        processor, targets = processor_type.load(folder), targets_type.load(folder)
        data = cls.open(ShardReference.of(folder), processor, targets, CleaningReport.load(folder))
        load_padded_lengths(data.train, folder)
        return data

    @classmethod
    def load_test(cls, folder: UPath, processor_type: type[Processor], targets_type: type[Outputs]) -> Dataset | None:
        return cls._open_test(ShardReference.of(folder), processor_type.load(folder), targets_type.load(folder))


@dataclass(frozen=True)
class LabelledData(ShardedData):
    """Inputs, each with a class, several classes, a number, or another value that the targets read."""

    train: LabelledDataset
    validation: LabelledDataset
    targets: Targets
    test: LabelledDataset | None = None

    @classmethod
    def open_split(cls, name: str, rows: ShardedRows, processor: Processor, targets: Outputs) -> LabelledDataset:  # noqa: ARG003
        return LabelledDataset(ShardedSplit(rows), processor, cast(Targets, targets))
