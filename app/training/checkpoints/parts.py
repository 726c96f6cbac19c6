"""The tensors of a checkpoint as files, in the format of ``torch.distributed.checkpoint``.

Imported where a checkpoint is read or written, and not before: to import ``torch.distributed.checkpoint`` takes about a
second, which the first step of a run need not wait for.
"""

import io
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from app.checksums import VerifiedFolder
from app.models.safetensors_file import Form
from app.storage import Advance, no_op
from app.training.checkpoints.part_reader import PartReader


def write_parts(
    content: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup, advance: Advance = no_op
) -> None:
    """Write what this process has of the tensors. Every process of ``group`` calls it; OSError is raised in all."""
    try:
        save(dict(content), storage_writer=_Writer(folder), planner=_SavePlanner(advance), process_group=group)
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise OSError(str(first).strip().splitlines()[-1]) from error


class SavedParts:
    """The tensors of a folder, whichever process wrote their parts. Every read is verified."""

    def __init__(self, folder: VerifiedFolder, advance: Advance = no_op) -> None:
        """Raises StorageError if the folder does not match its checksums."""
        self._advance = advance
        self._reader = PartReader(folder, advance)
        self._saved = self._reader.metadata.state_dict_metadata

    @property
    def names(self) -> frozenset[str]:
        """Of the tensors."""
        return frozenset(self._saved)

    def in_file_order(self) -> list[str]:
        """Return the names in the order in which one tensor after the other is read fastest."""
        return self._reader.in_file_order()

    def read(self, names: set[str]) -> dict[str, Tensor]:
        """The tensors of these names, whole."""
        forms = {name: self.form_of(name) for name in names}
        content = {name: torch.empty(form.shape, dtype=form.dtype) for name, form in forms.items()}
        self.read_into(content)
        return content

    def form_of(self, name: str) -> Form:
        """Return the type and shape of a whole tensor."""
        saved = self._saved[name]
        assert isinstance(saved, TensorStorageMetadata)
        return Form(saved.properties.dtype, tuple(saved.size))

    def read_into(self, content: Mapping[str, Tensor]) -> None:
        """Fill the tensors, or their local parts. Each process reads for itself.

        Raises:
            StorageError: the data do not match their checksums.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            planner = _LoadPlanner(self._advance)
            try:
                load(dict(content), storage_reader=self._reader, planner=planner, no_dist=True)
            except CheckpointException as error:
                raise next(iter(error.failures.values()))[0] from error


class _SavePlanner(DefaultSavePlanner):
    """Tells of each tensor that is written."""

    def __init__(self, advance: Advance) -> None:
        super().__init__()
        self._advance = advance

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        self._advance()
        return super().resolve_data(write_item)


class _LoadPlanner(DefaultLoadPlanner):
    """Tells of each tensor that was read."""

    def __init__(self, advance: Advance) -> None:
        super().__init__()
        self._advance = advance

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self._advance()
        super().commit_tensor(read_item, tensor)


class _Writer(FileSystemWriter):
    """Raises what the disk said, which the error of a file that could not be ended hides."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            hidden: BaseException | None = error
            while hidden and not isinstance(hidden, OSError):
                hidden = hidden.__context__
            raise hidden or error from None
