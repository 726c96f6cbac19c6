"""Prepared data whose splits lie in shards. A run keeps a reference to them, and the files of its codec."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self, cast

from upath import UPath

from app.checksums import sha256_of
from app.data.examples import CleaningReport
from app.data.labelled import LabelledData, LabelledDataset
from app.data.origins import Origins
from app.data.prepared import TEST, TRAIN, VALIDATION, finish_saving, load_padded_lengths, save_padded_lengths
from app.data.processor import Processor
from app.data.sharded import ShardedBlocks, ShardedRows, ShardedSplit, ShardReference
from app.data.targets import Outputs, Targets
from app.data.tokenizer import LanguageTokenizer
from app.errors import DataError


@dataclass(frozen=True, kw_only=True)
class ShardedLabelledData(LabelledData):
    """Labelled examples in shards. The processor encodes them when they are read."""

    reference: ShardReference

    @classmethod
    def open(cls, reference: ShardReference, processor: Processor, targets: Targets, report: CleaningReport) -> Self:
        """Return the data in these shards, without the test split."""
        train, validation = (
            LabelledDataset(ShardedSplit(reference.open(split)), processor, targets) for split in (TRAIN, VALIDATION)
        )
        origins = reference.origins
        return cls(train, validation, targets, processor, report, origins=origins, reference=reference)

    @property
    def fingerprint(self) -> str:
        """sha256 over the labels and the checksums of all shards."""
        return sha256_of(f"{self.labels} {self.reference.sha256}".encode())

    @property
    def summary(self) -> str:
        return f"{super().summary}, in shards in {self.reference.location}"

    def with_train(self, rows: ShardedRows) -> Self:
        """Return the data with other training rows, such as those of a stream's next micro-epoch."""
        return replace(self, train=LabelledDataset(ShardedSplit(rows), self.processor, self.targets))

    def grown(self, prepared: Self) -> Self:
        """Return the data, extended by the sources that ``prepared`` appends. Labels and processor stay.

        Raises:
            DataError: an added source has other labels, or the existing sources have changed.
        """
        if unknown := sorted({*prepared.labels} - {*self.labels}):
            raise DataError(f"an added source has the label {unknown[0]!r}, which the run's model lacks: leave it out")
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
        processor, targets = processor_type.load(folder), cast(Targets, targets_type.load(folder))
        data = cls.open(_reference_in(folder), processor, targets, CleaningReport.load(folder))
        load_padded_lengths(data.train, folder)
        return data

    @classmethod
    def load_test(
        cls, folder: UPath, processor_type: type[Processor], targets_type: type[Outputs]
    ) -> LabelledDataset | None:
        processor, targets = processor_type.load(folder), cast(Targets, targets_type.load(folder))
        return test_split(_reference_in(folder), processor, targets)


def test_split(reference: ShardReference, processor: Processor, targets: Targets) -> LabelledDataset | None:
    """Return the test split of shards, or None if there is none."""
    rows = reference.open(TEST)
    return LabelledDataset(ShardedSplit(rows), processor, targets) if len(rows) else None


@dataclass(frozen=True)
class ShardedLanguageData:
    """Blocks of tokens in shards, and the tokenizer that made them."""

    train: ShardedBlocks
    validation: ShardedBlocks
    tokenizer: LanguageTokenizer
    report: CleaningReport
    reference: ShardReference

    @classmethod
    def open(cls, reference: ShardReference, tokenizer: LanguageTokenizer, report: CleaningReport) -> Self:
        """Return the data in these shards."""
        train, validation = (
            ShardedBlocks(reference.open(split), tokenizer.facts["max_length"]) for split in (TRAIN, VALIDATION)
        )
        return cls(train, validation, tokenizer, report, reference)

    @property
    def facts(self) -> Mapping[str, int]:
        """``vocab_size`` and ``max_length``."""
        return self.tokenizer.facts

    @property
    def origins(self) -> Origins | None:
        """The source of each block, if there are several."""
        return self.reference.origins

    @property
    def tokens_per_sample(self) -> int:
        """The length of a block."""
        return self.train.block_length

    @property
    def fingerprint(self) -> str:
        """sha256 over the tokenizer and the checksums of all shards."""
        return sha256_of(f"{self.tokenizer.to_json()} {self.reference.sha256}".encode())

    @property
    def rows(self) -> Mapping[str, int]:
        """The blocks of each split."""
        return {TRAIN: len(self.train), VALIDATION: len(self.validation)}

    @property
    def summary(self) -> str:
        length = self.train.block_length
        return (
            f"{self.report}\ntraining on {len(self.train):,} blocks of {length:,} tokens, validating on "
            f"{len(self.validation):,} of documents held out; vocabulary {self.facts['vocab_size']:,}, in shards in "
            f"{self.reference.location}"
        )

    def with_train(self, rows: ShardedRows) -> Self:
        """Return the data with other training rows, such as those of a stream's next micro-epoch."""
        return replace(self, train=ShardedBlocks(rows, self.train.block_length))

    def grown(self, prepared: Self) -> Self:
        """Return the data, extended by the sources that ``prepared`` appends.

        Raises:
            DataError: the tokenizer depends on the sources, or the existing sources have changed.
        """
        if prepared.tokenizer.to_json() != self.tokenizer.to_json():
            raise DataError("the tokenizer is learned from the sources, so none can be added: start a new run")
        self.reference.require_within(prepared.reference)
        return self.open(prepared.reference, self.tokenizer, prepared.report)

    def save(self, folder: UPath) -> None:
        """Write the reference, the report and the tokenizer's own files."""
        folder.mkdir(parents=True, exist_ok=True)
        self.reference.save(folder)
        finish_saving(self, folder)

    def save_codec(self, folder: UPath) -> None:
        """Write the tokenizer's own files."""
        self.tokenizer.save(folder)

    @classmethod
    def load(cls, folder: UPath) -> Self:
        """Return the data that ``save`` wrote."""
        return cls.open(_reference_in(folder), LanguageTokenizer.load(folder), CleaningReport.load(folder))


def _reference_in(folder: UPath) -> ShardReference:
    if (reference := ShardReference.find(folder)) is None:
        raise DataError(f"{str(folder)!r} does not refer to shards: prepare the data again")
    return reference
