"""The blocks of a micro-epoch for language modelling: messages as documents, tokenised and cut."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.config import DataConfig
from app.data.preparation.samples import Documents
from app.data.preparation.survey import IN_TRAIN, KEPT
from app.data.preparation.writers import BlockWriter
from app.data.shards import Shard
from app.data.streaming.messages import Message
from app.data.streaming.rows import ChosenRows, StreamRows, sample_of
from app.data.tokenizer import LanguageTokenizer


@dataclass(frozen=True)
class Blocks:
    """Tokens of documents, cut into blocks. The last token is only a target."""

    tokens: NDArray[np.unsignedinteger[Any]]
    tokenizer: LanguageTokenizer

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.tokenizer.facts["max_length"]

    def write(self, folder: UPath, prefix: str, size: int) -> list[Shard]:
        """Write them as shards: see ``Samples``."""
        writer = BlockWriter(folder, prefix, size, self.tokenizer)
        writer.add_tokens(self.tokens)
        return writer.close()


class DocumentRows(StreamRows):
    """Collects documents. Without a tokenizer, it learns one from the training documents when there are enough."""

    kind = Documents()

    def __init__(
        self,
        config: DataConfig,
        tokenizer: LanguageTokenizer | None,
        in_validation: Collection[bytes],
        start: Mapping[int, int],
        is_first: bool,
    ) -> None:
        super().__init__(config, in_validation, start, is_first)
        self._tokenizer = tokenizer
        self._sizes: list[int] = []
        """Tokens of each row with its end token, or an upper bound until there is a tokenizer; 0 for a dropped row."""
        self._total = 0
        self._tokens: list[NDArray[np.unsignedinteger[Any]]] = []

    def add(self, messages: Sequence[Message]) -> None:
        """Add messages: see ``StreamRows``."""
        super().add(messages)
        self._measure()

    def missing(self, samples: int) -> int:
        needed = samples * self._config.block_length / (1.0 - self._config.held_out_fraction) + 1
        mean = self._total / self.candidates if self.candidates else needed
        return math.ceil((needed - self._total) / mean)

    def choose(self, samples: int, batch_size: int, takes_fewer: bool) -> ChosenRows | None:
        length, wanted = self._config.block_length, samples // batch_size * batch_size
        enough = batch_size if takes_fewer else wanted
        codes, splits = self._decide()
        train = np.flatnonzero((codes == KEPT) & (splits == IN_TRAIN))
        # Without a tokenizer this is an upper bound: a tokenizer is learned when it may be enough.
        if sum(self._sizes[row] for row in train.tolist()) <= enough * length:
            return None
        tokenizer = self._tokenizer or self._learn(train, samples * length)
        ends = np.cumsum([self._sizes[row] for row in train.tolist()])
        count = min((int(ends[-1]) - 1) // length // batch_size * batch_size, wanted)
        if count < enough:
            return None
        # The last block ends in this document. Documents after it belong to the next micro-epoch.
        used = count * length + 1
        last = int(np.searchsorted(ends, used))
        end = int(train[last]) + 1
        held_out = self._held_out(codes, splits, end, np.array(self._sizes), length + 1)
        validation = Blocks(self._joined(held_out), tokenizer)
        if self.needs_validation and not len(validation):
            return None
        return ChosenRows(
            start=self._start,
            stop=self._stop_after(end),
            train=Blocks(self._joined(train[: last + 1])[:used], tokenizer),
            validation=validation,
            report=self._report(codes[:end]),
            unused_tokens=int(ends[last]) - used,
        )

    def _learn(self, rows: NDArray[np.int64], num_bytes: int) -> LanguageTokenizer:
        """Learn the tokenizer from a sample of the first ``num_bytes`` of the training documents."""
        # The choice of documents does not depend on how many messages arrive at a time.
        last = int(np.searchsorted(np.cumsum([self._sizes[row] for row in rows.tolist()]), num_bytes))
        texts = [self._rows[row].text for row in rows[: last + 1].tolist()]
        self._tokenizer = LanguageTokenizer.fit(sample_of(texts), self._config)
        self._sizes, self._total = [], 0
        self._measure()
        return self._tokenizer

    def _measure(self) -> None:
        """Measure rows that have not been measured yet, and keep their tokens."""
        for row in self._rows[len(self._sizes) :]:
            if self._tokenizer is None:
                size = len(row.text.encode()) + 1 if row.code == KEPT else 0
            else:
                self._tokens.append(self._tokenizer.join([row.text] if row.code == KEPT else []))
                size = len(self._tokens[-1])
            self._sizes.append(size)
            self._total += size

    def _joined(self, rows: NDArray[np.int64]) -> NDArray[np.unsignedinteger[Any]]:
        assert self._tokenizer is not None
        return np.concatenate([self._tokenizer.join([]), *(self._tokens[row] for row in rows.tolist())])
