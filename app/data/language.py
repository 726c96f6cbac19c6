"""Data of language modelling: blocks of tokens in shards."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.checksums import sha256_of
from app.data.examples import CleaningReport
from app.data.origins import Origins
from app.data.prepared import TEST, TRAIN, VALIDATION, Batch, Dataset, PreparedData, finish_saving
from app.data.sharded import TOKENS, ShardedRows, ShardNumbers, ShardReference
from app.data.shards import LENGTH
from app.data.tokenizer import LanguageTokenizer
from app.errors import DataError


@dataclass(frozen=True)
class Passage:
    """Tokens that a model reads at once, and what it should predict after each."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    """The next token at each place, or ``IGNORED``."""
    documents: NDArray[np.int64]
    """The document, or the conversation, of each target."""


class TokenBlocks(Dataset):
    """Blocks of tokens in shards. Each row has one token more than a block, which is only a target."""

    def __init__(self, shards: ShardedRows, block_length: int) -> None:
        self._rows, self.block_length = shards, block_length

    @property
    def shards(self) -> ShardedRows:
        """The rows, of any number of shards."""
        return self._rows

    def __len__(self) -> int:
        return len(self.shards)

    @property
    def lengths(self) -> ShardNumbers:
        """Tokens that the model reads of each block, of shape (blocks,)."""
        return ShardNumbers(self.shards, LENGTH)

    @property
    def padded_lengths(self) -> NDArray[np.int32]:
        """Tokens of each block, of shape (blocks,)."""
        return np.full(len(self), self.block_length, np.int32)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return ``input_ids`` and targets, each int64 of shape (batch, block_length)."""
        (blocks,) = self.shards.read_arrays(indices, TOKENS)
        tokens = blocks.astype(np.int64)
        return Batch({"input_ids": tokens[:, :-1]}, tokens[:, 1:])

    def passages(self, indices: Sequence[int], end: int) -> Iterator[Passage]:
        """Yield the blocks of ascending ``indices``. A document goes on to its ``end`` token, over several blocks."""
        document = 0
        for index in indices:
            batch = self.batch([index])
            tokens, targets = batch.inputs["input_ids"][0], batch.targets[0].astype(np.int64)
            ends = np.cumsum(targets == end)
            # An end token is the last target of its document.
            yield Passage(tokens, targets, document + np.concatenate([[0], ends[:-1]]))
            document += int(ends[-1])


@dataclass(frozen=True)
class LanguageData:
    """Blocks of tokens in shards, and the tokenizer that made them."""

    train: TokenBlocks
    validation: TokenBlocks
    tokenizer: LanguageTokenizer
    report: CleaningReport
    reference: ShardReference
    test: TokenBlocks | None = None
    """The test split, used once, on the published version. ``load`` leaves it out: see ``load_test``."""

    @classmethod
    def open_split(cls, rows: ShardedRows, reference: ShardReference, tokenizer: LanguageTokenizer) -> TokenBlocks:  # noqa: ARG003
        """Return the split that has these rows."""
        return TokenBlocks(rows, tokenizer.facts["max_length"])

    @classmethod
    def open(cls, reference: ShardReference, tokenizer: LanguageTokenizer, report: CleaningReport) -> Self:
        """Return the data in these shards, without the test split."""
        train, validation = (
            cls.open_split(reference.open(split), reference, tokenizer) for split in (TRAIN, VALIDATION)
        )
        return cls(train, validation, tokenizer, report, reference)

    def with_test(self) -> Self:
        """Return the data with the test split, if there is one."""
        rows = self.reference.open(TEST)
        return replace(self, test=self.open_split(rows, self.reference, self.tokenizer) if len(rows) else None)

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
        splits = {TRAIN: self.train, VALIDATION: self.validation, TEST: self.test}
        return {name: len(split) for name, split in splits.items() if split}

    @property
    def summary(self) -> str:
        length = self.train.block_length
        return (
            f"{self.report}\ntraining on {len(self.train):,} blocks of {length:,} tokens, validating on "
            f"{len(self.validation):,} of documents held out{self._tested}; vocabulary {self.facts['vocab_size']:,}, "
            f"in shards in {self.reference.location}"
        )

    @property
    def _tested(self) -> str:
        return f", testing the published version on {len(self.test):,}" if self.test else ""

    def with_train(self, rows: ShardedRows) -> Self:
        """Return the data with other training rows, such as those of a stream's next micro-epoch."""
        return replace(self, train=self.open_split(rows, self.reference, self.tokenizer))

    def grown(self, prepared: PreparedData) -> Self:
        """Return the data, extended by the sources that ``prepared`` appends.

        Raises:
            DataError: the tokenizer depends on the sources, or the existing sources have changed.
        """
        assert isinstance(prepared, LanguageData)
        if prepared.tokenizer.to_json() != self.tokenizer.to_json():
            raise DataError("the tokenizer is learned from the sources, so none can be added: start a new run").of(
                "sources.fixed", "data.sources"
            )
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
        """Return the data that ``save`` wrote, without the test split."""
        return cls.open(ShardReference.of(folder), LanguageTokenizer.load(folder), CleaningReport.load(folder))
