"""Labelled examples as preparation reads them from a source, without their cleaning."""

from typing import Any

from app.config import DataConfig
from app.data.examples import Modality
from app.data.kinds import ColumnKind, merge_kinds, resolve_kinds
from app.data.sources.labelled import LABEL, inputs_of, kinds_of, labelled_columns, resolve_columns
from app.data.sources.source import Source
from app.data.sources.units import list_files, read_source


def read_examples(config: DataConfig, modality: Modality = "text") -> list[tuple[Any, str]]:
    """Return the input, None if it cannot be read, and the label of each row."""
    source = Source(config.source)
    named = resolve_columns(list_files(source, modality), config.columns, modality)
    columns = labelled_columns(named, modality)
    batches, kinds = list(read_source(source, columns)), dict[str, ColumnKind]()
    for rows in batches:
        merge_kinds(kinds, kinds_of(rows, columns))
    named = resolve_kinds(kinds, named)
    return [
        pair
        for rows in batches
        for pair in zip(inputs_of(rows, columns, named), rows.cells[LABEL].to_pylist(), strict=True)
    ]
