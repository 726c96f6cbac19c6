"""Named tensors, as processors make them, engines run them and requests carry them."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from app.errors import RequestError

Tensors = Mapping[str, NDArray[Any]]

OUTPUT = "logits"
"""The name of the only output of every exported model."""

Dtype = Literal[
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64", "string",
]  # fmt: skip
_STRINGS = np.dtype(np.object_)
"""The dtype of strings: arrays of ``str`` or ``bytes`` objects."""

_FEW = 4
"""Minimum numbers in a column with its own magnitude: a single number may be near 0 by chance."""

_SMALL = 1e-3
"""The minimum magnitude of a column, in an output whose numbers are 1 or more.

float32 computes a sigmoid or a softmax to about 1e-7, however small the result. That is 1e-4, the limit of fp32,
of this magnitude.
"""

_MANY, _RARE = 32, 0.1
"""The least magnitude of one of so many columns, as a share of the output's.

They are the features of one vector, and rounding is alike in all. A feature may be nearly always 0, as after a ReLU.
"""


@dataclass(frozen=True)
class TensorSpec:
    """The expected type and shape of a tensor. A size of -1 varies; the first is the batch.

    ``max_length`` limits the varying sizes other than the batch. If ``values_below`` is not None, values are at
    least ``values_from`` and less than ``values_below``. ``sizes`` names the varying sizes in order. Sizes with one
    name are equal; without names, those at the same place are.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    max_length: int | None = None
    values_below: int | None = None
    sizes: tuple[str, ...] = ()
    values_from: int = 0

    def check(self, tensor: NDArray[Any]) -> None:
        """Raise RequestError, which names the tensor, if it does not fit."""
        self.check_dtype(tensor.dtype)
        if len(tensor.shape) != len(self.shape) or not all(map(self._takes, range(len(self.shape)), tensor.shape)):
            limit = f" up to {self.max_length}" if self.max_length else ""
            raise RequestError(
                f"input {self.name!r} has shape {list(tensor.shape)}: expected {list(self.shape)}, where the first -1 "
                f"is the number of rows and each other any size{limit}"
            ).of("tensor.shape", self.name)
        self.check_values(tensor)

    def check_values(self, tensor: NDArray[Any]) -> None:
        """Raise RequestError, which names the tensor, if a value is out of range."""
        if self.values_below is not None and not (
            tensor.min() >= self.values_from and tensor.max() < self.values_below
        ):
            raise RequestError(
                f"input {self.name!r} has values from {tensor.min()} to {tensor.max()}: "
                f"expected {self.values_from} to {self.values_below - 1}"
            ).of("tensor.range", self.name)

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raise RequestError, which names the tensor, if ``dtype`` is another."""
        if dtype != self.dtype:
            raise RequestError(f"input {self.name!r} is {dtype_name(dtype)}: expected {dtype_name(self.dtype)}").of(
                "tensor.type"
            )

    def within(self, *others: "TensorSpec") -> Self:
        """Return the spec, limited to values that each of ``others`` allows too."""
        specs: tuple[TensorSpec, ...] = (self, *others)
        limited = [spec for spec in specs if spec.values_below is not None]
        if not limited:
            return self
        return replace(
            self,
            values_from=max(spec.values_from for spec in limited),
            values_below=min(spec.values_below for spec in limited if spec.values_below is not None),
        )

    def _takes(self, axis: int, size: int) -> bool:
        expected = self.shape[axis]
        if expected != -1:
            return size == expected
        return size > 0 and (axis == 0 or self.max_length is None or size <= self.max_length)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return numpy's name of a dtype; ``string`` for arrays of strings."""
    return "string" if dtype == _STRINGS else dtype.name


class Tensor(BaseModel):
    """An input or output of a model, as manifests write it. A size of -1 varies; the first is the batch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    sizes: tuple[str, ...] = ()
    """Names of the varying sizes, in order; empty if the model's file has none."""

    max_length: int | None = None
    """Limit of the varying sizes other than the batch; None if it is unknown."""

    values_below: int | None = None
    """Exclusive limit of the values, such as the number of tokens; None if it is unknown."""

    @classmethod
    def of(cls, spec: TensorSpec) -> Self:
        """Convert an engine's description."""
        return cls.model_validate(
            {
                "name": spec.name,
                "dtype": dtype_name(spec.dtype),
                "shape": spec.shape,
                "sizes": spec.sizes,
                "max_length": spec.max_length,
                "values_below": spec.values_below,
            }
        )

    def spec(self, max_length: int | None = None) -> TensorSpec:
        """Convert to an engine's description. ``max_length`` limits the varying sizes other than the batch."""
        dtype = _STRINGS if self.dtype == "string" else np.dtype(self.dtype)
        return TensorSpec(self.name, dtype, self.shape, max_length or self.max_length, self.values_below, self.sizes)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.shape)}"


def check_tensors(tensors: Tensors, specs: Sequence[TensorSpec]) -> None:
    """Compare tensors with the expected ones.

    Raises:
        RequestError: a tensor is missing or unknown, has another dtype, shape or range of values, or differs from the
            first one in a varying size. The message names it.
    """
    names = [spec.name for spec in specs]
    if unknown := [name for name in tensors if name not in names]:
        raise RequestError(f"input {unknown[0]!r} is not known: expected {', '.join(names)}").of("input.unknown")
    found: dict[str | int, tuple[int, str]] = {}
    for spec in specs:
        if spec.name not in tensors:
            raise RequestError(f"input {spec.name!r} is missing: expected {', '.join(names)}").of(
                "input.missing", spec.name
            )
        tensor = tensors[spec.name]
        spec.check(tensor)
        varying = [given for given, size in zip(tensor.shape, spec.shape, strict=True) if size == -1]
        keys: Sequence[str | int] = spec.sizes or range(len(varying))
        for key, given in zip(keys, varying, strict=True):
            size, other = found.setdefault(key, (given, spec.name))
            if size != given:
                raise RequestError(
                    f"input {spec.name!r} has shape {list(tensor.shape)}, {other!r} has "
                    f"{list(tensors[other].shape)}: expected the same {key if spec.sizes else 'rows and length'}"
                ).of("shapes.differ", spec.name)


def count_rows(tensors: Tensors) -> int:
    """Return the number of rows.

    Raises:
        RequestError: there are no rows, or tensors have different numbers of them.
    """
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    rows = {shape[0] if shape else 0 for shape in shapes.values()}
    if len(rows) != 1 or 0 in rows:
        given = ", ".join(f"{name!r} {list(shape)}" for name, shape in shapes.items()) or "no tensors"
        raise RequestError(f"a request of {given}: expected the same rows in each tensor, one or more").of(
            "rows.differ"
        )
    return rows.pop()


def is_finite(tensor: NDArray[Any]) -> bool:
    """Return whether a tensor has neither NaN nor infinity. Strings have not."""
    return tensor.dtype.hasobject or bool(np.isfinite(tensor).all())


def magnitudes(groups: Sequence[Tensors]) -> Tensors:
    """Return the magnitude of each float output, in an array that broadcasts to it: a number for each column.

    It is the root mean square over the rows of all groups. With more axes, it is over all numbers of one index of an
    axis whose size does not vary, and the least of all these axes counts. One of many columns has at least a share of
    the output's magnitude.
    """
    return {
        name: _magnitude([group[name] for group in groups])
        for name, output in groups[0].items()
        if output.dtype.kind == "f"
    }


def _magnitude(arrays: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
    first, count = arrays[0], sum(array.size for array in arrays)
    fixed = [axis for axis in range(1, first.ndim) if len({array.shape[axis] for array in arrays}) == 1]
    whole: NDArray[np.float64] = np.zeros([1] * first.ndim)
    sums = dict.fromkeys((axis for axis in fixed if count >= _FEW * first.shape[axis] > 0), whole)
    for array in arrays:
        squares = np.square(array, dtype=np.float64)
        whole = whole + squares.sum()
        for axis in sums:
            others = tuple(other for other in range(first.ndim) if other != axis)
            sums[axis] = sums[axis] + squares.sum(axis=others, keepdims=True)
    overall = np.sqrt(whole / max(count, 1))
    roots = [
        np.maximum(np.sqrt(total / (count // total.size)), _RARE * overall * (total.size >= _MANY))
        for total in sums.values()
    ]
    # Above 0, so that any error of zeros is a large one.
    least = np.maximum(_SMALL * np.minimum(overall, 1.0), np.finfo(np.float32).tiny)
    magnitude: NDArray[np.float64] = np.maximum(reduce(np.minimum, roots) if roots else overall, least)
    return magnitude


def shape_key(tensors: Tensors) -> Hashable:
    """Return the names, types and row shapes of tensors. Tensors with equal keys can be concatenated."""
    return tuple(sorted((name, tensor.dtype, tensor.shape[1:]) for name, tensor in tensors.items()))


def slice_rows(tensors: Tensors, start: int, stop: int) -> Tensors:
    """Return a view of the rows from ``start`` to before ``stop``."""
    return {name: tensor[start:stop] for name, tensor in tensors.items()}


def select_rows(tensors: Tensors, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Tensors:
    """Return a copy of some rows."""
    return {name: tensor[rows] for name, tensor in tensors.items()}


def group_by_shape(parts: Iterable[Tensors]) -> list[list[int]]:
    """Return the indices of the parts by shape. The parts of a group can be concatenated."""
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, part in enumerate(parts):
        groups[shape_key(part)].append(index)
    return list(groups.values())


def restore_order(indices: Sequence[Sequence[int] | NDArray[np.intp]], parts: Sequence[Tensors]) -> Tensors:
    """Concatenate parts, and sort the rows by their indices in the original tensors."""
    return select_rows(concat_rows(parts), np.argsort(np.concatenate(indices)))


def concat_rows(parts: Sequence[Tensors]) -> Tensors:
    """Concatenate the rows of all parts. A single part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
