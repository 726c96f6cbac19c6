"""The columns of labelled examples, and what each row of them is as an input."""

import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.best_effort import warn
from app.config import ColumnsConfig
from app.data.audio import require_recording
from app.data.examples import Input, Modality
from app.data.images import require_picture
from app.data.kinds import ColumnKind
from app.data.rows import Record, RowColumns, TableRows
from app.data.sources.cells import Column, Columns, Kind, Rows
from app.data.sources.formats import FORMATS, SourceFile
from app.data.sources.units import Contents, column_names
from app.errors import DataError

INPUT, LABEL, GROUP = "data.columns.input", "data.columns.label", "data.group_column"
_INDEX_NAME = re.compile(r"|Unnamed: 0(\.\d+)*|__index_level_\d+__")
"""What pandas calls the index of a table that it writes as a column."""


def resolve_columns(
    files: Sequence[SourceFile], config: ColumnsConfig, contents: Contents, group: str | None = None
) -> ColumnsConfig:
    """Return the columns of tables with all features named: those of the first file, except the label and ``group``.

    Raises:
        DataError: a table lacks a feature or a field, which a row of JSON lines may lack; or there are no files, and
            no features are named.
    """
    if contents == "row" and not files and not config.features:
        raise DataError(
            "data.columns.features is missing: a stream has no header, so name the features of a message"
        ).of("columns.missing", "data.columns.features")
    if contents not in ("row", "record") or not files:
        return config
    names = {file.path: column_names(file) for file in files}
    names = {path: found for path, found in names.items() if found} or names
    path, first = next(iter(names.items()))
    features = config.features
    if features is None and contents == "row":
        index = [name for name in first if _INDEX_NAME.fullmatch(name)]
        features = [name for name in first if name not in {config.label, group, *index}]
        if index:
            warn(
                f"{path!r}: pandas calls the index of a table {', '.join(map(repr, index))}, so it is left out: name "
                "it in data.columns.features to read it"
            )
    named = config.model_copy(update={"features": features})
    columns = labelled_columns(named, contents)
    required = Columns(contents, tuple(replace(column, is_optional=False) for column in columns.all))
    for file in files:
        if FORMATS.get(file.format) and names.get(file.path):
            required.require_in(file.path, names[file.path])
    return named


def labelled_columns(
    config: ColumnsConfig, contents: Modality, group: str | None = None, label_kind: Kind = "label"
) -> Columns:
    """Return the columns of labelled inputs.

    Args:
        config: with the features named, for rows.
        group: the column whose rows stay in one split.
    """
    label = Column(LABEL, config.label, label_kind)
    return Columns(contents, (*_of_input(config, contents), label, *group_columns(group)))


def group_columns(group: str | None) -> list[Column]:
    """Return the column whose rows stay in one split, if there is one."""
    return [] if group is None else [Column(GROUP, group, "group")]


def _of_input(config: ColumnsConfig, contents: Modality) -> Iterator[Column]:
    if contents == "row":
        # A row of JSON lines may lack some of them.
        for number, name in enumerate(config.features or ()):
            yield Column(f"data.columns.features.{number}", name, "value", is_optional=True)
    elif contents == "record":
        yield from _fields(config)
    else:
        yield Column(INPUT, config.input, "text" if contents == "text" else "file")


def kinds_of(rows: Rows, columns: Columns) -> dict[str, ColumnKind]:
    """Return the kinds of the columns of values."""
    kinds = {column.name: ColumnKind() for column in columns.values}
    for column in columns.values:
        kinds[column.name].add(rows.cells[column.key], rows.place)
    return kinds


def inputs_of(rows: Rows, columns: Columns, config: ColumnsConfig, verify: bool = True) -> Iterator[Input | None]:
    """Yield the input of each row; None if it cannot be read. A row of a table and a record are JSON objects.

    Equal rows are equal texts, whatever the format that they come from and the order of their columns.

    Args:
        config: with the kinds of all columns resolved.
        verify: decode pictures and recordings, to see whether they can be read.
    """
    if columns.contents == "row":
        table = table_of(rows, columns.values, config)
        return (json.dumps(row, ensure_ascii=False, sort_keys=True) for row in table)
    if columns.contents == "record":
        return map(_text_of, records_of(rows, columns, config, verify))
    return _inputs(rows, columns, verify)


def _fields(config: ColumnsConfig) -> Iterator[Column]:
    from app.data.records import is_file  # other sources do not need every processor

    for name, field in config.fields.items():
        if field.columns:
            for number, column in enumerate(field.columns):
                yield Column(f"data.columns.fields.{name}.columns.{number}", column, "value", is_optional=True)
        else:
            kind: Kind = "file" if is_file(field.kind) else "text"
            yield Column(f"data.columns.fields.{name}", field.column or name, kind, is_optional=True)


def _inputs(rows: Rows, columns: Columns, verify: bool) -> Iterator[Input | None]:
    """Yield the text or the file of each row; None if it cannot be read."""
    require = _REQUIRED.get(columns.contents) if verify else None
    for item in rows.cells[columns.content.key].to_pylist():
        try:
            if require and item is not None:
                require(item)
        except DataError:
            yield None
        else:
            yield item


def records_of(rows: Rows, columns: Columns, config: ColumnsConfig, verify: bool) -> Iterator[Record]:
    """Yield the fields that each row has. ``config`` and ``verify``: as those of ``inputs_of``."""
    fields = {name: list(_field(name, rows, columns, config, verify)) for name in config.fields}
    for number in range(len(rows)):
        yield {name: cells[number] for name, cells in fields.items() if cells[number] is not None}


def _text_of(record: Record) -> str:
    """Return a record as a JSON object, with files in base64; an empty text if it has no field."""
    text = json.dumps(record, ensure_ascii=False, default=lambda cell: b64encode(cell).decode())
    return text if record else ""


def _field(name: str, rows: Rows, columns: Columns, config: ColumnsConfig, verify: bool) -> Iterator[Any]:
    """Yield a field of each row; None where it is missing.

    With ``verify``, it raises DataError for a picture or a recording that cannot be read.
    """
    key, field = f"data.columns.fields.{name}", config.fields[name]
    if field.columns is not None:
        own = [column for column in columns.values if column.key.startswith(f"{key}.columns.")]
        for row in table_of(rows, own, config):
            yield row if any(cell is not None for cell in row.values()) else None
        return
    (column,) = (column for column in columns.all if column.key == key)
    require = _REQUIRED.get(field.kind) if verify else None
    for number, cell in enumerate(rows.cells[key].to_pylist()):
        if column.kind == "text":
            if cell is None:
                raise DataError(
                    f"{rows.place(number)}: the {column.name} is not text in UTF-8: repair or remove it"
                ).of("text.encoding")
            yield cell.strip() or None
            continue
        if require and cell is not None:
            path = rows.paths[key].get(number)
            _require_content(require, name if path is None else f"file {path!r}", cell, rows.place(number))
        yield cell


def table_of(rows: Rows, columns: Sequence[Column], config: ColumnsConfig) -> TableRows:
    """Return the cells of some columns of values. ``config``: with the kinds of all columns resolved."""
    cells = {column.name: rows.cells[column.key].to_pylist() for column in columns}
    return TableRows.of_cells(cells, RowColumns.of(list(cells), config.categories))


_REQUIRED: Mapping[str, Callable[[bytes], None]] = {"image": require_picture, "audio": require_recording}


def _require_content(require: Callable[[bytes], None], what: str, content: bytes, place: str) -> None:
    try:
        require(content)
    except DataError as error:
        raise DataError(f"{place}: the {what} cannot be read ({error}): repair or remove the file").of(
            "file.unreadable"
        ) from error
