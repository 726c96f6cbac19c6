"""Parts of tensors as ``torch.distributed.checkpoint`` writes and reads them, cutting anew where a plan differs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Size, Tensor

if TYPE_CHECKING:  # as in parts.py: not before a checkpoint is read or written
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

Corner = tuple[int, int]
"""First row and column of a rectangle in the whole matrix."""


class Shards(Tensor):
    """The rectangles of one float32 matrix that this process writes, or reads into.

    Has the size of the whole and no memory of its own. Its three methods are the protocol by which
    ``torch.distributed.checkpoint`` takes a tensor that lies in parts.
    """

    parts: dict[Corner, Tensor]

    @staticmethod
    def __new__(cls, whole_shape: Corner, parts: dict[Corner, Tensor]) -> Self:
        made: Self = Tensor._make_wrapper_subclass(cls, whole_shape, dtype=torch.float32)
        made.parts = parts
        return made

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
