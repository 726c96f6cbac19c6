"""All labelled examples of a source, in memory."""

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.config import ColumnsConfig, DataConfig
from app.data.audio import require_recording
from app.data.examples import Examples, Input, Modality, Reason
from app.data.images import is_readable, require_picture
from app.data.kinds import ColumnKind
from app.data.sources.cells import Column, Columns, Kind, Rows
from app.data.sources.formats import SourceFile
from app.data.sources.formats.builtin import Builtin, find_examples
from app.data.sources.source import Source
from app.data.sources.units import column_names, list_files, read_files, tell_unread
from app.errors import DataError
from app.warnings import warn

INPUT, LABEL, GROUP = "data.columns.input", "data.columns.label", "data.group_column"
_INDEX_NAME = re.compile(r"|Unnamed: 0(\.\d+)*|__index_level_\d+__")
"""What pandas calls the index of a table that it writes as a column."""


def load_examples(
    config: DataConfig, modality: Modality = "text", key: str = "data.source", label_kind: Kind = "label"
) -> Examples:
    """Read every example of a source.

    Args:
        config: names the source and its columns.
        modality: how the source is read: as texts, files, rows or records.
        key: the key of the recipe that names the source: ``data.source``, ``data.test_source``, …
        label_kind: whether a row has one label or may have several.

    Raises:
        DataError: the source does not exist, its format is unknown, a column is missing, or there are no rows.
    """
    source = Source(getattr(config, key.rpartition(".")[2]), key)
    files = list_files(source, modality)
    tell_unread(source, files)
    if files[0].format == Builtin.name:
        examples = find_examples(source)
    else:
        examples = Examples(modality, [], [])
        for file in files:
            _add(examples, file, config, label_kind)
    if not examples.given:
        raise DataError(f"{source} has no examples: give a source that has some")
    _require_readable(source, examples, config.clean.max_unreadable)
    return examples


def columns_of(
    config: ColumnsConfig, modality: Modality, group: str | None = None, label_kind: Kind = "label"
) -> Columns:
    """Return the columns of labelled inputs that are one text or one file. ``group``: the column of the group."""
    content = Column(INPUT, config.input, "text" if modality == "text" else "file")
    groups = [] if group is None else [Column(GROUP, group, "group")]
    return Columns(modality, (content, Column(LABEL, config.label, label_kind), *groups))


def _add(examples: Examples, file: SourceFile, config: DataConfig, label_kind: Kind) -> None:
    """Add the examples of a file."""
    label = Column(LABEL, config.columns.label, label_kind)
    read: Callable[[Rows, Columns, ColumnsConfig], Iterator[Input | None]]
    if examples.modality in ("row", "record"):
        names = column_names(file)
        if not names:
            return
        of_inputs = _features(file, names, config.columns) if examples.modality == "row" else _fields(config.columns)
        columns = Columns(examples.modality, (*of_inputs, label))
        columns.require_in(file.path, names)
        # A row of JSON lines may lack some of them.
        columns = Columns(
            examples.modality, tuple(replace(column, is_optional=column is not label) for column in columns.all)
        )
        read = _objects
    else:
        columns, read = columns_of(config.columns, examples.modality, label_kind=label_kind), _inputs
    for rows in read_files([file], columns):
        labels: list[str] = rows.cells[LABEL].to_pylist()
        for column in columns.all:
            if column.kind == "value":
                kind = examples.kinds.setdefault(column.name, ColumnKind())
                kind.add(rows.cells[column.key], rows.place)
        items = list(read(rows, columns, config.columns))
        missing = {number for number, item in enumerate(items) if item is None}
        for number in sorted(missing):
            examples.leave_out("not_text" if examples.modality == "text" else "unreadable", rows.place(number))
        examples.inputs.extend(item for item in items if item is not None)
        examples.labels.extend(label for number, label in enumerate(labels) if number not in missing)


def _features(file: SourceFile, names: Sequence[str], config: ColumnsConfig) -> list[Column]:
    if config.features is not None:
        features: Sequence[str] = config.features
    else:
        index = [name for name in names if _INDEX_NAME.fullmatch(name)]
        features = [name for name in names if name != config.label and name not in index]
        if index:
            warn(
                f"{file.path!r}: pandas calls the index of a table {', '.join(map(repr, index))}, so it is left out: "
                "name it in data.columns.features to read it"
            )
    return [Column(f"data.columns.features.{number}", name, "value") for number, name in enumerate(features)]


def _fields(config: ColumnsConfig) -> Iterator[Column]:
    from app.data.records import is_file  # other sources do not need every processor

    for name, field in config.fields.items():
        if field.columns:
            for number, column in enumerate(field.columns):
                yield Column(f"data.columns.fields.{name}.columns.{number}", column, "value")
        else:
            kind: Kind = "file" if is_file(field.kind) else "text"
            yield Column(f"data.columns.fields.{name}", field.column or name, kind)


def _inputs(rows: Rows, columns: Columns, config: ColumnsConfig) -> Iterator[Input | None]:  # noqa: ARG001
    """Yield the text or the file of each row; None if it cannot be read."""
    for item in rows.cells[columns.content.key].to_pylist():
        yield None if isinstance(item, bytes) and columns.contents == "image" and not is_readable(item) else item


def _objects(rows: Rows, columns: Columns, config: ColumnsConfig) -> Iterator[str]:
    """Yield the features or the fields of each row as a JSON object. A record without any field is an empty text."""
    cells = {column.key: (column, rows.cells[column.key].to_pylist()) for column in columns.all if column.key != LABEL}
    for number in range(len(rows)):
        row = {column.key: _json_cell(column, values[number], rows, number) for column, values in cells.values()}
        if columns.contents == "row":
            features = {column.name: row[column.key] for column, _ in cells.values()}
            yield json.dumps(features, ensure_ascii=False)
        else:
            record = _record(row, config, rows, number)
            yield json.dumps(record, ensure_ascii=False) if record else ""


def _record(row: Mapping[str, Any], config: ColumnsConfig, rows: Rows, number: int) -> dict[str, Any]:
    """Return the fields that a row has. Raises DataError for a picture or a recording that cannot be read."""
    record = {}
    for name, field in config.fields.items():
        key = f"data.columns.fields.{name}"
        if field.columns is None:
            value = row[key]
            path = rows.paths[key].get(number)
            _require_content(field.kind, name if path is None else f"file {path!r}", value, rows.place(number))
        else:
            found = {column: row[f"{key}.columns.{place}"] for place, column in enumerate(field.columns)}
            value = found if any(cell is not None for cell in found.values()) else None
        if value is not None:
            record[name] = value
    return record


def _require_content(kind: str, name: str, value: str | None, place: str) -> None:
    require = {"image": require_picture, "audio": require_recording}.get(kind)
    if require is None or value is None:
        return
    try:
        require(base64.b64decode(value))
    except DataError as error:
        raise DataError(f"{place}: the {name} cannot be read ({error}): repair or remove the file") from error


def _json_cell(column: Column, value: Any, rows: Rows, number: int) -> Any:
    """Return a cell as JSON has it; None for an empty one."""
    if column.kind == "file" and value is not None:
        return base64.b64encode(value).decode()
    if column.kind == "text":
        if value is None:
            raise DataError(f"{rows.place(number)}: the {column.name} is not text in UTF-8: repair or remove it")
        return value.strip() or None
    return value


def _require_readable(source: Source, examples: Examples, limit: float) -> None:
    """Raise DataError if too many texts or files cannot be read."""
    words: Mapping[Reason, str] = {"unreadable": "files that cannot be decoded", "not_text": "texts not in UTF-8"}
    for reason, places in examples.left_out.items():
        if len(places) > limit * examples.given:
            raise DataError(
                f"{source} has {len(places):,} {words[reason]} among {examples.given:,} rows, more than "
                f"{100 * limit:g}%, such as {places[0]}: repair or remove them, or raise data.clean.max_unreadable"
            )
