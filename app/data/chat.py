"""Data of chats: conversations in shards, packed into blocks in which each attends to itself alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from app.data.language import LanguageData, Passage, TokenBlocks
from app.data.prepared import IGNORED, Batch
from app.data.sharded import TOKENS, ShardedRows, ShardNumbers, ShardReference
from app.data.shards import LENGTH
from app.data.tokenizer import LanguageTokenizer

TARGETS, POSITIONS = "targets", "positions"
"""Columns of the next token at each token, and of its place in its conversation. Only packed blocks have places."""
CONVERSATIONS, LEARNED, CUT = "conversations", "learned", "cut"
"""Columns of the number of conversations in each block, of targets that count, and of conversations that are cut."""


class ChatBlocks(TokenBlocks):
    """Conversations in shards: several in a row if they are packed, else one."""

    def __init__(self, shards: ShardedRows, block_length: int, is_packed: bool) -> None:
        super().__init__(shards, block_length)
        self.is_packed = is_packed

    @property
    def padded_lengths(self) -> NDArray[np.int32]:
        """Tokens of each block with its padding, of shape (blocks,)."""
        return super().padded_lengths if self.is_packed else self.shards.lengths_at(np.arange(len(self)))

    @property
    def num_targets(self) -> ShardNumbers:
        """Targets of each block, of shape (blocks,). They weigh its loss."""
        return ShardNumbers(self.shards, LEARNED)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return ``input_ids`` and targets, each int64 of shape (batch, length), and ``position_ids`` if packed.

        Positions begin anew with each conversation. By them, transformers keeps the attention of conversations apart.
        """
        rows = self.shards.read(indices)
        length = self.block_length if self.is_packed else pc.max(rows[LENGTH]).as_py()
        inputs = {"input_ids": _padded(rows[TOKENS], length, 0)}
        if self.is_packed:
            inputs["position_ids"] = _padded(rows[POSITIONS], length, 0)
        return Batch(inputs, _padded(rows[TARGETS], length, IGNORED))

    def passages(self, indices: Sequence[int], end: int) -> Iterator[Passage]:  # noqa: ARG002
        """Yield each conversation of the blocks of ``indices``."""
        conversation = 0
        for index in indices:
            batch, length = self.batch([index]), self.lengths[index]
            tokens, targets = batch.inputs["input_ids"][0, :length], batch.targets[0, :length].astype(np.int64)
            places = batch.inputs["position_ids"][0, :length] if self.is_packed else np.arange(length)
            starts = np.flatnonzero(places == 0)[1:]
            for part in zip(np.split(tokens, starts), np.split(targets, starts), strict=True):
                yield Passage(*part, np.full(len(part[0]), conversation))
                conversation += 1


def _padded(lists: pa.ChunkedArray, length: int, filler: int) -> NDArray[np.int64]:
    """Return lists as an array of shape (lists, length)."""
    rows = np.full((len(lists), length), filler, np.int64)
    rows[np.arange(length) < pc.list_value_length(lists).to_numpy()[:, None]] = pc.list_flatten(lists).to_numpy()
    return rows


@dataclass(frozen=True)
class ChatData(LanguageData):
    """Blocks of conversations in shards, and the tokenizer of the pretrained model, with its chat template."""

    train: ChatBlocks
    validation: ChatBlocks

    test: ChatBlocks | None = None

    @classmethod
    def open_split(cls, rows: ShardedRows, reference: ShardReference, tokenizer: LanguageTokenizer) -> ChatBlocks:
        return ChatBlocks(rows, tokenizer.facts["max_length"], reference.index.settings["chat"]["packing"])

    @property
    def tokens_per_sample(self) -> int:
        """The mean number of tokens in a block, without padding."""
        return round(self.train.shards.total(LENGTH) / len(self.train))

    @property
    def _tested(self) -> str:
        return f", testing the published version on {self.test.shards.total(CONVERSATIONS):,}" if self.test else ""

    @property
    def summary(self) -> str:
        blocks, train, held_out = len(self.train), self.train.shards, self.validation.shards
        longest = self.train.block_length if self.train.is_packed else self.train.lengths[self.train.longest]
        tokens, filled = train.total(LENGTH), train.total(LENGTH) / (blocks * longest)
        return (
            f"{self.report}\ntraining on {train.total(CONVERSATIONS):,} conversations in {blocks:,} blocks, "
            f"{filled:.0%} full, with {train.total(LEARNED):,} tokens to learn of {tokens:,}; validating on "
            f"{held_out.total(CONVERSATIONS):,}{self._tested}, in shards in {self.reference.location}"
        )
