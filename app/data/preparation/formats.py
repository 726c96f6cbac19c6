"""The rows of a unit, read in batches of bounded size from every format."""

import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from app.conditional import map_concurrently
from app.data.builtin import BUILTIN, BUILTIN_DOCUMENTS
from app.data.examples import Input
from app.data.preparation.json_lines import read_jsonl
from app.data.preparation.lines import CSV_BLOCK_BYTES, go_to_line
from app.data.preparation.rows import BATCH_BYTES, BATCH_ROWS, CellType, Columns, Rows, cell_text, decode, rows_of_cells
from app.data.preparation.tars import read_tar
from app.data.preparation.units import Piece, Unit
from app.data.sources import Source, find_builtin
from app.errors import DataError
from app.storage import is_local, to_path

_FIRST_ROWS = 64
"""Rows of a row group that are read first, to measure their size."""
_CSV_BLOCK_BYTES = 2 * 2**20
"""Bytes of csv that are read at a time, unless a row is longer."""
_BUFFER_BYTES = 2**20
"""Bytes of a Parquet column that are read at a time. By default Arrow reads all of a row group."""
_FILES, _FILES_BYTES = 64, 16 * 2**20
"""Whole files that are read together, at most; one at least."""


def read_unit(unit: Unit, columns: Columns) -> Iterator[Rows]:
    """Yield the rows of a unit, always in the same order.

    Raises:
        DataError: a file cannot be read, or lacks a column. The message names the file and the row.
    """
    for is_whole, pieces in groupby(unit.pieces, _is_read_whole):
        if is_whole:
            yield from _read_whole(list(pieces))
            continue
        for piece in pieces:
            with _named_in_errors(piece):
                yield from _READERS[piece.kind](piece, columns)


@contextmanager
def _named_in_errors(piece: Piece) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{piece.path!r} is gone: the source changed; prepare it again") from error
    except PermissionError as error:
        raise DataError(f"{piece.path!r} may not be read ({error}): check its rights and the credentials") from error
    except (pa.ArrowException, tarfile.TarError) as error:
        raise DataError(f"{piece.path!r} cannot be read as {piece.kind} ({error}): write it again") from error
    except OSError as error:
        raise DataError(
            f"{piece.path!r} cannot be read ({error}): write it again if it is torn; else prepare the data again"
        ) from error


def _is_read_whole(piece: Piece) -> bool:
    return piece.kind == "image" or (piece.kind == "text" and piece.stop is None)


def _read_whole(pieces: Sequence[Piece]) -> Iterator[Rows]:
    """Yield small files, several at a time. From an object store they are read concurrently."""

    def content_of(piece: Piece) -> bytes:
        with _named_in_errors(piece):
            content: bytes = to_path(piece.path).read_bytes()
            return content

    for some in _grouped(pieces):
        contents = map_concurrently(to_path(some[0].path), content_of, some)
        labels = [to_path(piece.path).parent.name for piece in some] if some[0].kind == "image" else None
        yield Rows(contents, labels, files=[piece.path for piece in some])


def _grouped(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    some: list[Piece] = []
    for piece in pieces:
        if some and (len(some) == _FILES or sum(other.bytes for other in some) + piece.bytes > _FILES_BYTES):
            yield some
            some = []
        some.append(piece)
    yield some


def _read_parquet(piece: Piece, columns: Columns) -> Iterator[Rows]:
    with (
        to_path(piece.path).open("rb") as file,
        pq.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False) as table,
    ):
        columns.require_in(piece.path, table.schema_arrow.names)
        groups = [table.metadata.row_group(group) for group in range(table.num_row_groups)]
        stop = len(groups) if piece.stop is None else piece.stop
        row = 1 + sum(group.num_rows for group in groups[: piece.start])
        for number in range(piece.start, stop):
            for batch in _row_group_batches(table, number, list(columns.names.values())):
                yield from _batch_rows(batch, columns, piece.path, row)
                row += batch.num_rows


def _row_group_batches(table: pq.ParquetFile, group: int, names: list[str]) -> Iterator[pa.RecordBatch]:
    """Yield a row group in batches of about 4 MiB.

    The metadata give the encoded size, in which a repeated text is stored once. So the first batch is small. If rows
    turn out larger, reading starts again with batches of another size.
    """
    metadata, done = table.metadata.row_group(group), 0
    rows = metadata.num_rows
    count, is_measured = max(1, min(_FIRST_ROWS, BATCH_BYTES * rows // max(1, metadata.total_byte_size))), False
    while done < rows:
        row = 0
        for batch in table.iter_batches(count, [group], names, use_threads=False):
            row += batch.num_rows
            if row <= done:
                continue
            new = batch.slice(batch.num_rows - (row - done))
            done = row
            yield new
            fitting = _rows_that_fit(new)
            if 2 * fitting < count or not is_measured:
                count, is_measured = fitting, True
                break


def _rows_that_fit(batch: pa.RecordBatch) -> int:
    """Return how many rows like these to read at a time; at least one."""
    size, rows = sum(_decoded_bytes(column) for column in batch.columns), int(batch.num_rows)
    return max(1, min(BATCH_ROWS, BATCH_BYTES * rows // max(1, size)))


def _decoded_bytes(column: pa.Array) -> int:
    """Return the approximate decoded bytes of a column. A dictionary stores each text once."""
    stored = column.dictionary if pa.types.is_dictionary(column.type) else column
    size: int = stored.nbytes * len(column) // max(1, len(stored))
    return size


def _read_arrow(piece: Piece, columns: Columns) -> Iterator[Rows]:
    path = to_path(piece.path)
    # A memory-mapped batch takes no memory of its own.
    file = pa.memory_map(path.path) if is_local(path) else path.open("rb")
    with file, pa.ipc.open_file(file) as table:
        columns.require_in(piece.path, table.schema.names)
        stop = table.num_record_batches if piece.stop is None else piece.stop
        row = 1
        for number in range(piece.start, stop):
            batch = table.get_batch(number).select(list(dict.fromkeys(columns.names.values())))
            # The number of rows before it is not known, unless all of them are read.
            where = f" of record batch {number + 1}" if piece.start else ""
            yield from _batch_rows(batch, columns, piece.path, row, where)
            row += batch.num_rows


def _batch_rows(batch: pa.RecordBatch, columns: Columns, path: str, row: int, where: str = "") -> Iterator[Rows]:
    """Yield the rows of a batch, a few at a time: as Python objects they take more memory."""
    count = _rows_that_fit(batch)
    for start in range(0, batch.num_rows, count):
        yield _rows_of(batch.slice(start, count), columns, path, row + start, where)


def _read_csv(piece: Piece, columns: Columns) -> Iterator[Rows]:
    """Yield the rows of a csv file, in small blocks at first: a reader needs twenty times the memory of a block."""
    done = 0
    where = f" after byte {piece.start:,}" if piece.start else ""
    for block_bytes in (_CSV_BLOCK_BYTES, CSV_BLOCK_BYTES) if piece.bytes else ():
        row = 0
        try:
            for batch in _csv_batches(piece, columns, block_bytes):
                new = batch.slice(max(0, done - row))
                row += batch.num_rows
                done = max(done, row)
                yield from _batch_rows(new, columns, piece.path, done - new.num_rows + 1, where)
            return
        except pa.ArrowInvalid as error:
            if "straddling" not in str(error) or block_bytes == CSV_BLOCK_BYTES:
                raise


def _csv_batches(piece: Piece, columns: Columns, block_bytes: int) -> Iterator[pa.RecordBatch]:
    """Yield record batches. Raises pyarrow.ArrowInvalid if a row does not fit into a block."""
    parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
    read = pyarrow.csv.ReadOptions(block_size=block_bytes, use_threads=False)
    with to_path(piece.path).open("rb") as file, pyarrow.csv.open_csv(file, read, parse) as table:
        columns.require_in(piece.path, table.schema.names)
        header: list[str] = table.schema.names
    names = list(columns.names.values())
    # Cells are read as bytes: Arrow would change one such as 007, and end at one that is not UTF-8.
    convert = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.binary()), include_columns=names)
    if piece.start:
        read.column_names = header
    with to_path(piece.path).open("rb") as file, pa.PythonFile(file, "r") as opened:
        length = (piece.bytes if piece.stop is None else piece.stop) - piece.start
        with pyarrow.csv.open_csv(opened.get_stream(piece.start, length), read, parse, convert) as table:
            yield from table


def _rows_of(batch: pa.RecordBatch, columns: Columns, path: str, first_row: int, where: str = "") -> Rows:
    """Return rows of a table. ``where`` is what ``first_row`` is counted from."""
    cells: dict[str, list[Input]] = {}
    types: dict[str, dict[CellType, str]] = {}
    for name in dict.fromkeys(columns.names.values()):
        column = batch.column(batch.schema.get_field_index(name))
        cell_type = _type_of(column.type)
        if cell_type is None:
            raise DataError(
                f"{path!r} has {column.type} in {name!r}: expected texts or numbers; name another column in "
                "data.columns, or write its values as texts"
            )
        cells[name] = _texts(column) if cell_type == "text" else [cell_text(value) for value in column.to_pylist()]
        if pa.types.is_binary(column.type) or column.null_count == len(column):
            continue
        types[name] = {cell_type: f"{path!r} (row {first_row:,}{where})"}
    return rows_of_cells(cells, columns, types, lambda row: f"{path!r}, row {first_row + row:,}{where}")


def _type_of(given: pa.DataType) -> CellType | None:
    """Return the type of the cells of a column; None for lists and the like."""
    if pa.types.is_dictionary(given):
        return _type_of(given.value_type)
    if pa.types.is_integer(given):
        return "integer"
    if pa.types.is_floating(given) or pa.types.is_decimal(given):
        return "number"
    if pa.types.is_boolean(given):
        return "boolean"
    if pa.types.is_temporal(given):
        return "time"
    is_text = pa.types.is_string(given) or pa.types.is_large_string(given) or pa.types.is_string_view(given)
    is_bytes = pa.types.is_binary(given) or pa.types.is_large_binary(given)
    return "text" if is_text or is_bytes or pa.types.is_null(given) else None


def _texts(column: pa.Array) -> list[Input]:
    """Return the cells of a column of texts. One that is not UTF-8 stays bytes."""
    try:
        if not pa.types.is_string(column.type):
            column = column.cast(pa.string())
        else:
            column.validate(full=True)
        return ["" if cell is None else cell for cell in column.to_pylist()]
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return [decode(cell or b"") for cell in column.cast(pa.binary()).to_pylist()]


def _read_text(piece: Piece, columns: Columns) -> Iterator[Rows]:  # noqa: ARG001
    assert piece.stop is not None
    with to_path(piece.path).open("rb") as file:
        first, last = (go_to_line(file, position, piece.path) for position in (piece.start, piece.stop))
        file.seek(first)
        if content := file.read(last - first):
            yield Rows([content], files=[piece.path])


def _read_builtin(piece: Piece, columns: Columns) -> Iterator[Rows]:
    source = Source(piece.path)
    if columns.label is None:
        documents = find_builtin(source, BUILTIN_DOCUMENTS)
        assert documents is not None
        yield from (Rows([document]) for document in documents())
        return
    read = find_builtin(source, BUILTIN)
    assert read is not None
    examples = read()
    for start in range(0, len(examples), BATCH_ROWS):
        part = slice(start, start + BATCH_ROWS)
        yield Rows(examples.inputs[part], examples.labels[part])


_READERS: dict[str, Callable[[Piece, Columns], Iterator[Rows]]] = {
    "parquet": _read_parquet,
    "arrow": _read_arrow,
    "csv": _read_csv,
    "jsonl": read_jsonl,
    "text": _read_text,
    "tar": read_tar,
    "builtin": _read_builtin,
}
