"""Records: samples of several fields, such as a text with a picture, as the tensors of a processor for each field."""

import base64
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from upath import UPath

from app.config import ColumnsConfig, DataConfig
from app.data.audio import AudioProcessor
from app.data.examples import Modality
from app.data.images import ImageProcessor
from app.data.processor import Processor, WeighingProcessor
from app.data.rows import Record, RecordColumns, Records, RowColumns, is_missing
from app.data.tabular import TabularProcessor
from app.data.text import TextProcessor
from app.errors import DataError, short_repr
from app.import_string import import_attribute
from app.storage import to_path, write_atomically
from app.tensors import Tensors, TensorSpec

SETTINGS_FILE = "fields.json"
PRESENT = "present"
_PROCESSORS: dict[str, type[Processor]] = {
    "text": TextProcessor,
    "image": ImageProcessor,
    "audio": AudioProcessor,
    "row": TabularProcessor,
}


def processor_type(kind: str) -> type[Processor]:
    """Return the processor of a kind of field, which may be an import string. Raises RecipeError if there is none."""
    return _PROCESSORS.get(kind) or cast(type[Processor], import_attribute(kind))


def is_file(kind: str) -> bool:
    """Return whether a field of this kind is the content of a file, as an image is."""
    return processor_type(kind).modality not in ("text", "row")


def kept_columns(columns: ColumnsConfig) -> RecordColumns:
    """Return the columns of shards of records."""
    fields: dict[str, RowColumns | Literal["text", "file"]] = {}
    for name, field in columns.fields.items():
        fields[name] = "file" if is_file(field.kind) else "text"
        if field.columns is not None:
            fields[name] = RowColumns.of(field.columns, columns.categories)
    return RecordColumns(fields)


class _Settings(BaseModel):
    kinds: dict[str, str]
    """The kind of each field."""


class RecordProcessor:
    """The tensors of each field as ``FIELD_NAME``, and ``FIELD_present``, int64 of shape (rows, 1): 1 if it is given.

    Every batch has all tensors. A missing field is zeros: a grey picture, or the means of the columns. A missing text
    is an empty one, because attention needs a token. All texts of a batch have one length.
    """

    modality: ClassVar[Modality] = "record"

    def __init__(self, kinds: Mapping[str, str], processors: Mapping[str, Processor]) -> None:
        """``kinds`` and ``processors`` are by the name of the field."""
        self._kinds, self._processors = dict(kinds), dict(processors)

    @classmethod
    def of_fields(cls, columns: ColumnsConfig) -> Self:
        """Return a processor that knows the fields, and has nothing learned about them."""
        return cls({name: field.kind for name, field in columns.fields.items()}, {})

    @classmethod
    def fit(cls, inputs: Sequence[Record], config: DataConfig) -> Self:
        """Fit the processor of each field on the rows that have it. Raises DataError for a field that no row has."""
        unfitted = cls.of_fields(config.columns)
        kinds = unfitted._kinds
        records = unfitted._read(inputs)
        processors = {}
        for name, kind in kinds.items():
            if not (found := records.contents[name]):
                raise DataError(
                    f"data.columns.fields.{name}: no training row of {config.source!r} has it; leave it out, or give "
                    "rows that have it"
                ).of("fields.never", f"data.columns.fields.{name}")
            processors[name] = processor_type(kind).fit(found, _config_of(name, config))
        fitted = cls(kinds, processors)
        fitted._require_one_length()
        return fitted

    @property
    def columns(self) -> list[str]:
        """The names of the fields, each of which a record may have."""
        return list(self._kinds)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            spec
            for name, processor in self._processors.items()
            for spec in (
                *(replace(inner, name=f"{name}_{inner.name}") for inner in processor.inputs),
                TensorSpec(f"{name}_{PRESENT}", np.dtype(np.int64), (-1, 1), values_below=2),
            )
        )

    @property
    def facts(self) -> Mapping[str, int]:
        """Those of each field as ``FIELD_NAME``, and the number of fields."""
        facts = {
            f"{name}_{fact}": value
            for name, processor in self._processors.items()
            for fact, value in processor.facts.items()
        }
        return facts | {"num_fields": len(self._processors)}

    def encode(self, inputs: Sequence[Record]) -> Tensors:
        records = inputs if isinstance(inputs, Records) else self._read(inputs)
        tensors: dict[str, NDArray[Any]] = {}
        for name, processor in self._processors.items():
            has, contents = records.has[name], records.contents[name]
            with _errors_of(name):
                encoded = processor.encode(contents) if len(contents) else self._blanks[name]
            for inner, values in encoded.items():
                tensors[f"{name}_{inner}"] = values if has.all() else _spread(values, has, self._blanks[name][inner])
            tensors[f"{name}_{PRESENT}"] = has.astype(np.int64)[:, None]
        return self._with_one_length(tensors)

    def weigh(self, item: Record) -> float:
        """Return the sum of the weights of the record's fields. Raises DataError as ``encode`` does."""
        weight = 0.0
        for name, value in self._fields(item).items():
            if isinstance(processor := self._processors[name], WeighingProcessor):
                with _errors_of(name):
                    weight += processor.weigh(value)
        return weight

    def measure(self, inputs: Sequence[Record]) -> tuple[NDArray[np.int64], NDArray[np.str_]]:
        """Return the characters of each record's longest text, and the names of the fields that it has."""
        texts = [name for name, kind in self._kinds.items() if processor_type(kind).modality == "text"]
        lengths, groups = [], []
        for record in inputs:
            lengths.append(max((len(record[name]) for name in texts if name in record), default=0))
            groups.append(", ".join(name for name in self._kinds if name in record))
        return np.array(lengths, np.int64), np.array(groups, np.str_)

    def absent(self, tensors: Tensors) -> frozenset[str]:
        missing = [name for name in self._processors if not tensors[f"{name}_{PRESENT}"].any()]
        names = [[*(spec.name for spec in self._processors[name].inputs), PRESENT] for name in missing]
        return frozenset(f"{name}_{inner}" for name, inners in zip(missing, names, strict=True) for inner in inners)

    def split_media(self, item: Record) -> tuple[str, bytes | None]:
        """Return what a page shows of a record: its texts and rows in words, and its first picture."""
        words = [f"{name}: {value}" for name, value in item.items() if not is_file(self._kinds[name])]
        return "; ".join(words), next((item[name] for name in item if self._kinds[name] == "image"), None)

    def _read(self, inputs: Sequence[Record]) -> Records:
        """Return records as a request or a sample has them. Raises DataError for one that cannot be read."""
        return Records.of(list(map(self._fields, inputs)), list(self._kinds))

    def _fields(self, given: Record) -> dict[str, Any]:
        """Return the fields that a record has, as their processors read them."""
        known = ", ".join(self._kinds)
        if not isinstance(given, Mapping):
            raise DataError(f"a record is {short_repr(given)}: expected an object with some of the fields {known}").of(
                "row.not_an_object"
            )
        if unknown := [name for name in given if name not in self._kinds]:
            raise DataError(f"a record has the field {unknown[0]!r}: expected {known}").of("fields.unknown")
        record = {name: self._content(name, value) for name, value in given.items() if not _is_absent(value)}
        if not record:
            raise DataError(f"a record has none of its fields: expected at least one of {known}").of("fields.none")
        return record

    def _content(self, name: str, value: Any) -> Any:
        """Return a field as its processor reads it. Raises DataError if its value is of another kind."""
        kind = self._kinds[name]
        if processor_type(kind).modality == "row" or (is_file(kind) and isinstance(value, bytes)):
            return value  # its processor checks it
        if not isinstance(value, str):
            expected = "the content of a file in base64" if is_file(kind) else "a text"
            raise DataError(f"field {name!r} is {type(value).__name__}: expected {expected}").of("field.type", name)
        if not is_file(kind):
            return value
        try:
            return base64.b64decode(value, validate=True)
        except ValueError as error:
            raise DataError(f"field {name!r} is not base64 ({error}): encode the content of a file").of(
                "field.not_base64", name
            ) from error

    @cached_property
    def _blanks(self) -> dict[str, Tensors]:
        """One row of each field, for records that do not have it."""
        return {name: _blank(processor) for name, processor in self._processors.items()}

    @cached_property
    def _varying(self) -> list[str]:
        """The names of the tensors with a length that varies."""
        return [spec.name for spec in self.inputs if -1 in spec.shape[1:2]]

    def _require_one_length(self) -> None:
        """Raise DataError if tensors whose length varies have several limits: they are padded to one length."""
        varying = [spec for spec in self.inputs if spec.name in self._varying]
        for spec in varying[1:]:
            if spec.max_length != (first := varying[0]).max_length:
                raise DataError(
                    f"data.columns.fields: the length of {spec.name} varies up to {spec.max_length}, and that of "
                    f"{first.name} up to {first.max_length}; a model has one length: give both the same max_length, or "
                    "let a processor return tensors of one size"
                ).of("fields.lengths", "data.columns.fields")

    def _with_one_length(self, tensors: dict[str, NDArray[Any]]) -> Tensors:
        """Pad texts with zeros to the longest: ids of the padding token, and a mask that leaves it out."""
        longest = max((tensors[name].shape[1] for name in self._varying), default=0)
        for name in self._varying:
            missing = longest - tensors[name].shape[1]
            tensors[name] = np.pad(tensors[name], [(0, 0), (0, missing)]) if missing else tensors[name]
        return tensors

    def save(self, folder: UPath) -> None:
        """Write the files of each field as ``FIELD.NAME``: a version has no folders."""
        for name, processor in self._processors.items():
            with tempfile.TemporaryDirectory(prefix="rayloom-field-") as temporary:
                processor.save(to_path(temporary))
                for file in to_path(temporary).iterdir():
                    write_atomically(folder / f"{name}.{file.name}", file.read_bytes())
        write_atomically(folder / SETTINGS_FILE, _Settings(kinds=self._kinds).model_dump_json(indent=1).encode())

    @classmethod
    def load(cls, folder: UPath) -> Self:
        kinds = _Settings.model_validate_json((folder / SETTINGS_FILE).read_bytes()).kinds
        files = [file for file in folder.iterdir() if file.is_file()]
        processors = {}
        for name, kind in kinds.items():
            with tempfile.TemporaryDirectory(prefix="rayloom-field-") as temporary:
                for file in (file for file in files if file.name.startswith(f"{name}.")):
                    (to_path(temporary) / file.name.removeprefix(f"{name}.")).write_bytes(file.read_bytes())
                processors[name] = processor_type(kind).load(to_path(temporary))
        return cls(kinds, processors)


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Add the field's name to a DataError."""
    try:
        yield
    except DataError as error:
        raise DataError(f"field {name!r}: {error}").of(error.rule, error.key) from error


def _is_absent(value: Any) -> bool:
    """Return whether a field has no value, or is a row in which every value is missing."""
    if isinstance(value, Mapping) and value:
        return all(map(is_missing, value.values()))
    return value in (None, "")


def _config_of(name: str, config: DataConfig) -> DataConfig:
    """Return the configuration of a field, with the numbers and the categories among its own columns."""
    own, columns = config.columns.fields[name].columns or (), config.columns
    kinds = {"numbers": columns.numbers, "categories": columns.categories}
    named = {kind: [column for column in given if column in own] for kind, given in kinds.items()}
    return config.model_copy(update={"columns": columns.model_copy(update=named)})


def _blank(processor: Processor) -> Tensors:
    if processor.modality == "text":
        return processor.encode([""])
    return {
        spec.name: np.zeros([1, *(spec.max_length or 2 if size == -1 else size for size in spec.shape[1:])], spec.dtype)
        for spec in processor.inputs
    }


def _spread(values: NDArray[Any], has: NDArray[np.bool_], blank: NDArray[Any]) -> NDArray[Any]:
    """Return values at the rows that have them, and ``blank`` at the others. Both are padded to one length."""
    spread = np.zeros((len(has), *np.maximum(values.shape[1:], blank.shape[1:])), values.dtype)
    for rows, given in ((has, values), (~has, blank)):
        # Zeros are there already. A large picture is not written again.
        if rows.any() and given.any():
            inner: tuple[Any, ...] = tuple(map(slice, given.shape[1:]))
            spread[(rows, *inner)] = given
    return spread
