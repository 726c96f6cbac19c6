"""Tables, read with pandas. This module is imported only for tables: pandas takes a quarter of a second."""

import base64
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import date, time, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import pandas as pd
from upath import UPath

from app.config import ColumnsConfig, FieldConfig
from app.data.audio import require_recording
from app.data.images import require_picture
from app.data.preparation.lines import BOM, parse_line
from app.errors import DataError
from app.storage import no_op, to_path

_READERS_AT_ONCE = 16


def _read_json_lines(file: BinaryIO, path: str) -> pd.DataFrame:
    """Return the rows as they are: pandas would turn whole numbers beside empty cells into decimals."""
    rows, offset = [], 0
    for line in file:
        if line.strip():
            rows.append(parse_line(line if offset else line.removeprefix(BOM), path, offset))
        offset += len(line)
    return pd.DataFrame(rows, dtype=object)


# Cells are read as texts, because pandas would change a text such as NA or 007.
_READERS: dict[str, Callable[..., pd.DataFrame]] = {
    ".csv": partial(pd.read_csv, dtype=str, keep_default_na=False),
    # By default, an empty cell would turn a column of whole numbers into decimals, and the label 1 into 1.0.
    ".parquet": partial(pd.read_parquet, dtype_backend="numpy_nullable"),
    ".arrow": partial(pd.read_feather, dtype_backend="numpy_nullable"),
    ".feather": partial(pd.read_feather, dtype_backend="numpy_nullable"),
}


def read_table(path: UPath, columns: Mapping[str, str]) -> list[list[str]]:
    """Return columns of a csv, jsonl, parquet or Arrow file as texts. Empty cells become empty texts.

    Args:
        columns: the name of each column, by its key in ``data.columns``, or by its whole key of ``train``.

    Raises:
        DataError: the file is not a table, a column is missing, or a cell is not text in UTF-8.
    """
    table = _read(path)
    if table is None:
        return [[] for _ in columns]
    _require_columns(table, path, columns)
    return [_texts(table, path, column) for column in columns.values()]


def read_rows(path: UPath, columns: ColumnsConfig) -> tuple[list[str], list[str]]:
    """Return each row of ``data.columns.features`` as a JSON object, and its label as text.

    Raises:
        DataError: the file is not a table, a column is missing, or a cell is neither number nor text.
    """
    table = _read(path)
    if table is None:
        return [], []
    names = columns.features or [str(name) for name in table.columns if name != columns.label]
    keys = {f"features.{number}": name for number, name in enumerate(names)}
    _require_columns(table, path, {"label": columns.label} | keys)
    values = [_values(table, path, name) for name in names]
    rows = [json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) for row in zip(*values, strict=True)]
    return rows, _texts(table, path, columns.label)


def read_records(path: UPath, columns: ColumnsConfig) -> tuple[list[str], list[str]]:
    """Return the fields of ``data.columns.fields`` that each row has, as a JSON object, and its label as text.

    Files are read, and encoded in base64. A row without any field is an empty text.

    Raises:
        DataError: the file is not a table, a column is missing, or a cell or a file cannot be read.
    """
    table = _read(path)
    if table is None:
        return [], []
    names: dict[str, str] = {}
    for name, field in columns.fields.items():
        if field.columns:
            names |= {f"fields.{name}.columns.{number}": column for number, column in enumerate(field.columns)}
        else:
            names[f"fields.{name}"] = field.column or name
    _require_columns(table, path, {"label": columns.label} | names)
    values = [_field_values(table, path, name, field) for name, field in columns.fields.items()]
    records = [
        {name: value for name, value in zip(columns.fields, row, strict=True) if value is not None}
        for row in zip(*values, strict=True)
    ]
    texts = [json.dumps(record, ensure_ascii=False) if record else "" for record in records]
    return texts, _texts(table, path, columns.label)


def _field_values(table: pd.DataFrame, path: UPath, name: str, field: FieldConfig) -> list[Any]:
    """Return the value of a field in each row, as JSON has it; None where a row does not have it."""
    from app.data.records import is_file  # other tables do not need every processor

    if field.columns:
        rows = [_values(table, path, column) for column in field.columns]
        return [
            dict(zip(field.columns, row, strict=True)) if any(value is not None for value in row) else None
            for row in zip(*rows, strict=True)
        ]
    column = field.column or name
    if not is_file(field.kind):
        return [text.strip() or None for text in _texts(table, path, column)]
    cells = [value if isinstance(value, bytes) else _cell(value).strip() or None for value in table[column]]
    require = {"image": require_picture, "audio": require_recording}.get(field.kind, no_op)

    def read(number: int, cell: str | bytes | None) -> str | None:
        if cell is None:
            return None
        try:
            content = cell if isinstance(cell, bytes) else _file_of(path, cell).read_bytes()
            require(content)
        except (OSError, DataError) as error:
            given = f"of {len(cell):,} bytes" if isinstance(cell, bytes) else repr(cell)
            raise DataError(
                f"{str(path)!r}, row {number}: the {column} {given} cannot be read ({error}): expected a file, by its "
                "URI or its path from the folder of the table, or in a column of bytes"
            ) from error
        return base64.b64encode(content).decode()

    # Storage serves many requests at once.
    with ThreadPoolExecutor(_READERS_AT_ONCE) as pool:
        return list(pool.map(read, range(1, len(cells) + 1), cells))


def _file_of(table: UPath, given: str) -> UPath:
    """Return the file that a cell names."""
    return to_path(given) if "://" in given or given.startswith("/") else table.parent / given


def _read(path: UPath) -> pd.DataFrame | None:
    """Return the table; None if it is empty. Raises DataError if it is none."""
    try:
        with path.open("rb") as file:
            table = _read_json_lines(file, str(path)) if path.suffix == ".jsonl" else _READERS[path.suffix](file)
    except pd.errors.EmptyDataError:
        return None
    except (ValueError, OSError) as error:
        raise DataError(f"{str(path)!r} is not a {path.suffix[1:]} table ({error})") from error
    return table if len(table.columns) else None


def _require_columns(table: pd.DataFrame, path: UPath, columns: Mapping[str, str]) -> None:
    for key, column in columns.items():
        if column not in table.columns:
            name = key if key.startswith("train.") else f"data.columns.{key}"
            raise DataError(
                f"{name} is {column!r}, which {str(path)!r} does not have: it has {', '.join(map(str, table.columns))}"
            )


def _texts(table: pd.DataFrame, path: UPath, column: str) -> list[str]:
    """Return the cells of a column as texts. Raises DataError for bytes that are not UTF-8."""
    texts = []
    for number, value in enumerate(table[column], start=1):
        try:
            texts.append(value.decode() if isinstance(value, bytes) else _cell(value))
        except UnicodeDecodeError as error:
            raise DataError(
                f"{str(path)!r}, row {number}: the {column} is not text in UTF-8 ({error}): repair or remove it"
            ) from error
    return texts


def _values(table: pd.DataFrame, path: UPath, column: str) -> list[object]:
    """Return the cells of a column as JSON has them. Raises DataError for one that is neither number nor text."""
    values = [_value(value) for value in table[column]]
    for number, value in enumerate(values, start=1):
        if isinstance(value, str | int | float | None):
            continue
        try:
            json.dumps(value)
        except TypeError as error:
            raise DataError(
                f"{str(path)!r}, row {number}: the {column} is {type(value).__name__}: expected a number or a text"
            ) from error
    return values


def _cell(value: object) -> str:
    if isinstance(value, list | np.ndarray):
        return json.dumps([str(item) for item in value], ensure_ascii=False)
    return "" if pd.api.types.is_scalar(value) and pd.isna(value) else str(value)


def _value(value: object) -> object:
    """Return a cell as JSON has it; None for an empty one."""
    if (isinstance(value, str) and not value) or (pd.api.types.is_scalar(value) and pd.isna(value)):
        return None
    if isinstance(value, date | time | timedelta | Decimal):
        return str(value)
    return value.item() if isinstance(value, np.generic) else value
