"""An open shard, whose rows are read by their numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from app.errors import StorageError


@dataclass(frozen=True)
class OpenShard:
    """The rows of a shard, memory-mapped.

    Texts and contents of files are read by system calls: the kernel maps up to 2 MB around each one that is read, which
    counts as memory of this process.
    """

    path: Path
    rows: pa.RecordBatch
    _file: pa.OSFile
    _address: int
    """Where the file begins in memory."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Open a file. Raises FileNotFoundError, and ArrowInvalid if it is no shard."""
        with pa.memory_map(str(path)) as mapped:
            content = mapped.read_buffer()
        return cls(path, pa.ipc.open_file(content).get_batch(0), pa.OSFile(str(path)), content.address)

    def take(self, name: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return some rows of a column, of shape (rows,), or (rows, size) if they are lists of one size.

        What is no number is an object of Python. Raises StorageError if the file has become shorter.
        """
        column = self.rows.column(name)
        are_lists = pa.types.is_fixed_size_list(column.type)
        shape = (-1, column.type.list_size) if are_lists else (-1,)
        if pa.types.is_primitive(column.type.value_type if are_lists else column.type):
            # Nothing is copied before rows are chosen.
            cells = (column.values if are_lists else column).to_numpy().reshape(shape)
            taken: NDArray[Any] = cells.take(rows, axis=0)
            return taken
        if column.type in (pa.string(), pa.binary()) and not column.null_count:
            return np.fromiter(self._read(column, rows), object, len(rows))
        chosen = column.take(pa.array(rows))
        if are_lists:
            texts: NDArray[Any] = chosen.values.to_numpy(zero_copy_only=False).reshape(shape)
            return texts
        return np.fromiter(chosen.to_pylist(), object, len(rows))

    def _read(self, column: pa.Array, rows: NDArray[np.int64]) -> Sequence[str | bytes]:
        """Return texts or contents of files."""
        _, offsets, content = column.buffers()
        bounds, first = np.frombuffer(offsets, np.int32), np.int64(content.address - self._address)
        starts, sizes = first + bounds[rows], bounds[rows + 1] - bounds[rows]
        places = zip(sizes.tolist(), starts.tolist(), strict=True)
        # The address means nothing if all are empty.
        cells = [self._file.read_at(size, start) if size else b"" for size, start in places]
        if sum(map(len, cells)) != sizes.sum():
            raise StorageError(f"shard {str(self.path)!r} became shorter while it was read: prepare the data again")
        return [cell.decode() for cell in cells] if column.type == pa.string() else cells
