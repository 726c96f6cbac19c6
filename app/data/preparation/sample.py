"""The text sample from which a tokenizer is learned. Its size is bounded, however the source is compressed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from upath import UPath

from app.data.examples import Input
from app.storage import stream_atomically

SAMPLE_FILE = "sample.arrow"
SAMPLE_SIZE = 16_000_000
"""Maximum characters of a sample, or bytes of pictures."""
_SLICE = 4096
"""Characters of a document that are sampled as one piece."""
_MIN_DOCUMENTS = 16
"""Whole documents that fit into a sample, at least. Longer ones are cut, since few would be dropped together."""
_STEP = 0.8
"""Factor by which the fraction of a sample that is too large shrinks."""
_SALT = 0xC2B2AE3D27D4EB4F
_FRACTION = b"fraction"

Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class Sample:
    """Some inputs, chosen by the hash of their content."""

    rows: NDArray[np.int64]
    """The row of each input in its unit."""
    inputs: list[Input]
    fractions: NDArray[np.float64]
    """A number from 0 to 1 for each input, by its hash."""
    fraction: float
    """All inputs with a lower number are in the sample; 1: it has all inputs."""

    def save(self, path: UPath) -> None:
        """Write the sample for ``load``."""
        is_text = all(isinstance(item, str) for item in self.inputs)
        inputs = pa.array(self.inputs, pa.string() if is_text else pa.binary())
        table = pa.table({"rows": pa.array(self.rows), "inputs": inputs, "fractions": pa.array(self.fractions)})
        table = table.replace_schema_metadata({_FRACTION: repr(self.fraction)})
        with stream_atomically(path) as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)

    @classmethod
    def load(cls, path: UPath) -> "Sample":
        """Return what ``save`` wrote."""
        table = pa.ipc.open_stream(pa.BufferReader(path.read_bytes())).read_all()
        fraction = float(table.schema.metadata[_FRACTION])
        return cls(table["rows"].to_numpy(), table["inputs"].to_pylist(), table["fractions"].to_numpy(), fraction)


def fraction_for(size: int) -> float:
    """Return the fraction to sample of inputs with this total size."""
    return min(1.0, SAMPLE_SIZE / max(1, size))


class SampleBuilder:
    """Builds a sample in bounded memory. When it grows too large, its fraction of the inputs shrinks."""

    def __init__(self, fraction: float, max_size: int | None = None, cuts: bool = False) -> None:
        """Begin with a fraction.

        ``max_size`` is ``SAMPLE_SIZE`` by default. ``cuts``: the sample has pieces of long documents. A few whole ones
        could exceed its size, or leave it empty.
        """
        self._fraction, self._max_size, self._cuts = fraction, max_size or SAMPLE_SIZE, cuts
        self._items: list[tuple[int, Input, float]] = []
        self._size = 0

    def add(self, first_row: int, inputs: Sequence[Input | None], low: Hashes) -> None:
        """Add the inputs of consecutive rows with half of the hash of each. Those that are None are left out."""
        fractions = fractions_of(low, _SALT).tolist()
        for number, item in enumerate(inputs):
            if item is None:
                continue
            if self._cuts and len(item) > (_SLICE if self._fraction < 1.0 else self._max_size // _MIN_DOCUMENTS):
                keys = low[number] ^ np.arange(-(-len(item) // _SLICE), dtype=np.uint64)
                of_slices = fractions_of(keys, _SALT)
                for place in np.flatnonzero(of_slices < self._fraction).tolist():
                    part = item[place * _SLICE : (place + 1) * _SLICE]
                    self.keep(first_row + number, part, float(of_slices[place]))
            else:
                self.keep(first_row + number, item, fractions[number])

    def keep(self, row: int, item: Input, fraction: float) -> None:
        """Add an input if its number is below the sample's fraction."""
        if fraction >= self._fraction:
            return
        self._items.append((row, item, fraction))
        self._size += len(item)
        while self._size > self._max_size and len(self._items) > 1:
            self.limit(_STEP * self._fraction)

    def limit(self, fraction: float) -> None:
        """Lower the fraction of the sample."""
        if fraction < self._fraction:
            self._fraction = fraction
            self._items = [item for item in self._items if item[2] < fraction]
            self._size = sum(len(item) for _, item, _ in self._items)

    def build(self) -> Sample:
        """Return the sample."""
        rows, fractions = [row for row, *_ in self._items], [fraction for *_, fraction in self._items]
        inputs = [item for _, item, _ in self._items]
        return Sample(np.array(rows, np.int64), inputs, np.array(fractions, np.float64), self._fraction)


def fractions_of(keys: Hashes, salt: int) -> NDArray[np.float64]:
    """Return a number from 0 to 1 for each key (the mix of splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        mixed = keys ^ np.uint64(salt)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed.astype(np.float64) / 2.0**64
