"""Data of language modelling: documents, split, as arrays of tokens that are cut into blocks."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.config import DataConfig
from app.data.examples import CleaningReport
from app.data.origins import Origins
from app.data.prepared import TRAIN, VALIDATION, Batch, Dataset, finish_saving
from app.data.sources.documents import load_documents
from app.data.tokenizer import LanguageTokenizer
from app.errors import DataError
from app.pretrained import open_pretrained
from app.storage import is_local, stream_atomically

Document = TypeVar("Document")
Tokens = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class TokenBlocks(Dataset):
    """Tokens in blocks of ``block_length``. The target of each token is the next one.

    ``tokens`` has shape (tokens,). Tokens at the end that do not fill a block are left out.
    """

    tokens: Tokens
    block_length: int

    def __len__(self) -> int:
        # The last token is only a target.
        return max(len(self.tokens) - 1, 0) // self.block_length

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Equal lengths, of shape (blocks,): blocks are not padded."""
        return np.full(len(self), self.block_length)

    @property
    def padded_lengths(self) -> NDArray[np.int32]:
        """Tokens of each block, of shape (blocks,)."""
        return np.full(len(self), self.block_length, np.int32)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return ``input_ids`` and targets, each int64 of shape (batch, block_length)."""
        positions = np.asarray(indices, np.int64)[:, None] * self.block_length + np.arange(self.block_length)
        inputs, targets = (self.tokens[positions + shift].astype(np.int64) for shift in (0, 1))
        return Batch({"input_ids": inputs}, targets)


@dataclass(frozen=True)
class LanguageData:
    """Blocks of the training and validation documents, and the tokenizer learned from the training documents."""

    train: TokenBlocks
    validation: TokenBlocks
    tokenizer: LanguageTokenizer
    report: CleaningReport
    origins: Origins | None = None
    """The source of each block, if there are several."""

    @property
    def facts(self) -> Mapping[str, int]:
        """``vocab_size`` and ``max_length``."""
        return self.tokenizer.facts

    @property
    def tokens_per_sample(self) -> int:
        """The length of a block."""
        return self.train.block_length

    @property
    def fingerprint(self) -> str:
        """sha256 over the tokenizer and the tokens of both splits, in order."""
        digest = hashlib.sha256(f"{self.tokenizer.to_json()} {self.train.block_length}".encode())
        for blocks in (self.train, self.validation):
            digest.update(b"%d " % len(blocks.tokens))
            digest.update(blocks.tokens.data)
        return digest.hexdigest()

    @property
    def rows(self) -> Mapping[str, int]:
        """The blocks of each split."""
        return {TRAIN: len(self.train), VALIDATION: len(self.validation)}

    @property
    def summary(self) -> str:
        return (
            f"{self.report}\ntraining on {len(self.train.tokens):,} tokens in {len(self.train):,} blocks, validating "
            f"on {len(self.validation.tokens):,} of documents held out; vocabulary {self.facts['vocab_size']:,}"
        )

    def save(self, folder: UPath) -> None:
        """Write the tokens as .npy, the report as JSON, and the tokenizer's own files."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, blocks in ((TRAIN, self.train), (VALIDATION, self.validation)):
            with stream_atomically(folder / f"{name}.npy") as file:
                np.save(file, blocks.tokens, allow_pickle=False)
        if self.origins:
            self.origins.save(folder)
        finish_saving(self, folder)

    def save_codec(self, folder: UPath) -> None:
        """Write the tokenizer's own files."""
        self.tokenizer.save(folder)

    @classmethod
    def load(cls, folder: UPath) -> Self:
        """Return the data that ``save`` wrote. In a local folder, tokens are read from disk when they are used."""
        tokenizer = LanguageTokenizer.load(folder)
        train, validation = (
            TokenBlocks(_load_tokens(folder / f"{name}.npy"), tokenizer.facts["max_length"])
            for name in (TRAIN, VALIDATION)
        )
        return cls(train, validation, tokenizer, CleaningReport.load(folder), Origins.load(folder))


def prepare(config: DataConfig, pretrained: str | None = None) -> LanguageData:
    """Load, clean, split and tokenise the documents. Equal configurations give equal data.

    ``pretrained`` is the location of a model whose tokenizer is used. None: learn one.

    Raises:
        DataError: the source cannot be read, or has too little text for both splits.
    """
    documents, origins, report = load_documents(config)
    parts = split_documents(list(zip(documents, origins, strict=True)), config)
    train = [document for document, _ in parts[0]]
    tokenizer = (
        LanguageTokenizer.fit(train, config)
        if pretrained is None
        else LanguageTokenizer.from_pretrained(open_pretrained(pretrained), config)
    )
    made = [_blocks_of(part, tokenizer, config) for part in parts]
    blocks = [part for part, _ in made]
    for part, name in zip(blocks, ("training", "validation"), strict=True):
        if not len(part):
            raise DataError(
                f"data.source {config.source!r} has {len(part.tokens)} tokens in its {name} documents, too few for "
                f"one block: give more text, or lower data.block_length, which is {config.block_length}"
            )
    return LanguageData(blocks[0], blocks[1], tokenizer, report, Origins.of(config, *(found for _, found in made)))


def _blocks_of(
    documents: Sequence[tuple[str, int]], tokenizer: LanguageTokenizer, config: DataConfig
) -> tuple[TokenBlocks, list[int]]:
    """Return the blocks of documents with their origins, and the origin of each block. No block has two origins."""
    length = config.block_length
    parts: list[Tokens] = []
    origins: list[int] = []
    # The split may leave a small source without documents.
    last = max((origin for _, origin in documents), default=0)
    for place in range(len(config.each_source())):
        tokens = tokenizer.join([document for document, origin in documents if origin == place])
        count = max(len(tokens) - 1, 0) // length
        origins += [place] * count
        # The last token is only a target. Before another source, that source's first token takes its place.
        parts.append(tokens if place == last else tokens[: count * length])
    joined: Tokens = np.concatenate(parts)
    return TokenBlocks(joined, length), origins


def split_documents(documents: Sequence[Document], config: DataConfig) -> tuple[list[Document], list[Document]]:
    """Return a seeded split by document, so that no part of a validation document is trained on."""
    # A legacy generator: NumPy guarantees that its permutations never change.
    order = np.random.RandomState(config.seed).permutation(len(documents))
    held_out = math.ceil(config.validation_fraction * len(documents))
    if not 0 < held_out < len(documents):
        raise DataError(
            f"data.source {config.source!r} has {len(documents)} documents after cleaning, which cannot be split with "
            f"data.validation_fraction {config.validation_fraction}: give a folder of files, or a table with a "
            "document a row"
        )
    validation, train = ([documents[index] for index in part] for part in (order[:held_out], order[held_out:]))
    return train, validation


def _load_tokens(path: UPath) -> Tokens:
    if is_local(path):
        # A corpus may be larger than memory.
        return np.asarray(np.load(path.path, mmap_mode="r", allow_pickle=False))
    with path.open("rb") as file:
        tokens: Tokens = np.load(file, allow_pickle=False)
    return tokens
