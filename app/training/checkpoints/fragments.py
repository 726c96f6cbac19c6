"""The fragments of parameters that this process holds under any plan, as parts for ``torch.distributed.checkpoint``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Size, Tensor

from app.config import Layout
from app.torch_internals import make_shell
from app.training.engine import TrainingEngine
from app.training.engine.deepspeed_internals import (
    HeldPart,
    Slice,
    held_part,
    is_pipeline_replica,
    master_pairs,
    slice_of,
    unpartitioned_shape,
)

if TYPE_CHECKING:  # slow to import, as parts.py says
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


@dataclass(frozen=True)
class Fragment:
    """A run of elements of a parameter, and where the optimizer keeps their float32 weight and state.

    The elements are ``start`` to ``start + length`` of the flattened local parameter. They lie in ``master`` from
    ``offset`` on. The optimizer's state of ``master`` has the same order.
    """

    name: str
    tensor_slice: Slice
    local_shape: tuple[int, ...]
    start: int
    length: int
    master: Tensor
    offset: int
    is_owned: bool
    """Whether this process writes it. Of several replicas only one is written."""
    is_trained: bool
    """Whether training changes it. Frozen weights stay as they are."""

    def of(self, flat: Tensor) -> Tensor:
        """Return the elements in ``flat``, which has the order of ``master``, as a view of shape (length,)."""
        return flat.detach().view(-1).narrow(0, self.offset, self.length)


def fragments_of(engine: TrainingEngine, layout: Layout) -> list[Fragment]:
    """Return everything that this process holds of the parameters. An untrained parameter is its own master."""
    rank = torch.distributed.get_rank()
    masters = {id(low): master for low, master in master_pairs(engine.deepspeed.optimizer)}
    return [
        _fragment(engine.names[id(parameter)], parameter, part, layout, rank)
        for parameter in engine.deepspeed.module.parameters()
        if (part := held_part(engine.deepspeed, parameter, masters)) is not None
    ]


def by_master(fragments: Iterable[Fragment]) -> list[list[Fragment]]:
    """Group the fragments by their master."""
    found: dict[int, list[Fragment]] = {}
    for fragment in fragments:
        # By ``id``, because tensors compare their elements.
        found.setdefault(id(fragment.master), []).append(fragment)
    return list(found.values())


def _fragment(name: str, parameter: Any, part: HeldPart, layout: Layout, rank: int) -> Fragment:
    tensor_slice = slice_of(parameter, layout.tensor_rank(rank))
    shape = tuple(unpartitioned_shape(parameter))
    # All tensor-parallel ranks hold the same values of a parameter that is not split.
    is_first_replica = layout.tensor_rank(rank) == 0 or tensor_slice.dim is not None
    # A partition of ZeRO is held once. Without partitions, all data-parallel ranks hold the same.
    is_written_here = part.is_partition or layout.data_rank(rank) == 0
    is_owned = is_first_replica and is_written_here and not is_pipeline_replica(parameter)
    return Fragment(
        name,
        tensor_slice,
        shape,
        part.start,
        part.length,
        part.master,
        part.offset,
        is_owned,
        is_trained=parameter.requires_grad,
    )


def boxes_of(fragment: Fragment, flat: Tensor) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Cut a fragment into rectangles of the whole parameter, seen as a matrix of its first dimension by the rest.

    A run of elements is the end of a row, whole rows, and the beginning of a row. Any of them may be missing.

    Yields:
        The rectangle's first row and column in the whole matrix, and a view of ``flat`` of its shape.
    """
    row0, column0 = _corner(fragment.tensor_slice)
    width = _columns(fragment.local_shape)
    position, remaining = fragment.start, fragment.length
    elements = fragment.of(flat)
    while remaining:
        row, column = divmod(position, width)
        # From the beginning of a row, all whole rows are one rectangle.
        rows = remaining // width if column == 0 and remaining >= width else 1
        length = rows * width if column == 0 and remaining >= width else min(remaining, width - column)
        first = position - fragment.start
        yield (row0 + row, column0 + column), elements[first : first + length].view(rows, -1)
        position, remaining = position + length, remaining - length


def shards_of(fragment: Fragment, flat: Tensor, copy: bool) -> Shards:
    """Return a fragment's elements of ``flat`` as parts of the whole parameter: copies on the CPU, or views."""
    parts = {corner: part.to("cpu", copy=True) if copy else part for corner, part in boxes_of(fragment, flat)}
    return Shards(matrix_shape(fragment.tensor_slice.whole_shape), parts)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of a parameter as a matrix of its first dimension by the rest."""
    return (shape[0] if shape else 1, _columns(shape))


def _columns(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape[1:]).numel())


def _corner(tensor_slice: Slice) -> tuple[int, int]:
    """Return the slice's first row and column in the whole matrix."""
    if tensor_slice.dim == 0:
        return tensor_slice.start, 0
    return (0, tensor_slice.start) if tensor_slice.dim == 1 else (0, 0)


Corner = tuple[int, int]
"""First row and column of a rectangle in the whole matrix."""


class Shards(Tensor):
    """The rectangles of one float32 matrix that this process writes, or reads into.

    It has the shape of the whole matrix and no memory. Its three methods are the protocol of
    ``torch.distributed.checkpoint`` for tensors in parts.
    """

    parts: dict[Corner, Tensor]

    @staticmethod
    def __new__(cls, whole_shape: Corner, parts: dict[Corner, Tensor]) -> Self:
        shell = make_shell(cls, whole_shape)
        shell.parts = parts
        return shell

    @classmethod
    def __torch_dispatch__(cls, operation: Any, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        raise NotImplementedError(f"{operation} needs the whole tensor, and these are parts of it")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Shards(of {tuple(self.shape)}, at {list(self.parts)})"

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(name, Size(corner)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(Size(corner), part.size()),
                    properties=TensorProperties.create_from_tensor(part),
                    size=self.size(),
                ),
            )
            for corner, part in self.parts.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(Size(corner), part.size()) for corner, part in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        row, column = index.offset
        return self.parts[row, column]
