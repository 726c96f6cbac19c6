"""MinHash of texts (Broder 1997), in files: by row, and by band (Leskovec et al., Mining of Massive Datasets, 3.4).

Each text becomes 128 numbers. The share of equal numbers of two texts estimates the Jaccard index of their sequences of
five words. Texts with an equal band are compared by all numbers.
"""

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from rensa import RMinHash
from upath import UPath

from app.data.examples import Input
from app.data.preparation.slices import SLICE_ROWS, Slices
from app.storage import stream_atomically

PERMUTATIONS, _SEED = 128, 1
_ROW_BYTES = 4 * PERMUTATIONS
_SHINGLE = 5
_STRICT = 0.85
"""Similarity from which longer bands still find all pairs, and compare fewer in vain."""
_MAX_WORD = 20.0
"""Mean word length above which a text is cut into characters, because its language writes no spaces."""
_MIX = np.array(
    [0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F], np.uint64
)
_WORD = re.compile(r"\w+")
_TOO_SHORT = np.zeros(_SHINGLE, np.uint32)
_PIECE_UNITS = 2**17
"""Words or characters of a text that are hashed together."""
_Piece = tuple[int, NDArray[np.uint32]]
"""Part of a text: the place of the text, and a number for each word or character."""


def rows_per_band(threshold: float) -> int:
    """Return how many of the numbers make a band."""
    return 8 if threshold >= _STRICT else 4


def signatures_of(texts: Sequence[Input | None]) -> NDArray[np.uint32]:
    """Return the MinHash of each text, of shape (texts, 128).

    A long text is hashed in pieces, since the minimum over all pieces is that of the text.
    """
    found = np.full((len(texts), PERMUTATIONS), np.iinfo(np.uint32).max, np.uint32)
    for pieces in _grouped(_pieces_of(texts)):
        rows = np.array([row for row, _ in pieces])
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        digests = _digests_of([units for _, units in pieces])
        found[rows[starts]] = np.minimum(found[rows[starts]], np.minimum.reduceat(digests, starts))
    return found


def _pieces_of(texts: Sequence[Input | None]) -> Iterator[_Piece]:
    """Yield the units of each text in pieces. They overlap, so that each sequence of five is whole in one."""
    for row, text in enumerate(texts):
        units = _units_of(text) if isinstance(text, str) else _TOO_SHORT
        for start in range(0, len(units) - _SHINGLE + 1, _PIECE_UNITS):
            yield row, units[start : start + _PIECE_UNITS + _SHINGLE - 1]


def _grouped(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Yield groups of pieces to hash together. Groups are small, because each unit takes about 50 bytes."""
    group: list[_Piece] = []
    size = 0
    for row, units in pieces:
        group.append((row, units))
        size += len(units)
        if size >= _PIECE_UNITS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _digests_of(pieces: Sequence[NDArray[np.uint32]]) -> NDArray[np.uint32]:
    """Return the MinHash of each piece, of shape (pieces, 128)."""
    ends = np.cumsum([len(piece) for piece in pieces])
    hashes, has_shingle = _shingle_hashes(np.concatenate([*pieces, _TOO_SHORT])), np.ones(int(ends[-1]), bool)
    for before in range(1, _SHINGLE):
        # A sequence would run into the next piece.
        has_shingle[ends - before] = False
    counts = np.concatenate([[0], ends - (_SHINGLE - 1) * np.arange(1, len(pieces) + 1)]).astype(np.uint64)
    flat = hashes[: len(has_shingle)][has_shingle]
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(flat, counts, PERMUTATIONS, _SEED)
    return np.array(matrix.to_rows(), np.uint32).reshape(-1, PERMUTATIONS)


def _units_of(text: str) -> NDArray[np.uint32]:
    """Return a number for each word, or for each character in languages without spaces; at least five."""
    # A list of the words of a long text would take ten times its memory.
    words = (
        _WORD.findall(text.lower()) if len(text) < _PIECE_UNITS else map(re.Match.group, _WORD.finditer(text.lower()))
    )
    units = np.fromiter((zlib.crc32(word.encode("utf-8", "surrogatepass")) for word in words), np.uint32)
    if not len(units) or len(text) / len(units) > _MAX_WORD:
        units = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    return units if len(units) >= _SHINGLE else np.concatenate([units, _TOO_SHORT])[:_SHINGLE]


def _shingle_hashes(given: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Return a hash of each five consecutive numbers."""
    units = given.astype(np.uint64)
    count = len(units) - _SHINGLE + 1
    hashes = np.zeros(count, np.uint64)
    with np.errstate(over="ignore"):
        for place, factor in enumerate(_MIX):
            hashes += (units[place : place + count] + np.uint64(1)) * factor
            hashes ^= hashes >> np.uint64(29)
    return hashes


class SignatureWriter:
    """Writes the signatures of a unit, of which it holds a slice in memory."""

    def __init__(self, signatures: BinaryIO, bands: BinaryIO, threshold: float) -> None:
        self._signatures, self._bands = signatures, bands
        self._rows_per_band, self._slices = rows_per_band(threshold), Slices()

    def add(self, texts: Sequence[Input | None]) -> None:
        """Add texts. ``None`` is similar to no other."""
        signatures = signatures_of(texts)
        self._signatures.write(signatures.tobytes())
        for (keys,) in self._slices.add(self._keys_of(signatures)):
            self._write(keys)

    def close(self) -> None:
        """Write what is left."""
        for (keys,) in self._slices.rest():
            self._write(keys)

    def _keys_of(self, signatures: NDArray[np.uint32]) -> NDArray[np.uint64]:
        """Return a hash of each band, of shape (rows, bands)."""
        bands = signatures.reshape(len(signatures), -1, self._rows_per_band).astype(np.uint64)
        keys = np.zeros(bands.shape[:2], np.uint64)
        with np.errstate(over="ignore"):
            for place in range(bands.shape[2]):
                keys = (keys ^ bands[:, :, place]) * _MIX[place % len(_MIX)]
                keys ^= keys >> np.uint64(31)
        return keys

    def _write(self, keys: NDArray[np.uint64]) -> None:
        self._bands.write(np.ascontiguousarray(keys.T).tobytes())


@dataclass(frozen=True)
class SignatureFiles:
    """The signatures of the rows of a unit in two files: by row, and in slices of rows by band."""

    folder: UPath
    unit: int
    threshold: float

    @contextmanager
    def writer(self) -> Iterator[SignatureWriter]:
        """Yield the writer of the files. They exist once the block has ended."""
        with (
            stream_atomically(self._file("signatures")) as signatures,
            stream_atomically(self._file("bands")) as bands,
        ):
            writer = SignatureWriter(signatures, bands, self.threshold)
            yield writer
            writer.close()

    def band(self, number: int, first: int, rows: int) -> NDArray[np.uint64]:
        """Return the keys of a band of the slice of ``rows`` that begins with row ``first``, of shape (rows,)."""
        bands = PERMUTATIONS // rows_per_band(self.threshold)
        return np.frombuffer(self._read("bands", 8 * (first * bands + number * rows), 8 * rows), np.uint64)

    def signatures(self, rows: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the signatures of rows in ascending order, of shape (rows, 128). A slice is read at a time."""
        found = np.empty((len(rows), PERMUTATIONS), np.uint32)
        slices = rows // SLICE_ROWS
        for number in np.unique(slices).tolist():
            mine = slices == number
            first, last = int(rows[mine][0]), int(rows[mine][-1])
            content = self._read("signatures", first * _ROW_BYTES, (last + 1 - first) * _ROW_BYTES)
            found[mine] = np.frombuffer(content, np.uint32).reshape(-1, PERMUTATIONS)[rows[mine] - first]
        return found

    def _read(self, kind: str, start: int, size: int) -> bytes:
        file = self._file(kind)
        content: bytes = file.fs.cat_file(file.path, start=start, end=start + size)
        return content

    def _file(self, kind: str) -> UPath:
        return self.folder / f"{kind}-{self.unit:05d}.bin"
