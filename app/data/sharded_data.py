"""Prepared data whose splits lie in shards. A run keeps a reference to them, and the files of its codec."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from upath import UPath

from app.checksums import sha256_of, write_checksums
from app.data.examples import CleaningReport
from app.data.labelled import LabelledData, LabelledDataset
from app.data.origins import Origins
from app.data.prepared import TEST, TRAIN, VALIDATION, load_padded_lengths, save_padded_lengths
from app.data.processor import Processor
from app.data.sharded import ShardedBlocks, ShardedRows, ShardedSplit, ShardReference
from app.data.targets import Targets
from app.data.tokenizer import LanguageTokenizer
from app.errors import DataError


@dataclass(frozen=True, kw_only=True)
class ShardedLabelledData(LabelledData):
    """Labelled examples in shards. The processor encodes them when they are read."""

    reference: ShardReference

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

    def save(self, folder: UPath) -> None:
        """Write the reference, the labels, the report and the processor's own files."""
        folder.mkdir(parents=True, exist_ok=True)
        self.reference.save(folder)
        save_padded_lengths(self.train, folder)
        self.save_codec(folder)
        self.report.save(folder)
        write_checksums(folder)


def load_sharded(folder: UPath, processor: Processor, targets: Targets) -> ShardedLabelledData:
    """Return the data that ``save`` wrote, without the test split."""
    reference = _reference_in(folder)
    train = LabelledDataset(ShardedSplit(reference.open(TRAIN)), processor, targets)
    load_padded_lengths(train, folder)
    return ShardedLabelledData(
        train=train,
        validation=LabelledDataset(ShardedSplit(reference.open(VALIDATION)), processor, targets),
        targets=targets,
        processor=processor,
        report=CleaningReport.load(folder),
        origins=reference.origins,
        reference=reference,
    )


def load_sharded_test(folder: UPath, processor: Processor, targets: Targets) -> LabelledDataset | None:
    """Return the test split of the data that ``save`` wrote, or None."""
    rows = _reference_in(folder).open(TEST)
    return LabelledDataset(ShardedSplit(rows), processor, targets) if len(rows) else None


@dataclass(frozen=True)
class ShardedLanguageData:
    """Blocks of tokens in shards, and the tokenizer that made them."""

    train: ShardedBlocks
    validation: ShardedBlocks
    tokenizer: LanguageTokenizer
    report: CleaningReport
    reference: ShardReference

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

    def save(self, folder: UPath) -> None:
        """Write the reference, the report and the tokenizer's own files."""
        folder.mkdir(parents=True, exist_ok=True)
        self.reference.save(folder)
        self.save_codec(folder)
        self.report.save(folder)
        write_checksums(folder)

    def save_codec(self, folder: UPath) -> None:
        """Write the tokenizer's own files."""
        self.tokenizer.save(folder)

    @classmethod
    def load(cls, folder: UPath) -> Self:
        """Return the data that ``save`` wrote."""
        reference, tokenizer = _reference_in(folder), LanguageTokenizer.load(folder)
        train, validation = (
            ShardedBlocks(reference.open(split), tokenizer.facts["max_length"]) for split in (TRAIN, VALIDATION)
        )
        return cls(train, validation, tokenizer, CleaningReport.load(folder), reference)


def _reference_in(folder: UPath) -> ShardReference:
    if (reference := ShardReference.find(folder)) is None:
        raise DataError(f"{str(folder)!r} does not refer to shards: prepare the data again")
    return reference
