"""The rows of one split of a unit as shards: labelled inputs as they are, or documents as blocks of tokens."""

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np
import pyarrow as pa

from app.data.examples import Natural
from app.data.rows import CATEGORIES, NUMBERS, RecordColumns, RowColumns
from app.data.sharded import INPUT, TOKENS, InputColumns
from app.data.shards import LENGTH, VALUE, Shard, ShardPlace, ShardWriter
from app.data.targets import LabelRule
from app.data.tokenizer import LanguageTokenizer

UNIT_SHARDS = 8
"""Shards that a unit of the source fills, about."""


class SplitWriter(Protocol):
    """Writes the rows of one split of a unit."""

    def add(self, inputs: Sequence[Natural], labels: Sequence[str]) -> None:
        """Add cleaned rows. Documents have no labels."""
        ...

    def close(self) -> list[Shard]:
        """Write what is left, and return all shards."""
        ...


Measure = Callable[[Sequence[Any]], Sequence[int]]
ReadLabels = Callable[[Sequence[str]], Sequence[Any]]
_VALUES = {"class": pa.int32(), "classes": pa.list_(pa.int32()), "number": pa.float64(), "json": pa.string()}


def labelled_schema(contents: str, rule: LabelRule | None, columns: InputColumns = None) -> pa.Schema:
    """Return the columns of inputs, with the values of labels if they have any.

    Args:
        contents: what the source holds.
        rule: how labels are read; None if there are none.
        columns: of rows and records, which are read as numbers, texts and files.
    """
    plain = {INPUT: pa.binary() if contents in ("image", "audio") else pa.string()}
    inputs = _types(columns) if columns else plain
    values = {VALUE: _VALUES[rule.kept_as]} if rule else {}
    return pa.schema({**inputs, **values, LENGTH: pa.int32()})


def _types(columns: RowColumns | RecordColumns) -> dict[str, pa.DataType]:
    """Return the types of columns of shards."""
    if isinstance(columns, RowColumns):
        # The cells of a row lie side by side, so that a batch takes each row at once.
        kinds = {NUMBERS: (pa.float64(), len(columns.numbers)), CATEGORIES: (pa.string(), len(columns.categories))}
        return {name: pa.list_(*kinds[name]) for name in columns.kept}
    types: dict[str, pa.DataType] = {}
    for name, kept in columns.kept_of.items():
        field = columns.fields[name]
        found = _types(field) if isinstance(field, RowColumns) else {"text": pa.string(), "file": pa.binary()}
        types |= {column: found[kind] for column, kind in kept.items()}
    return types


def token_type(tokenizer: LanguageTokenizer) -> pa.DataType:
    """Return the smallest type that has every token."""
    return pa.from_numpy_dtype(np.min_scalar_type(tokenizer.facts["vocab_size"] - 1))


class LabelledWriter:
    """Writes inputs and what their labels mean."""

    def __init__(
        self,
        place: ShardPlace,
        schema: pa.Schema,
        read: ReadLabels | None,
        measure: Measure,
        columns: InputColumns = None,
    ) -> None:
        """Write shards.

        Args:
            place: where they are written.
            schema: as ``labelled_schema`` returns it.
            read: returns the value of each label, as ``Targets.read`` does. None: there are no labels.
            measure: returns the length of each input.
            columns: of inputs that are rows or records.
        """
        self._schema, self._read, self._measure, self._columns = schema, read, measure, columns
        self._shards = ShardWriter(place, schema)
        self._is_json = read is not None and schema.field(VALUE).type == pa.string()

    def add(self, inputs: Sequence[Natural], labels: Sequence[str]) -> None:
        """Add cleaned rows. Raises DataError as ``TableRows.of``."""
        cells = self._columns.read(cast(Sequence[Any], inputs)).cells if self._columns else {INPUT: inputs}
        columns: dict[str, Any] = {**cells, LENGTH: self._measure(inputs)}
        if self._read:
            values = self._read(labels)
            columns[VALUE] = [json.dumps(value) for value in values] if self._is_json else values
        arrays = [_array(columns[field.name], field.type) for field in self._schema]
        self._shards.add(pa.record_batch(arrays, self._schema))

    def close(self) -> list[Shard]:
        """Write what is left, and return all shards."""
        return self._shards.close()


def _array(cells: Any, kind: pa.DataType) -> pa.Array:
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(pa.array(cells.ravel(), kind.value_type), type=kind)
    return pa.array(cells, kind)


class BlockWriter:
    """Tokenises documents, and writes them in blocks. Tokens at the end that fill no block are left out."""

    def __init__(self, place: ShardPlace, tokenizer: LanguageTokenizer) -> None:
        self._tokenizer, self._length = tokenizer, tokenizer.facts["max_length"]
        # The last token of each is only a target.
        block = pa.list_(token_type(tokenizer), self._length + 1)
        self._schema = pa.schema({TOKENS: block, LENGTH: pa.int32()})
        self._shards = ShardWriter(place, self._schema)
        self._rest = tokenizer.join([])

    def add(self, inputs: Sequence[Natural], labels: Sequence[str]) -> None:  # noqa: ARG002
        """Add cleaned documents."""
        tokens = np.concatenate([self._rest, self._tokenizer.join(cast(Sequence[str], inputs))])
        count = max(len(tokens) - 1, 0) // self._length
        self._rest = tokens[count * self._length :]
        if not count:
            return
        windows = np.lib.stride_tricks.sliding_window_view(tokens, self._length + 1)[:: self._length][:count]
        blocks = pa.FixedSizeListArray.from_arrays(pa.array(windows.reshape(-1)), self._length + 1)
        lengths = pa.array(np.full(count, self._length, np.int32))
        self._shards.add(pa.record_batch([blocks.cast(self._schema.field(TOKENS).type), lengths], self._schema))

    def close(self) -> list[Shard]:
        """Write what is left, and return all shards."""
        return self._shards.close()
