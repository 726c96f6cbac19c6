"""The cells of a table, read in one way from every format: each column of a task has a kind, and each kind one type."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

import numpy as np
import orjson
import pyarrow as pa
from upath import UPath

from app.data.written import digits_of, label_of, text_of
from app.errors import DataError
from app.import_string import suggestion
from app.shared_files import map_concurrently
from app.storage import to_path

BATCH_ROWS, BATCH_BYTES = 4096, 4 * 2**20
"""Maximum that is read of a table at a time."""
FILE_ROWS, _MAX_FILE_ROWS, _FILE_BYTES = 16, 256, 16 * 2**20
"""For tables that name files: rows of the first read, then the maximum rows and bytes of each later read."""
Kind = Literal["text", "label", "labels", "group", "value", "file", "nested"]
"""What a task reads a column as.

- ``text``: string, "" for an empty cell, null for one that is not UTF-8;
- ``label``: string without the white space around it, "" for an empty cell;
- ``labels``: as ``label``, or a list of labels as JSON;
- ``group``: as ``label``: rows of one group stay in one split;
- ``value``: numbers, booleans or strings, null for an empty cell;
- ``file``: the content of a file, binary, null for an empty cell;
- ``nested``: JSON, null for an empty cell.
"""
_EXPECTED: Mapping[Kind, str] = {
    "text": "a text",
    "label": "a text or a number",
    "labels": "a text, a number, or a list of them",
    "group": "a text or a number",
    "value": "a number or a text",
    "file": "the path of a file, or its bytes",
    "nested": "an object or a list",
}
Place = Callable[[int], str]
"""Returns the file and the row of a cell, for messages."""


def rows_from(path: str, first: int, where: str = "") -> Place:
    """Return the places of consecutive rows. ``where``: what ``first`` is counted from, if not from the beginning."""
    return lambda row: f"{path!r}, row {first + row:,}{where}"


def each_at(places: Sequence[str]) -> Place:
    """Return the places of rows that have one of their own."""
    return places.__getitem__


@dataclass(frozen=True)
class Column:
    """A column that a task reads."""

    key: str
    """The recipe's key that names it."""
    name: str
    kind: Kind
    is_optional: bool = False
    """Whether a row of JSON lines may lack it."""


@dataclass(frozen=True)
class Columns:
    """The columns that a task reads of a source."""

    contents: str
    """What the source holds: a modality, or documents."""
    all: tuple[Column, ...]

    @property
    def names(self) -> list[str]:
        """The different names, in order."""
        return list(dict.fromkeys(column.name for column in self.all))

    @property
    def content(self) -> Column:
        """The column of the text or the file, which is the first. A source without columns has nothing else."""
        return self.all[0]

    @property
    def values(self) -> tuple[Column, ...]:
        """The columns of a table of numbers and categories."""
        return tuple(column for column in self.all if column.kind == "value")

    @property
    def label(self) -> Column | None:
        """The column of the label, for sources that name it in another way."""
        return next((column for column in self.all if column.kind in ("label", "labels")), None)

    @property
    def num_first(self) -> int:
        """Number of rows to read first; few if cells name files, whose sizes are unknown."""
        return FILE_ROWS if any(column.kind == "file" for column in self.all) else BATCH_ROWS

    def require_in(self, path: str, found: Sequence[str]) -> None:
        """Raise DataError if a table lacks one of them, or has two of one name."""
        for column in self.all:
            if (count := found.count(column.name)) > 1:
                raise DataError(
                    f"{column.key} is {column.name!r}, and {path!r} has {count} columns of this name: rename one"
                ).of("columns.twice", column.key)
            if not count and not column.is_optional:
                raise DataError(
                    f"{column.key} is {column.name!r}, which {path!r} does not have: it has "
                    f"{', '.join(found) or 'no columns'}; {_way_out(column.name, found)}"
                ).of("columns.missing", column.key)


def _way_out(name: str, found: Sequence[str]) -> str:
    if len(found) == 1 and (other := next((mark for mark in ";\t|" if mark in found[0]), None)):
        return f"its cells seem to be separated by {other!r}: write it with commas, or with tabs as .tsv"
    return f"name one of them, or correct the file{suggestion(name, found)}"


@dataclass(frozen=True)
class Rows:
    """A few rows of a source."""

    cells: Mapping[str, pa.Array]
    """The cells of each column, by the key that names it. Their type is that of the column's kind."""
    place: Place
    paths: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """The files that cells name, by the key of the column and the row, for messages."""
    files: frozenset[str] = frozenset()
    """The locations of these files."""

    def __len__(self) -> int:
        return len(next(iter(self.cells.values())))

    @property
    def num_next(self) -> int:
        """Number of rows to read next, if their files are about as large as those of these rows."""
        if not self.files:
            return BATCH_ROWS
        size = sum(int(cells.nbytes) for cells in self.cells.values())
        return max(1, min(_MAX_FILE_ROWS, _FILE_BYTES * len(self) // max(1, size)))


def rows_of_batch(batch: pa.RecordBatch, columns: Columns, path: str, place: Place) -> Rows:
    """Return the rows of a table in Arrow. Raises DataError for a cell that is not of its column's kind."""
    cells, paths, files = {}, {}, set[str]()
    for column in columns.all:
        index = batch.schema.get_field_index(column.name)
        given = pa.nulls(batch.num_rows) if index < 0 else batch.column(index)
        converter = _Cells(column, path, place)
        cells[column.key], paths[column.key] = converter.of_array(given), converter.paths
        files |= converter.files
    return Rows(cells, place, paths, frozenset(files))


def rows_of_objects(rows: Sequence[Mapping[str, Any]], columns: Columns, path: str, place: Place) -> Rows:
    """Return rows that are JSON objects.

    Raises:
        DataError: an object lacks a column, or a cell is not of its column's kind.
    """
    cells, paths, files = {}, {}, set[str]()
    for column in columns.all:
        lacking = next((number for number, row in enumerate(rows) if column.name not in row), None)
        if lacking is not None and not column.is_optional:
            raise DataError(
                f"{column.key} is {column.name!r}, which {place(lacking)} does not have: it has "
                f"{', '.join(rows[lacking])}; give every row the same keys, and null where there is no value"
            ).of("columns.missing", column.key)
        values = [row.get(column.name) for row in rows]
        converter = _Cells(column, path, place)
        cells[column.key], paths[column.key] = converter.of_values(values), converter.paths
        files |= converter.files
    return Rows(cells, place, paths, frozenset(files))


@dataclass(frozen=True)
class _Cells:
    """Converts the cells of one column."""

    column: Column
    path: str
    place: Place
    paths: dict[int, str] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)

    def of_array(self, given: pa.Array) -> pa.Array:
        """Return the cells of a column in Arrow."""
        given = _plain(given)
        if self.column.kind == "value" and _are_numbers(given.type):
            return _exact(given)
        if self.column.kind == "file" and pa.types.is_binary(given.type):
            return given
        if self.column.kind in _NAMES and (texts := _utf8(given)) is not None:
            encoded = texts.fill_null("").dictionary_encode()  # a label is in many rows
            convert = _CONVERTED[self.column.kind]
            return pa.array(map(convert, encoded.dictionary.to_pylist()), pa.string()).take(encoded.indices)
        if self.column.kind == "text" and (texts := _utf8(given)) is not None:
            return texts.fill_null("")
        return self.of_values(_numbers_as_texts(given) if pa.types.is_floating(given.type) else self._python(given))

    def _python(self, given: pa.Array) -> list[Any]:
        """Return the cells of a column as Python values. Raises DataError if Python has no such value."""
        if pa.types.is_string(given.type) or pa.types.is_large_string(given.type):
            if self.column.kind == "file":
                given = texts_of(given.cast(pa.binary()), self.column.name, self.place)
            elif _utf8(given) is None:
                given = given.cast(pa.binary())
        try:
            if (kind := _in_microseconds(given.type)) != given.type:
                given = given.cast(kind)
            cells: list[Any] = given.to_pylist()
            if self.column.kind == "nested":
                cells = [_without_nulls(cell) for cell in cells]
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise DataError(
                f"{self.place(0)}, or a row after it: {self.column.name!r} is of the type {given.type}, and a value "
                f"cannot be read ({error}): write the column as texts"
            ).of("cell.type", self.column.key) from error
        return cells

    def of_values(self, values: Sequence[Any]) -> pa.Array:
        """Return the cells of a column of Python values."""
        if self.column.kind == "value":
            return self._values(values)
        if self.column.kind == "file":
            return self._files(values)
        return pa.array(list(self._each(values, _CONVERTED[self.column.kind])), pa.string())

    def _each(self, values: Sequence[Any], convert: Callable[[Any], Any]) -> Iterator[Any]:
        for number, value in enumerate(values):
            try:
                yield convert(value)
            except UnicodeError as error:
                raise _not_text(self.place(number), self.column.name) from error
            except TypeError as error:
                raise self._refusal(number, value) from error

    def _values(self, values: Sequence[Any]) -> pa.Array:
        cells = list(self._each(values, _as_value))
        kinds = {type(cell) for cell in cells if cell is not None}
        if kinds <= {int, float} and all(cell is None or abs(cell) <= _EXACT or type(cell) is float for cell in cells):
            return pa.array([None if cell is None else float(cell) for cell in cells], pa.float64())
        if kinds == {bool}:
            return pa.array(cells, pa.bool_())
        return pa.array([None if cell is None else text_of(cell) for cell in cells], pa.string())

    def _files(self, values: Sequence[Any]) -> pa.Array:
        cells = list(self._each(values, _as_file))
        self.paths.update((number, cell) for number, cell in enumerate(cells) if isinstance(cell, str))
        if self.paths:
            # Storage serves many requests at once.
            contents = map_concurrently(to_path(self.path), lambda item: self._content(*item), self.paths.items())
            table = to_path(self.path)
            self.files.update(str(_file_of(table, given)) for given in set(self.paths.values()))
            for number, content in zip(self.paths, contents, strict=True):
                cells[number] = content
        return pa.array(cells, pa.binary())

    def _content(self, number: int, given: str) -> bytes:
        try:
            content: bytes = _file_of(to_path(self.path), given).read_bytes()
        except (OSError, ValueError, ImportError) as error:  # drivers have no error in common
            reason = getattr(error, "strerror", None) or str(error)
            raise DataError(
                f"{self.place(number)}: the {self.column.name} {given[:_MAX_SHOWN]!r} cannot be read "
                f"({reason[:_MAX_SHOWN]}): expected a file, by its URI or its path from the folder of the table, or in "
                "a column of bytes"
            ).of("file.unreadable", self.column.key) from error
        return content

    def _refusal(self, number: int, value: Any) -> DataError:
        return DataError(
            f"{self.place(number)}: {self.column.name!r} is {kind_in_words(value)}: expected "
            f"{_EXPECTED[self.column.kind]}; name another column in {self.column.key}, or write its values so"
        ).of("cell.type", self.column.key)


_NAMES: tuple[Kind, ...] = ("label", "labels", "group")
_MAX_SHOWN = 200
_EXACT = 2**53
"""Floats have every whole number up to here. Larger ones, such as ids, stay texts."""
_KINDS: Mapping[type, str] = {
    dict: "an object",
    list: "a list",
    bytes: "bytes",
    str: "a text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def kind_in_words(value: Any) -> str:
    """Return what a value is, for messages."""
    return _KINDS.get(type(value), f"of the type {type(value).__name__}")


def _are_numbers(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _plain(given: pa.Array) -> pa.Array:
    """Return a column in a type without views, dictionaries and most extensions, whose values are the same."""
    kind = given.type
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(given.indices, _plain(given.dictionary)).dictionary_decode()
    if isinstance(kind, pa.BaseExtensionType):
        return given if isinstance(kind, pa.UuidType | pa.Bool8Type) else _plain(given.storage)
    if pa.types.is_string_view(kind):
        return given.cast(pa.string())
    is_binary = pa.types.is_binary_view(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    return given.cast(pa.binary()) if is_binary else given


def _without_nulls(cell: Any) -> Any:
    """Return a cell without null keys, because Arrow gives all objects of a column the same keys."""
    if isinstance(cell, dict):
        return {key: _without_nulls(value) for key, value in cell.items() if value is not None}
    return [_without_nulls(item) for item in cell] if isinstance(cell, list) else cell


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    """Return a type of time, duration or timestamp in microseconds. Python has no nanoseconds."""
    if pa.types.is_time64(kind):
        return pa.time64("us")
    if pa.types.is_duration(kind):
        return pa.duration("us")
    return pa.timestamp("us", kind.tz) if pa.types.is_timestamp(kind) and kind.unit == "ns" else kind


def _exact(given: pa.Array) -> pa.Array:
    """Return numbers as texts give them: 0.1 for that of float32, and null for NaN, which means a missing value."""
    if not pa.types.is_floating(given.type):
        return given
    numbers = given.to_numpy(zero_copy_only=False)
    if numbers.dtype != np.float64:
        numbers = numbers.astype(str).astype(np.float64)  # the fewest digits that give the number
    return pa.array(numbers, mask=np.isnan(numbers))


def _numbers_as_texts(given: pa.Array) -> list[str | None]:
    """Return numbers in the fewest digits that give them in their own precision: float32 has 0.1, too."""
    numbers = given.to_numpy(zero_copy_only=False)
    return [None if number != number else digits_of(float(number), str(number)) for number in numbers]


def _utf8(given: pa.Array) -> pa.Array | None:
    """Return texts as they are; None if they are no texts, or one of them is not UTF-8."""
    kind = given.type
    if not (pa.types.is_binary(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return None
    try:
        texts = given if pa.types.is_string(kind) else given.cast(pa.string())
        texts.validate(full=True)
    except pa.ArrowInvalid:
        return None
    return texts


def texts_of(given: pa.Array, name: str, place: Place) -> pa.Array:
    """Return the bytes of a column as texts. Raises DataError if one is not UTF-8."""
    try:
        return given.cast(pa.string())
    except pa.ArrowInvalid as error:
        row = next(row for row, cell in enumerate(given.to_pylist()) if cell is not None and as_text(cell) is None)
        raise _not_text(place(row), name) from error


def _not_text(place: str, name: str) -> DataError:
    return DataError(f"{place}: {name!r} is not text in UTF-8: correct it, or write the file in UTF-8").of(
        "text.encoding"
    )


def _file_of(table: UPath, given: str) -> UPath:
    """Return the file that a cell names."""
    return to_path(given) if "://" in given or given.startswith("/") else table.parent / given


def _is_empty(value: Any) -> bool:
    return value is None or value != value


def as_text(value: Any) -> str | None:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    return "" if _is_empty(value) else text_of(value)


def as_label(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode()
    return label_of(value)


def _as_labels(value: Any) -> str:
    if isinstance(value, list | tuple):
        return orjson.dumps([label for item in value if (label := as_label(item))]).decode()
    if isinstance(value, bytes):
        value = value.decode()
    return "" if _is_empty(value) else text_of(value).strip()


def _as_value(value: Any) -> bool | float | str | None:
    if isinstance(value, bytes):
        value = value.decode()
    if isinstance(value, str):
        return value.strip() or None
    if _is_empty(value):
        return None
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, Decimal) and Decimal(str(number := float(value))) == value:
        return number
    return text_of(value)  # a decimal with too many digits for a float stays exact


def _as_file(value: Any) -> bytes | str | None:
    if isinstance(value, dict) and value.keys() <= {"bytes", "path"}:
        # The layout of Hugging Face's datasets.
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        return value.strip() or None
    if isinstance(value, bytes):
        return value
    if _is_empty(value):
        return None
    raise TypeError


def _as_json(value: Any) -> str | None:
    if isinstance(value, str | bytes):  # JSON in a cell of csv
        return (value.decode() if isinstance(value, bytes) else value) or None
    if _is_empty(value):
        return None
    if not isinstance(value, dict | list):
        raise TypeError
    try:
        return orjson.dumps(value, default=_as_json_value).decode()
    except orjson.JSONEncodeError as error:
        if isinstance(error.__cause__, TypeError):
            raise
        raise UnicodeError from error  # half of a surrogate pair


def _as_json_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    return float(value) if isinstance(value, Decimal) else text_of(value)


_CONVERTED: Mapping[Kind, Callable[[Any], str | None]] = {
    "text": as_text,
    "label": as_label,
    "labels": _as_labels,
    "group": as_label,
    "nested": _as_json,
}
