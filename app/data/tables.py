"""Tables, read with pandas. This module is imported only for tables: pandas takes a quarter of a second."""

import json
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import pandas as pd
from upath import UPath

from app.config import ColumnsConfig
from app.errors import DataError

# Cells are read as texts, because pandas would change a text such as NA or 007.
_READERS: dict[str, Callable[..., pd.DataFrame]] = {
    ".csv": partial(pd.read_csv, dtype=str, keep_default_na=False),
    ".jsonl": partial(pd.read_json, lines=True, dtype=False),
    ".parquet": pd.read_parquet,
}


def read_table(path: UPath, columns: Mapping[str, str]) -> list[list[str]]:
    """Return columns of a csv, jsonl or parquet file as texts. Empty cells become empty texts.

    Args:
        columns: the name of each column, by its key in ``data.columns``, or by its whole key of ``train``.

    Raises:
        DataError: the file is not a table, or a column is missing.
    """
    table = _read(path)
    if table is None:
        return [[] for _ in columns]
    _require_columns(table, path, columns)
    return [[_cell(value) for value in table[column]] for column in columns.values()]


def read_rows(path: UPath, columns: ColumnsConfig) -> tuple[list[str], list[str]]:
    """Return each row of ``data.columns.features`` as an object of JSON, and its label as text.

    Raises:
        DataError: the file is not a table, or a column is missing.
    """
    table = _read(path)
    if table is None:
        return [], []
    names = columns.features or [str(name) for name in table.columns if name != columns.label]
    keys = {f"features.{number}": name for number, name in enumerate(names)}
    _require_columns(table, path, {"label": columns.label} | keys)
    values = [[_value(value) for value in table[name]] for name in names]
    rows = [json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) for row in zip(*values, strict=True)]
    return rows, [_cell(value) for value in table[columns.label]]


def _read(path: UPath) -> pd.DataFrame | None:
    """Return the table; None if it is empty. Raises DataError if it is none."""
    try:
        with path.open("rb") as file:
            table = _READERS[path.suffix](file)
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


def _cell(value: object) -> str:
    if isinstance(value, list | np.ndarray):
        return json.dumps([str(item) for item in value], ensure_ascii=False)
    return "" if pd.api.types.is_scalar(value) and pd.isna(value) else str(value)


def _value(value: object) -> object:
    """Return a cell as JSON has it; None for an empty one."""
    if value == "" or (pd.api.types.is_scalar(value) and pd.isna(value)):
        return None
    return value.item() if isinstance(value, np.generic) else value
