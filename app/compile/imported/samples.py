"""The rows on which an imported model is compared: a person's own, or random ones in the range of the model."""

import csv
import hashlib
import json
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from app.data.prepared import IGNORED, Batch, Dataset
from app.data.sources.lines import parse_json
from app.engines.base import Signature
from app.errors import DataError
from app.tensors import Tensor, TensorSpec

LABELS, LABEL = "labels", "label"
"""The array of an npz file and the column of a table that hold the class of each row."""

_MAX_LENGTHS = 8
"""Variants are timed at each length, so there are few."""


@dataclass(frozen=True)
class TensorRows(Dataset):
    """Rows of tensors, in memory, with the class of each if it is known."""

    rows: Mapping[str, Sequence[NDArray[Any]]]
    """The rows of each input, without the axis of the rows."""

    row_lengths: Sequence[int]
    classes: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.row_lengths)

    @property
    def lengths(self) -> Sequence[int]:
        """The length of each row."""
        return self.row_lengths

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the rows of ``indices``, which have one length."""
        inputs = {name: np.stack([rows[index] for index in indices]) for name, rows in self.rows.items()}
        targets = np.full(len(indices), IGNORED) if self.classes is None else self.classes[list(indices)]
        return Batch(inputs, targets)

    def select(self, indices: Sequence[int]) -> "TensorRows":
        """Return some rows."""
        return TensorRows(
            {name: [rows[index] for index in indices] for name, rows in self.rows.items()},
            [self.lengths[index] for index in indices],
            None if self.classes is None else self.classes[list(indices)],
        )

    @property
    def fingerprint(self) -> str:
        """sha256 over every row and class, in order."""
        digest = hashlib.sha256()
        for name, rows in self.rows.items():
            digest.update(name.encode())
            for row in rows:
                # The memory of objects holds pointers, which differ between runs.
                digest.update(repr(row.tolist()).encode() if row.dtype.hasobject else row.tobytes())
        digest.update(b"" if self.classes is None else self.classes.tobytes())
        return digest.hexdigest()


def read_rows(path: Path, signature: Signature, labels: Sequence[str]) -> TensorRows:
    """Read a person's rows from an npz, parquet, csv or jsonl file, whose arrays or columns are named as the inputs.

    Raises:
        DataError: the file cannot be read, an input is missing or has another shape or type, or a label is unknown.
    """
    columns = _read_npz(path) if path.suffix == ".npz" else _read_table(path)
    found, key = dict(columns), LABELS if path.suffix == ".npz" else LABEL
    for spec in signature.inputs:
        if spec.name not in found:
            raise DataError(
                f"{str(path)!r} has no {spec.name!r}: expected {', '.join(spec.name for spec in signature.inputs)}, "
                f"and {key!r} for an accuracy; it has {', '.join(found)}"
            ).of("columns.missing")
    rows = {spec.name: [_row(spec, row, path) for row in found[spec.name]] for spec in signature.inputs}
    counts = {name: len(found[name]) for name in (*rows, *([key] if key in found else []))}
    if len(set(counts.values())) > 1 or not min(counts.values()):
        raise DataError(f"{str(path)!r} has {counts}: expected the same number of rows in each, and some").of(
            "rows.differ"
        )
    classes = _classes(found[key], labels, path) if key in found else None
    return TensorRows(rows, _lengths(rows, signature, str(path)), classes)


def _read_npz(path: Path) -> Mapping[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: np.atleast_1d(arrays[name]) for name in arrays.files}
    # TypeError: it holds a single array. The others: it was cut off.
    except (OSError, ValueError, TypeError, EOFError, BadZipFile, zlib.error) as error:
        raise DataError(f"{str(path)!r} cannot be read as npz ({error}): write it with numpy.savez").of(
            "file.unreadable"
        ) from error


def _read_table(path: Path) -> Mapping[str, Sequence[Any]]:
    readers = {".csv": _read_csv, ".parquet": _read_parquet, ".jsonl": _read_json_lines}
    if path.suffix not in readers:
        raise DataError(f"--samples {str(path)!r} ends in {path.suffix!r}: expected .npz, {', '.join(readers)}").of(
            "file.extension", "--samples"
        )
    try:
        return readers[path.suffix](path)
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{str(path)!r} is not a {path.suffix[1:]} table ({error})").of("file.unreadable") from error


def _read_csv(path: Path) -> Mapping[str, Sequence[str]]:
    """Return the cells as they are written: only an input's type says whether 00501 is a number."""
    csv.field_size_limit(max(csv.field_size_limit(), path.stat().st_size))  # a cell may be the numbers of a picture
    with path.open(encoding="utf-8-sig", newline="") as file:
        names, *rows = [*csv.reader(file, strict=True)] or [[]]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two columns are called {twice[0]!r}")
    # An empty line is no row.
    rows = [row for row in rows if row]
    for number, row in enumerate(rows, start=1):
        if len(row) != len(names):
            raise ValueError(f"row {number} has {len(row)} cells, the first line {len(names)}")
    return dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(names, ())


def _read_json_lines(path: Path) -> Mapping[str, Sequence[Any]]:
    lines = enumerate(path.read_bytes().split(b"\n"), start=1)
    rows = [parse_json(line, partial(_place, number, path)) for number, line in lines if line.strip()]
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


def _place(number: int, path: Path) -> str:
    return f"line {number} of {str(path)!r}"


def _read_parquet(path: Path) -> Mapping[str, Sequence[Any]]:
    from pyarrow.parquet import ParquetFile

    # Without pandas' notes, which may make a column an index.
    table = ParquetFile(path).read().to_pandas(ignore_metadata=True)
    return {str(name): table[name].tolist() for name in table.columns}


def _row(spec: TensorSpec, given: Any, path: Path) -> NDArray[Any]:
    """Return one row of an input. A number or a list in a csv cell is text."""
    try:
        if isinstance(given, str) and not spec.dtype.hasobject:
            given = _number_or_list(given)
        # A parquet table has nested lists as arrays of arrays.
        raw = np.asarray(given.tolist() if isinstance(given, np.ndarray) and given.dtype == object else given)
        row = _cast(raw, spec.dtype)
    except (TypeError, ValueError) as error:
        raise DataError(f"{str(path)!r}: a row of {Tensor.of(spec)} cannot be read: {error}").of(
            "rows.unreadable"
        ) from error
    # A table has plain numbers for an input with one column.
    if raw.ndim == 0 and spec.shape[1:] == (1,):
        row = row.reshape(1)
    if row.ndim != len(spec.shape) - 1 or any(
        size not in (-1, given) for size, given in zip(spec.shape[1:], row.shape, strict=True)
    ):
        raise DataError(
            f"{str(path)!r}: a row of {spec.name!r} has shape {list(row.shape)}: expected {list(spec.shape[1:])}"
        ).of("row.shape")
    return row


def _number_or_list(cell: str) -> Any:
    """Return what a cell means for an input of numbers. Raises ValueError if it is neither."""
    if (text := cell.strip()).startswith("["):
        return json.loads(text)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if "_" in text:  # Python's own way to write a number
        raise ValueError(f"it holds {cell!r}, expected a number")
    try:
        # A large whole number is no float.
        return int(text)
    except ValueError:
        return float(text)


def _cast(raw: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Convert an array. Raises ValueError if it holds texts for numbers, or numbers that the type does not have."""
    if dtype.hasobject:
        if odd := [item for item in raw.ravel().tolist() if not isinstance(item, str | bytes)]:
            raise ValueError(f"it holds {odd[0]!r}, expected a text")
        return raw.astype(dtype)
    if raw.dtype.kind not in "biuf":
        raise ValueError(f"it holds {raw.dtype}, expected {dtype}")
    # A cast of NaN warns. The comparison below finds it.
    with np.errstate(invalid="ignore"):
        row: NDArray[Any] = raw.astype(dtype)
    if dtype.kind in "biu" and (odd := raw[row != raw]).size:
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        raise ValueError(f"it has the value {odd.flat[0]}, expected whole numbers from {low} to {high}")
    return row


def _classes(given: Sequence[Any], labels: Sequence[str], path: Path) -> NDArray[np.int64]:
    """Return the class of each row: a number as it is, a word by its place in the labels."""
    known = f"the labels are {', '.join(labels)}" if labels else "no labels are known: give them with --labels"
    classes = []
    for label in given:
        try:
            classes.append(_class(label.decode() if isinstance(label, bytes) else label, labels))
        except ValueError as error:
            raise DataError(f"{str(path)!r} has the label {label!r}: {error}, and {known}").of(
                "labels.unknown"
            ) from error
    return np.array(classes, np.int64)


def _class(label: Any, labels: Sequence[str]) -> int:
    """Return the class that a word or a number means. Raises ValueError if it means none, or two."""
    named = labels.index(str(label)) if str(label) in labels else None
    number = _column(label, len(labels) or sys.maxsize)
    if named is None and number is None:
        raise ValueError("expected the number of a column or a word")
    if None not in (named, number) and named != number:
        raise ValueError("expected a word that is not the number of another column")
    return number if named is None else named  # type: ignore[return-value]


def _column(label: Any, count: int) -> int | None:
    """Return the number of a column; None if it is none. 1.0 is one, and 01 is not."""
    text = str(int(label) if isinstance(label, bool | np.bool_) else label).removesuffix(".0")
    return int(text) if text.isdecimal() and str(int(text)) == text and int(text) < count else None


def random_rows(signature: Signature, sizes: Mapping[str, Sequence[int]], count: int) -> TensorRows:
    """Return rows of random numbers: floats around 0, whole numbers below the input's limit, else 0 and 1.

    Args:
        sizes: the values of each size that varies, by name. Where one has several, rows take them in turns.
    """
    # Seeded, so that an import can be repeated.
    generator = np.random.default_rng(0)
    rows: dict[str, list[NDArray[Any]]] = {spec.name: [] for spec in signature.inputs}
    for index in range(count):
        for spec in signature.inputs:
            shape = tuple(sizes[name][index % len(sizes[name])] for name in _shape_names(spec) if name in sizes)
            varying = iter(shape)
            full = [next(varying) if size == -1 else size for size in spec.shape[1:]]
            rows[spec.name].append(_random(spec, full, generator))
    return TensorRows(rows, _lengths(rows, signature, "the random rows"))


def varying_sizes(signature: Signature) -> list[str]:
    """Return the names of the sizes that vary in the inputs, other than the rows."""
    return list(dict.fromkeys(name for spec in signature.inputs for name in _shape_names(spec)))


def _shape_names(spec: TensorSpec) -> tuple[str, ...]:
    return spec.sizes[1:] if spec.shape[0] == -1 else spec.sizes


def _random(spec: TensorSpec, shape: Sequence[int], generator: np.random.Generator) -> NDArray[Any]:
    kind = spec.dtype.kind
    if kind == "O":
        return np.array([f"word{number}" for number in generator.integers(0, 100, shape).flat], object).reshape(shape)
    if kind == "f":
        return generator.standard_normal(shape).astype(spec.dtype)
    if kind == "b":
        return generator.integers(0, 2, shape).astype(spec.dtype)
    # Token ids or pixels, for example.
    if spec.values_below is not None or spec.dtype == np.uint8:
        return generator.integers(0, spec.values_below or 256, shape).astype(spec.dtype)
    if not shape:
        return np.ones((), spec.dtype)
    # Without a known limit, only 0 and 1 are certainly in range, as in masks.
    numbers = generator.integers(0, 2, shape)
    numbers[..., :1] = 1  # a mask that hides everything gives NaN
    return numbers.astype(spec.dtype)


def _lengths(rows: Mapping[str, Sequence[NDArray[Any]]], signature: Signature, source: str) -> list[int]:
    """Return the length of each row: the first size that varies. Raises DataError if rows of one length differ."""
    first = next(iter(rows.values()))
    if (place := signature.length_axis) is None:
        return [0] * len(first)
    name, axis = place
    lengths = [row.shape[axis - 1] for row in rows[name]]
    if len(found := set(lengths)) > _MAX_LENGTHS:
        raise DataError(
            f"{source!r} has rows of {len(found)} lengths (axis {axis} of {name!r}): pad them to {_MAX_LENGTHS} "
            "lengths at most, as requests should be"
        ).of("lengths.too_many")
    shapes: dict[int, tuple[tuple[int, ...], ...]] = {}
    for index, length in enumerate(lengths):
        shape = tuple(row[index].shape for row in rows.values())
        # Rows of one length are stacked into a batch.
        if shapes.setdefault(length, shape) != shape:
            raise DataError(
                f"{source!r} has rows of length {length} whose other sizes differ ({shapes[length]} and {shape}): pad "
                "them to the same"
            ).of("shapes.differ")
    return lengths
