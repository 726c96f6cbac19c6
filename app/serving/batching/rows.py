"""Tensors as rows: their first axis is the batch."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from app.errors import RequestError
from app.tensors import Tensors


def rows_of(tensors: Tensors) -> int:
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


def shape_of(tensors: Tensors) -> Hashable:
    """What tensors must have in common to be joined: their names, their types and the shape of a row."""
    return tuple(sorted((name, tensor.dtype, tensor.shape[1:]) for name, tensor in tensors.items()))


def cut(tensors: Tensors, start: int, stop: int) -> Tensors:
    """The rows from ``start`` to before ``stop``, not copied."""
    return {name: tensor[start:stop] for name, tensor in tensors.items()}


def taken(tensors: Tensors, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Tensors:
    """Some rows of tensors, copied."""
    return {name: tensor[rows] for name, tensor in tensors.items()}


def by_shape(parts: Iterable[Tensors]) -> list[list[int]]:
    """The places of the parts of each shape, which can be joined."""
    places: defaultdict[Hashable, list[int]] = defaultdict(list)
    for place, part in enumerate(parts):
        places[shape_of(part)].append(place)
    return list(places.values())


def in_order(places: Sequence[Sequence[int] | NDArray[np.intp]], parts: Sequence[Tensors]) -> Tensors:
    """The rows of all parts, joined and sorted by their places."""
    return taken(join(parts), np.argsort(np.concatenate(places)))


def join(parts: Sequence[Tensors]) -> Tensors:
    """The rows of all parts, in order; a single part is given back as it is."""
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
