"""Named tensors: what a processor makes, an engine runs and a request carries."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from app.errors import RequestError

Tensors = Mapping[str, NDArray[Any]]

OUTPUT = "logits"
"""What the one output of every exported model is called."""

Dtype = Literal[
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64",
]  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor must be. A size of -1 varies; the first is the batch.

    ``longest`` bounds the sizes that vary beside the batch; ``values_below`` bounds the values, from 0.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    longest: int | None = None
    values_below: int | None = None

    def check(self, tensor: NDArray[Any]) -> None:
        """Raises RequestError if ``tensor`` is not one of these; it is named."""
        self.check_dtype(tensor.dtype)
        if len(tensor.shape) != len(self.shape) or not all(map(self._takes, range(len(self.shape)), tensor.shape)):
            most = f" up to {self.longest}" if self.longest else ""
            raise RequestError(
                f"input {self.name!r} has shape {list(tensor.shape)}: expected {list(self.shape)}, where the first -1 "
                f"is the number of rows and each other any size{most}"
            )
        if self.values_below is not None and not (tensor.min() >= 0 and tensor.max() < self.values_below):
            raise RequestError(
                f"input {self.name!r} has values from {tensor.min()} to {tensor.max()}: "
                f"expected 0 to {self.values_below - 1}"
            )

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raises RequestError if ``dtype`` is another; the tensor is named."""
        if dtype != self.dtype:
            raise RequestError(f"input {self.name!r} is {dtype}: expected {self.dtype}")

    def _takes(self, axis: int, size: int) -> bool:
        expected = self.shape[axis]
        if expected != -1:
            return size == expected
        return size > 0 and (axis == 0 or self.longest is None or size <= self.longest)


class Tensor(BaseModel):
    """A tensor that a model takes or gives, as manifests write it. A size of -1 varies; the first is the batch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    dtype: Dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, spec: TensorSpec) -> Self:
        """The tensor that an engine describes."""
        return cls.model_validate({"name": spec.name, "dtype": spec.dtype.name, "shape": spec.shape})

    def spec(self, longest: int | None = None) -> TensorSpec:
        """As engines describe it; ``longest`` bounds the sizes that vary beside the batch."""
        return TensorSpec(self.name, np.dtype(self.dtype), self.shape, longest)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.shape)}"


def check_tensors(tensors: Tensors, specs: Sequence[TensorSpec]) -> None:
    """Compare tensors with what is expected.

    Raises:
        RequestError: a tensor is missing, not known, of another dtype, shape or range of values, or varies in
            size from the first one; it is named.
    """
    names = [spec.name for spec in specs]
    if unknown := [name for name in tensors if name not in names]:
        raise RequestError(f"input {unknown[0]!r} is not known: expected {', '.join(names)}")
    sizes: list[tuple[int, ...]] = []
    for spec in specs:
        if spec.name not in tensors:
            raise RequestError(f"input {spec.name!r} is missing: expected {', '.join(names)}")
        tensor = tensors[spec.name]
        spec.check(tensor)
        sizes.append(tuple(given for given, size in zip(tensor.shape, spec.shape, strict=True) if size == -1))
        if sizes[-1] != sizes[0]:
            raise RequestError(
                f"input {spec.name!r} has shape {list(tensor.shape)}, {names[0]!r} has "
                f"{list(tensors[names[0]].shape)}: expected the same rows and length"
            )


def count_rows(tensors: Tensors) -> int:
    """How many rows the tensors have.

    Raises:
        RequestError: there are none, or a tensor has other rows than the first.
    """
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    rows = {shape[0] if shape else 0 for shape in shapes.values()}
    if len(rows) != 1 or 0 in rows:
        given = ", ".join(f"{name!r} {list(shape)}" for name, shape in shapes.items()) or "no tensors"
        raise RequestError(f"a request of {given}: expected the same rows in each tensor, one or more")
    return rows.pop()


def shape_key(tensors: Tensors) -> Hashable:
    """What tensors must have in common to be joined: their names, their types and the shape of a row."""
    return tuple(sorted((name, tensor.dtype, tensor.shape[1:]) for name, tensor in tensors.items()))


def slice_rows(tensors: Tensors, start: int, stop: int) -> Tensors:
    """The rows from ``start`` to before ``stop``, not copied."""
    return {name: tensor[start:stop] for name, tensor in tensors.items()}


def select_rows(tensors: Tensors, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Tensors:
    """Some rows of tensors, copied."""
    return {name: tensor[rows] for name, tensor in tensors.items()}


def group_by_shape(parts: Iterable[Tensors]) -> list[list[int]]:
    """The places of the parts of each shape, which can be joined."""
    places: defaultdict[Hashable, list[int]] = defaultdict(list)
    for place, part in enumerate(parts):
        places[shape_key(part)].append(place)
    return list(places.values())


def restore_order(places: Sequence[Sequence[int] | NDArray[np.intp]], parts: Sequence[Tensors]) -> Tensors:
    """The rows of all parts, joined and sorted by their places."""
    return select_rows(concat_rows(parts), np.argsort(np.concatenate(places)))


def concat_rows(parts: Sequence[Tensors]) -> Tensors:
    """The rows of all parts, in order; a single part is given back as it is."""
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
