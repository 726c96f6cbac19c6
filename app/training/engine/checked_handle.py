"""A handle for files on NVMe that raises errors where DeepSpeed's own does not notice them or ends the process."""

import os
from pathlib import Path
from typing import Any

from torch import Tensor

from app.errors import TrainingError


class CheckedHandle:
    """An ``aio_handle`` of DeepSpeed that refuses to write without room, and to read more than a file has.

    DeepSpeed counts a write that failed as completed, and the next read of the short file ends the process with
    SIGABRT. So the room for a file is reserved before its first write: later ones need no more. What remains unnoticed
    is a write into reserved room that the disk itself fails.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._pending = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def async_pwrite(self, buffer: Tensor, file: str, offset: int) -> int:
        """Start to write ``buffer``. Raise TrainingError if the disk has no room for it, or the file cannot be opened.

        No operation is pending after an error, for the handle aborts if it is destroyed with one.
        """
        size = offset + buffer.nbytes
        try:
            _reserve(file, size)
        except OSError as error:
            raise self._not_written(file, size, error.strerror) from error
        if self._handle.async_pwrite(buffer, file, offset) != 0:
            raise self._not_written(file, size, "DeepSpeed says why above")
        self._pending += 1
        return 0

    def async_pread(self, buffer: Tensor, file: str, offset: int) -> int:
        """Start to read ``buffer``. Raise TrainingError if the file is too short, or cannot be opened."""
        size = offset + buffer.nbytes
        try:
            present = Path(file).stat().st_size
        except OSError as error:
            raise self._not_read(file, size, error.strerror) from error
        if present < size:
            raise self._not_read(file, size, f"it has {present:,}")
        if self._handle.async_pread(buffer, file, offset) != 0:
            raise self._not_read(file, size, "DeepSpeed says why above")
        self._pending += 1
        return 0

    def wait(self) -> int:
        """Wait for all that was started, and return how many operations that were."""
        self._pending = 0
        completed: int = self._handle.wait()
        return completed

    def _not_written(self, file: str, size: int, reason: str | None) -> TrainingError:
        self._finish()
        return TrainingError(
            f"{size:,} bytes cannot be written to {file!r} ({reason}): free space there, set train.plan.nvme_path to "
            "another disk, or offload to cpu"
        ).of("nvme.not_written", "train.plan.nvme_path")

    def _not_read(self, file: str, size: int, reason: str | None) -> TrainingError:
        self._finish()
        return TrainingError(
            f"{size:,} bytes cannot be read from {file!r} ({reason}): look what else writes to train.plan.nvme_path "
            "and whether its disk is sound, then resume the training"
        ).of("nvme.unreadable", "train.plan.nvme_path")

    def _finish(self) -> None:
        if self._pending:
            self.wait()


def _reserve(file: str, size: int) -> None:
    """Make ``file`` at least ``size`` bytes long, with blocks of the disk behind them."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        if os.fstat(descriptor).st_size < size:
            os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)
