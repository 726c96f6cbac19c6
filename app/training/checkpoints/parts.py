"""The tensors of a checkpoint as files, in the format of ``torch.distributed.checkpoint``.

This module is imported only when a checkpoint is read or written. Importing ``torch.distributed.checkpoint`` takes
about a second, and the first step of a run need not wait for it.
"""

import io
import warnings
from collections.abc import Mapping
from dataclasses import replace
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
from app.storage import ProgressCallback, no_op
from app.training.checkpoints import names
from app.training.checkpoints.part_reader import PartReader


def write_parts(
    content: Mapping[str, Tensor],
    folder: Path,
    group: dist.ProcessGroup,
    on_progress: ProgressCallback = no_op,
    is_frozen: bool = False,
) -> None:
    """Write this process's part of the tensors. Collective over ``group``: OSError is raised in all processes.

    Frozen weights go to files of their own, beside those of the other tensors.
    """
    writer = (_FrozenWriter if is_frozen else _PartWriter)(folder)
    try:
        save(dict(content), storage_writer=writer, planner=_SavePlanner(on_progress), process_group=group)
    except CheckpointException as error:
        # A failure for each rank. One stands for all.
        first = next(iter(error.failures.values()))[0]
        raise OSError(str(first).strip().splitlines()[-1]) from error


class SavedParts:
    """The whole tensors of a folder, whichever processes wrote their parts. Every read is verified."""

    def __init__(self, folder: VerifiedFolder, on_progress: ProgressCallback = no_op) -> None:
        """Raises StorageError if the folder does not match its checksums."""
        self._on_progress = on_progress
        self._reader = PartReader(folder, on_progress)
        self._saved = self._reader.metadata.state_dict_metadata

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors."""
        return frozenset(self._saved)

    def in_file_order(self) -> list[str]:
        """Return the names in the order in which reading one tensor after the other is fastest."""
        return self._reader.in_file_order()

    def read(self, names: set[str]) -> dict[str, Tensor]:
        """Return the whole tensors of these names."""
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
        """Fill the tensors, or their local parts. Not collective.

        Raises:
            StorageError: the data do not match their checksums.
        """
        with warnings.catch_warnings():
            # It is disabled on purpose, because each process reads its own part.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            planner = _LoadPlanner(self._on_progress)
            try:
                load(dict(content), storage_reader=self._reader, planner=planner, no_dist=True)
            except CheckpointException as error:
                raise next(iter(error.failures.values()))[0] from error


class _SavePlanner(DefaultSavePlanner):
    """Reports progress for each tensor that is written."""

    def __init__(self, on_progress: ProgressCallback) -> None:
        super().__init__()
        self._on_progress = on_progress

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        self._on_progress()
        return super().resolve_data(write_item)


class _LoadPlanner(DefaultLoadPlanner):
    """Reports progress for each tensor that was read."""

    def __init__(self, on_progress: ProgressCallback) -> None:
        super().__init__()
        self._on_progress = on_progress

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self._on_progress()
        super().commit_tensor(read_item, tensor)


class _PartWriter(FileSystemWriter):
    """Raises the disk's own error. On a full disk torch raises another, because closing the file fails too."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from None


class _FrozenWriter(_PartWriter):
    """Gives files the names of frozen weights."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        named = super().prepare_global_plan(plans)
        return [replace(plan, storage_data=replace(plan.storage_data, prefix=self._prefix(plan))) for plan in named]

    def _prefix(self, plan: SavePlan) -> str:
        return f"{plan.storage_data.prefix}{names.FROZEN}_"

    def _get_metadata_path(self, rank: int | None = None) -> Path:  # noqa: ARG002
        return Path(self.path) / names.FROZEN_METADATA  # torch has no public way to name this file
