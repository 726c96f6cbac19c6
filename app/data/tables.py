"""Tables of texts, read with pandas. This module is imported only for tables: pandas takes a quarter of a second."""

from collections.abc import Callable, Mapping
from functools import partial

import pandas as pd
from upath import UPath

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
        columns: the name of each column, by its key in ``data.columns``.

    Raises:
        DataError: the file is not a table, or a column is missing.
    """
    try:
        with path.open("rb") as file:
            table = _READERS[path.suffix](file)
    except pd.errors.EmptyDataError:
        return [[] for _ in columns]
    except (ValueError, OSError) as error:
        raise DataError(f"{str(path)!r} is not a {path.suffix[1:]} table ({error})") from error
    if not len(table.columns):
        return [[] for _ in columns]
    for key, column in columns.items():
        if column not in table.columns:
            raise DataError(
                f"data.columns.{key} is {column!r}, which {str(path)!r} does not have: "
                f"it has {', '.join(map(str, table.columns))}"
            )
    return [[_cell(value) for value in table[column]] for column in columns.values()]


def _cell(value: object) -> str:
    return "" if pd.api.types.is_scalar(value) and pd.isna(value) else str(value)
