"""A hash of the rows of a unit, by which the second pass over a source notices that it changed."""

from hashlib import blake2b

import pyarrow as pa

from app.data.sources.cells import Rows


class RowsDigest:
    """A hash of rows in their order, however they come in batches."""

    def __init__(self) -> None:
        self._columns: dict[str, blake2b] = {}

    def add(self, rows: Rows) -> None:
        """Add rows, with all of their cells."""
        for key, cells in rows.cells.items():
            digest = self._columns.setdefault(key, blake2b(digest_size=16))
            texts = cells if pa.types.is_binary(cells.type) else cells.cast(pa.string())
            for cell in texts.cast(pa.binary()).to_pylist():
                # With its length, a cell cannot run into the next one.
                digest.update((-1 if cell is None else len(cell)).to_bytes(8, signed=True))
                digest.update(cell or b"")

    def digest(self) -> bytes:
        """Return the hash of all rows that were added."""
        return blake2b(b"".join(part.digest() for part in self._columns.values()), digest_size=16).digest()
