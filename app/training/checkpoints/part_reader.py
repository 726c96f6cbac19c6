"""A reader for ``torch.distributed.checkpoint`` that fetches only the bytes that a process needs.

Like ``parts.py``, this module is imported only when a checkpoint is read or written.
"""

import io
import pickle
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import prod
from operator import attrgetter
from typing import IO, Any, cast

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from app.checksums import VerifiedFolder
from app.storage import ProgressCallback
from app.torch_internals import narrow, offset_in_file, view_of_file
from app.training.checkpoints.names import FROZEN_METADATA
from app.training.checkpoints.verified_file import PIECE_BYTES, Span, VerifiedFile, pieces_name

_METADATA_FILE = ".metadata"
_BATCH_BYTES = 2**25
"""Number of bytes to fetch at once. A larger tensor is fetched in one request."""
_FRAME_BYTES = 2**12
"""Maximum number of bytes that ``torch.save`` writes before a tensor's values, and after them."""


class PartReader(FileSystemReader):
    """Reads directly from storage and verifies every read. A file without piece checksums is read whole."""

    def __init__(self, folder: VerifiedFolder, on_progress: ProgressCallback) -> None:
        """Raises StorageError if the metadata do not match their checksum."""
        # The base class gets no path, because this class reads storage itself.
        super().__init__("")
        self._folder, self._on_progress = folder, on_progress
        self.metadata: Metadata = pickle.loads(folder.read(_METADATA_FILE))  # noqa: S301 # verified, and ours
        if FROZEN_METADATA in folder:
            frozen: Metadata = pickle.loads(folder.read(FROZEN_METADATA))  # noqa: S301
            self.metadata.state_dict_metadata |= frozen.state_dict_metadata
            self.metadata.storage_data |= frozen.storage_data
        self.metadata.storage_meta = self.metadata.storage_meta or StorageMeta()
        self._sums: dict[str, list[str]] = {}
        self._opened: tuple[str, VerifiedFile] | None = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the tensors of the checkpoint and where their parts are stored."""
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Fill the tensors of ``plan``. Raises StorageError if the data do not match their checksums."""
        stored = self.storage_data
        # In the order of the file, so that each piece is fetched and verified once.
        items = sorted(plan.items, key=lambda item: attrgetter("relative_path", "offset")(stored[item.storage_index]))
        for name, of_file in groupby(items, key=lambda item: cast(str, stored[item.storage_index].relative_path)):
            file = self._open(name)
            for batch in self._batches(list(of_file)):
                file.fetch(span for item in batch for span in self._spans(item))
                for item in batch:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(self._read(file, item))
                    planner.commit_tensor(item, target)
                _, end = self._spans(batch[-1])[-1]
                # This frees all pieces but the one where the next tensor begins.
                file.fetch([(end - 1, end)])
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def in_file_order(self) -> list[str]:
        """Return the names of all tensors, in the order in which the files have them."""
        places: dict[str, tuple[str, int]] = {}
        for index, stored in self.metadata.storage_data.items():
            place = stored.relative_path, stored.offset
            places[index.fqn] = min(place, places.get(index.fqn, place))
        return sorted(places, key=lambda name: places[name])

    def _open(self, name: str) -> VerifiedFile:
        """Return the file ``name``: the same object until another is opened, as a file without pieces is kept whole."""
        if self._opened is None or self._opened[0] != name:
            piece_bytes = PIECE_BYTES if pieces_name(name) in self._folder else None
            file = VerifiedFile(self._folder.path / name, self._sums_of(name), piece_bytes, self._on_progress)
            self._opened = name, file
        return self._opened[1]

    def _sums_of(self, name: str) -> list[str]:
        if name not in self._sums:
            folder, pieces = self._folder, pieces_name(name)
            self._sums[name] = folder.read(pieces).decode().split() if pieces in folder else [folder.sha256_of(name)]
        return self._sums[name]

    def _batches(self, items: list[ReadItem]) -> Iterator[list[ReadItem]]:
        """Group neighbours in a file into batches of about ``_BATCH_BYTES``."""
        batch: list[ReadItem] = []
        size = 0
        for item in items:
            batch.append(item)
            size += sum(end - start for start, end in self._spans(item))
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _spans(self, item: ReadItem) -> list[Span]:
        """Return the byte ranges with the item's values, and with what ``torch.save`` writes around them."""
        stored = self.storage_data[item.storage_index]
        start, end = stored.offset, stored.offset + stored.length
        shape, dtype = self._stored_as(item)
        if item.lengths == shape:
            return [(start, end)]
        first, last = _flat_range(item, shape)
        values = (start + first * dtype.itemsize, min(end, start + last * dtype.itemsize + _FRAME_BYTES))
        return [(start, min(end, start + _FRAME_BYTES)), values, (max(start, end - _FRAME_BYTES), end)]

    def _read(self, file: VerifiedFile, item: ReadItem) -> Tensor:
        stored = self.storage_data[item.storage_index]
        view = view_of_file(cast(IO[bytes], file), stored.offset, stored.length)
        shape, dtype = self._stored_as(item)
        if item.lengths == shape:
            whole: Tensor = torch.load(view, map_location="cpu", weights_only=True)
            return whole
        # On the meta device, torch reads no values.
        frame: Tensor = torch.load(view, map_location="meta", weights_only=True)
        # The range of values below is that of a row-major array.
        if not frame.is_contiguous():
            view.seek(0)
            whole = torch.load(view, map_location="cpu", weights_only=True)
            return narrow(whole, item.storage_offsets, item.lengths)
        first, last = _flat_range(item, shape)
        view.seek(offset_in_file(frame) + first * dtype.itemsize, io.SEEK_SET)
        # A bytearray, because torch warns of memory that cannot be written.
        values = torch.frombuffer(bytearray(view.read((last - first) * dtype.itemsize)), dtype=dtype)
        # The range holds whole rows of the stored part. Its strides skip what is beside the rectangle.
        return values.as_strided(item.lengths, frame.stride())

    def _stored_as(self, item: ReadItem) -> tuple[Size, torch.dtype]:
        """Return shape and dtype of the stored part that contains the item."""
        index = item.storage_index
        tensor = cast(TensorStorageMetadata, self.metadata.state_dict_metadata[index.fqn])
        corner = index.offset if index.offset is not None else Size([0] * len(tensor.size))
        (shape,) = {chunk.sizes for chunk in tensor.chunks if chunk.offsets == corner}
        return shape, tensor.properties.dtype


def _flat_range(item: ReadItem, shape: Sequence[int]) -> Span:
    """Return the first flat index of a rectangle in a row-major array of ``shape``, and the last plus one."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(item.storage_offsets, strides, strict=True))
    last = sum((length - 1) * stride for length, stride in zip(item.lengths, strides, strict=True))
    return first, first + last + 1
