"""Data of sentence embeddings: pairs of texts that belong together, in shards."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from app.data.examples import Input
from app.data.labelled import ShardedData
from app.data.prepared import TRAIN, Batch, Dataset
from app.data.processor import Processor
from app.data.sharded import INPUT, ShardedRows, ShardNumbers
from app.data.shards import LENGTH
from app.data.targets import Outputs
from app.data.vectors import Vectors

Pair = tuple[str, str]
"""An anchor, such as a question, and its positive, such as the answer."""


def join_pair(anchor: str, positive: str) -> str:
    """Return a pair as one input: a list in JSON."""
    return json.dumps([anchor.strip(), positive.strip()], ensure_ascii=False)


def split_pair(item: Input) -> Pair:
    """Return the texts of an input."""
    anchor, positive = json.loads(item)
    return anchor, positive


@dataclass(frozen=True)
class PairDataset(Dataset):
    """Pairs to learn from. A batch of n pairs has 2 n rows of inputs: the anchors, then their positives.

    Its targets are int64 of shape (pairs, 2): numbers of the anchor and of the positive, equal for equal texts.
    """

    rows: ShardedRows
    processor: Processor

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shards(self) -> ShardedRows:
        """The shards of the pairs."""
        return self.rows

    @property
    def lengths(self) -> Sequence[int]:
        """Number of characters of the longer text of each pair."""
        return ShardNumbers(self.rows, LENGTH)

    def pairs(self, indices: Sequence[int]) -> list[Pair]:
        """Return the texts of these pairs."""
        return [split_pair(item) for item in self.rows.read_arrays(indices, INPUT)[0]]

    def batch(self, indices: Sequence[int]) -> Batch:
        anchors, positives = zip(*self.pairs(indices), strict=True)
        numbers = np.array([[_number(text) for text in side] for side in (anchors, positives)], np.int64)
        return Batch(self.processor.encode([*anchors, *positives]), numbers.T)


def _number(text: str) -> int:
    """Return a number of 63 bits that no other text is likely to have."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class HeldOutTexts(Dataset):
    """Both texts of each held-out pair, as one row each: an anchor, its positive, the next anchor.

    The targets of a row are its index and the number of rows, int64 of shape (rows, 2). By them vectors of all batches
    and ranks are put together. There are few, so they are in memory.
    """

    rows: ShardedRows
    processor: Processor

    @cached_property
    def pairs(self) -> list[Pair]:
        """All pairs."""
        return [split_pair(item) for item in self.rows.column(INPUT)]

    @cached_property
    def texts(self) -> list[str]:
        """All texts, in the order of the rows."""
        return [text for pair in self.pairs for text in pair]

    def __len__(self) -> int:
        return 2 * len(self.rows)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Number of characters of each text, of shape (rows,)."""
        return np.array([len(text) for text in self.texts], np.int64)

    def batch(self, indices: Sequence[int]) -> Batch:
        inputs = self.processor.encode([self.texts[index] for index in indices])
        return Batch(inputs, np.array([(index, len(self)) for index in indices], np.int64))


@dataclass(frozen=True)
class PairData(ShardedData):
    """Pairs of texts that belong together, and the size of the model's vectors."""

    train: PairDataset
    validation: HeldOutTexts
    targets: Vectors
    test: HeldOutTexts | None = None

    @classmethod
    def open_split(
        cls,
        name: str,
        rows: ShardedRows,
        processor: Processor,
        targets: Outputs,  # noqa: ARG003
    ) -> PairDataset | HeldOutTexts:
        return PairDataset(rows, processor) if name == TRAIN else HeldOutTexts(rows, processor)

    @property
    def rows(self) -> Mapping[str, int]:
        """The pairs of each split."""
        held_out = {name: rows // 2 for name, rows in super().rows.items()}
        return held_out | {TRAIN: len(self.train)}
