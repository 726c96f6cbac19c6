"""Near duplicates among the rows of all units, by their signatures, in bounded memory."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from app.data.preparation.signatures import PERMUTATIONS, SignatureFiles, rows_per_band
from app.data.preparation.slices import SLICE_ROWS, join_slices
from app.data.preparation.survey import KEPT, code_of

Pairs = NDArray[np.int64]
"""Rows that may be near duplicates, of shape (pairs, 2); the earlier row comes first."""
_KEY_BYTES = 256
"""Memory that a key takes while equal ones are found: itself, its row, its pairs, and their sorted copies."""
_PAIR_BYTES = 64
"""Memory that a pair takes while equal ones are removed."""
_COMPARED_BYTES = 2 * 3 * 4 * PERMUTATIONS
"""Memory that a pair takes while its signatures are compared."""


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
        bands = PERMUTATIONS // rows_per_band(self.threshold)
        with tempfile.TemporaryDirectory(prefix="rayloom-pairs-") as folder:
            # A row has two pairs in each band, at most.
            spool = _PairSpool(Path(folder), max(1, self.max_bytes // (2 * bands * _PAIR_BYTES)))
            parts = -(-len(codes) * _KEY_BYTES // self.max_bytes)
            for band in range(bands):
                for part in range(parts):
                    for pairs in self._candidates(band, part, parts, codes):
                        spool.add(pairs)
            step = max(1, self.max_bytes // _COMPARED_BYTES)
            for pairs in spool.read():
                for first in range(0, len(pairs), step):
                    some = pairs[first : first + step]
                    codes[some[self._are_similar(some), 1]] = code_of("near_duplicate")

    def _candidates(self, band: int, part: int, parts: int, codes: NDArray[np.uint8]) -> Iterator[Pairs]:
        """Pair each row with the first, and with the one before it, that has the same key in a band."""
        seen_keys, seen_rows = np.empty(0, np.uint64), np.empty(0, np.int64)
        slices = self._keys(band, part, parts, codes)
        for keys, rows in join_slices(slices, max(1, self.max_bytes // _KEY_BYTES)):
            is_new = np.concatenate([np.zeros(len(seen_keys), bool), np.ones(len(keys), bool)])
            key, row = np.concatenate([seen_keys, keys]), np.concatenate([seen_rows, rows])
            order = np.lexsort((row, key))
            key, row, is_new = key[order], row[order], is_new[order]
            is_first = np.concatenate([[True], key[1:] != key[:-1]])[: len(key)]
            firsts = np.maximum.accumulate(np.where(is_first, np.arange(len(key)), 0))
            same = np.flatnonzero(is_new & ~is_first)
            for earlier in (row[same - 1], row[firsts[same]]):
                yield np.stack([earlier, row[same]], 1)
            # Only the first and the last row of each key can form a pair with a later row.
            is_last = np.concatenate([key[1:] != key[:-1], [True]])[: len(key)]
            seen_keys, seen_rows = key[is_first | is_last], row[is_first | is_last]

    def _keys(
        self, band: int, part: int, parts: int, codes: NDArray[np.uint8]
    ) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.int64]]]:
        """Yield the keys and numbers of the rows kept so far whose key is in this part."""
        for files, start, stop in zip(self.files, self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            for first in range(start, stop, SLICE_ROWS):
                rows = min(SLICE_ROWS, stop - first)
                key = files.band(band, first - start, rows)
                is_kept = np.asarray(codes[first : first + rows]) == KEPT
                chosen = np.flatnonzero(is_kept & (key % np.uint64(parts) == part))
                yield key[chosen], first + chosen

    def _are_similar(self, pairs: Pairs) -> NDArray[np.bool_]:
        """Return whether the signatures of each pair are as similar as the threshold says."""
        needed = np.unique(pairs)
        signatures = np.empty((len(needed), PERMUTATIONS), np.uint32)
        units = np.searchsorted(self.starts, needed, side="right") - 1
        for unit in np.unique(units).tolist():
            mine = units == unit
            signatures[mine] = self.files[unit].signatures(needed[mine] - self.starts[unit])
        one, other = (signatures[np.searchsorted(needed, pairs[:, side])] for side in (0, 1))
        similar: NDArray[np.bool_] = (one == other).mean(axis=1) >= self.threshold
        return similar


@dataclass(frozen=True)
class _PairSpool:
    """Pairs on this machine's disk, in files by their later row, so that equal ones are in one file."""

    folder: Path
    rows_per_file: int

    def add(self, pairs: Pairs) -> None:
        """Append pairs."""
        numbers = pairs[:, 1] // self.rows_per_file
        for number in np.unique(numbers).tolist():
            with (self.folder / f"{number:08d}").open("ab") as file:
                file.write(pairs[numbers == number].tobytes())

    def read(self) -> Iterator[Pairs]:
        """Yield the distinct pairs of each file, sorted."""
        for path in sorted(self.folder.iterdir()):
            yield np.unique(np.fromfile(path, np.int64).reshape(-1, 2), axis=0)
