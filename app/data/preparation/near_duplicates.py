"""Near duplicates by MinHash (Broder 1997) and bands of it (Leskovec et al., Mining of Massive Datasets, 3.4).

Each text becomes 128 numbers, of which two texts share about as large a part as they share sequences of five words: the
Jaccard index. Texts whose numbers are equal in some band are compared by all of them.
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rensa import RMinHash
from upath import UPath

from app.data.examples import Input
from app.data.preparation.survey import KEPT, code_of
from app.storage import write_atomically

PERMUTATIONS, _SEED = 128, 1
_SHINGLE = 5
_STRICT = 0.85
"""Similarity from which on longer bands find all pairs: fewer are compared in vain."""
_MAX_WORD = 20.0
"""Mean characters of a word, above which a text is cut into characters: its language writes no spaces."""
_MIX = np.array(
    [0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F], np.uint64
)
_WORD = re.compile(r"\w+")
Pairs = NDArray[np.int64]
"""Rows that may be near duplicates, of shape (pairs, 2); the earlier row comes first."""


def rows_per_band(threshold: float) -> int:
    """Return how many of the numbers make a band."""
    return 8 if threshold >= _STRICT else 4


def signatures_of(texts: Sequence[Input | None]) -> NDArray[np.uint32]:
    """Return the MinHash of each text, of shape (texts, 128)."""
    units = [_units_of(text) if isinstance(text, str) else _TOO_SHORT for text in texts]
    ends = np.cumsum([len(unit) for unit in units])
    hashes, has_shingle = _shingle_hashes(np.concatenate([*units, _TOO_SHORT])), np.ones(int(ends[-1]), bool)
    for before in range(1, _SHINGLE):
        # A sequence would run into the next text.
        has_shingle[ends - before] = False
    counts = np.concatenate([[0], ends - (_SHINGLE - 1) * np.arange(1, len(units) + 1)]).astype(np.uint64)
    flat = hashes[: len(has_shingle)][has_shingle]
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(flat, counts, PERMUTATIONS, _SEED)
    return np.array(matrix.to_rows(), np.uint32).reshape(-1, PERMUTATIONS)


_TOO_SHORT = np.zeros(_SHINGLE, np.uint64)


def _units_of(text: str) -> NDArray[np.uint64]:
    """Return a number for each word, or for each character in languages without spaces; five at least."""
    words = _WORD.findall(text.lower())
    if words and len(text) / len(words) <= _MAX_WORD:
        units = np.array([zlib.crc32(word.encode("utf-8", "surrogatepass")) for word in words], np.uint64)
    else:
        units = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    return units if len(units) >= _SHINGLE else np.concatenate([units, _TOO_SHORT])[:_SHINGLE]


def _shingle_hashes(units: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each five consecutive numbers."""
    count = len(units) - _SHINGLE + 1
    hashes = np.zeros(count, np.uint64)
    with np.errstate(over="ignore"):
        for place, factor in enumerate(_MIX):
            hashes += (units[place : place + count] + np.uint64(1)) * factor
            hashes ^= hashes >> np.uint64(29)
    return hashes


@dataclass(frozen=True)
class SignatureFiles:
    """The signatures of the rows of a unit in two files: by row, and by band."""

    folder: UPath
    unit: int

    def save(self, signatures: NDArray[np.uint32], threshold: float) -> None:
        """Write the signatures, and a hash of each band."""
        bands = signatures.reshape(len(signatures), -1, rows_per_band(threshold)).astype(np.uint64)
        keys = np.zeros(bands.shape[:2], np.uint64)
        with np.errstate(over="ignore"):
            for place in range(bands.shape[2]):
                keys = (keys ^ bands[:, :, place]) * _MIX[place % len(_MIX)]
                keys ^= keys >> np.uint64(31)
        write_atomically(self._file("bands"), np.ascontiguousarray(keys.T).tobytes())
        write_atomically(self._file("signatures"), signatures.tobytes())

    def band(self, number: int, rows: int) -> NDArray[np.uint64]:
        """Return the keys of a band, of shape (rows,)."""
        file, size = self._file("bands"), rows * 8
        if not rows:
            return np.empty(0, np.uint64)
        return np.frombuffer(file.fs.cat_file(file.path, start=number * size, end=(number + 1) * size), np.uint64)

    def signatures(self) -> NDArray[np.uint32]:
        """Return the signatures, of shape (rows, 128)."""
        return np.frombuffer(self._file("signatures").read_bytes(), np.uint32).reshape(-1, PERMUTATIONS)

    def _file(self, kind: str) -> UPath:
        return self.folder / f"{kind}-{self.unit:05d}.bin"


@dataclass(frozen=True)
class NearDuplicates:
    """Finds the near duplicates among the rows of all units."""

    files: Sequence[SignatureFiles]
    starts: NDArray[np.int64]
    """Number of the first row of each unit, and of all rows."""
    threshold: float
    max_bytes: int

    def drop(self, codes: NDArray[np.uint8]) -> None:
        """Write the code of rows that are so similar to an earlier one into ``codes``, of all rows."""
        pairs = np.empty((0, 2), np.int64)
        for band in range(PERMUTATIONS // rows_per_band(self.threshold)):
            parts = max(1, -(-len(codes) * 48 // self.max_bytes))
            found = [self._candidates(band, part, parts, codes) for part in range(parts)]
            pairs = np.unique(np.concatenate([pairs, *found]), axis=0)
        step = max(1, self.max_bytes // (4 * 4 * PERMUTATIONS))
        for first in range(0, len(pairs), step):
            some = pairs[first : first + step]
            codes[some[self._are_similar(some), 1]] = code_of("near_duplicate")

    def _candidates(self, band: int, part: int, parts: int, codes: NDArray[np.uint8]) -> Pairs:
        """Pair each row with the first, and with the one before it, that has the same key in a band."""
        keys, rows = [], []
        for files, start, stop in zip(self.files, self.starts[:-1], self.starts[1:], strict=True):
            key = files.band(band, int(stop - start))
            chosen = np.flatnonzero((np.asarray(codes[start:stop]) == KEPT) & (key % np.uint64(parts) == part))
            keys.append(key[chosen])
            rows.append(start + chosen)
        key, row = np.concatenate(keys), np.concatenate(rows)
        order = np.lexsort((row, key))
        key, row = key[order], row[order]
        same = np.flatnonzero(key[1:] == key[:-1]) + 1
        is_first = np.concatenate([[True], key[1:] != key[:-1]])[: len(key)]
        firsts = np.maximum.accumulate(np.where(is_first, np.arange(len(key)), 0))
        return np.concatenate([np.stack([row[same - 1], row[same]], 1), np.stack([row[firsts[same]], row[same]], 1)])

    def _are_similar(self, pairs: Pairs) -> NDArray[np.bool_]:
        """Return whether the signatures of each pair are as similar as the threshold says."""
        needed = np.unique(pairs)
        signatures = np.empty((len(needed), PERMUTATIONS), np.uint32)
        units = np.searchsorted(self.starts, needed, side="right") - 1
        for unit in np.unique(units).tolist():
            mine = units == unit
            signatures[mine] = self.files[unit].signatures()[needed[mine] - self.starts[unit]]
        one, other = (signatures[np.searchsorted(needed, pairs[:, side])] for side in (0, 1))
        similar: NDArray[np.bool_] = (one == other).mean(axis=1) >= self.threshold
        return similar
