"""The folder of a run's checkpoints. A checkpoint exists once its checksums do."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Self, TypeVar

from upath import UPath

from app.best_effort import best_effort, warn
from app.checksums import CHECKSUMS_FILE, verify_checksums
from app.errors import StorageError
from app.storage import ProgressCallback, no_op

T = TypeVar("T")
_NAME = re.compile(r"step_(\d+)(?:-(\d+))?")


@dataclass(frozen=True, order=True)
class Checkpoint:
    """The state after ``step`` optimizer steps. The greatest is the newest.

    A step can be saved again, such as at the end of an epoch that was paused on its last batch. Then it is written
    beside the earlier one, under the next ``number``, so that a whole one exists at any time.
    """

    step: int
    number: int = 1

    @property
    def name(self) -> str:
        """Name of its folder: ``step_00000120``, or ``step_00000120-2`` for the second one of this step."""
        return f"step_{self.step:08d}" + (f"-{self.number}" if self.number > 1 else "")

    @classmethod
    def named(cls, name: str) -> Self | None:
        """Return the checkpoint whose folder has this name; None for other names."""
        match = _NAME.fullmatch(name)
        return cls(int(match[1]), int(match[2] or 1)) if match else None


class CheckpointStore:
    """The folder of a run's checkpoints."""

    def __init__(self, folder: UPath, on_progress: ProgressCallback = no_op, log: Callable[[str], None] = warn) -> None:
        """``log`` is called with a message for each damaged checkpoint."""
        self.folder, self._on_progress, self._log = folder, on_progress, log

    def folder_of(self, checkpoint: Checkpoint) -> UPath:
        """Return the folder of its files."""
        return self.folder / checkpoint.name

    def next(self, step: int) -> Checkpoint:
        """Return a new checkpoint of ``step``, newer than all others of this step."""
        # Unfinished ones count, too, so that a new one never shares a folder with one of them.
        numbers = (checkpoint.number for checkpoint in self._started() if checkpoint.step == step)
        return Checkpoint(step, 1 + max(numbers, default=0))

    def committed(self) -> list[Checkpoint]:
        """Return the checkpoints that were written completely, the newest last."""
        return [checkpoint for checkpoint in self._started() if (self.folder_of(checkpoint) / CHECKSUMS_FILE).exists()]

    def is_intact(self, checkpoint: Checkpoint) -> bool:
        """Return whether its files are unchanged. Warn of one that is not.

        Raises:
            OSError: storage cannot be read at the moment. The checkpoint may be intact.
        """
        return self._read_or_warn(checkpoint, self._verify) is not None

    def newest_intact(self) -> Checkpoint | None:
        """Return the newest intact checkpoint; None if none was ever committed.

        Raises:
            StorageError: there are checkpoints, and all of them are damaged.
            OSError: storage cannot be read at the moment. The checkpoints may be intact.
        """
        return self.newest_readable(self.committed(), self._verify)

    def newest_readable(self, committed: Sequence[Checkpoint], read: Callable[[Checkpoint], T]) -> T | None:
        """Return the result of ``read`` for the newest readable checkpoint of ``committed``; None if there are none.

        ``read`` raises StorageError for a damaged checkpoint, which is skipped with a warning.

        Raises:
            StorageError: there are checkpoints, and all of them are damaged.
        """
        for checkpoint in reversed(committed):
            if (result := self._read_or_warn(checkpoint, read)) is not None:
                return result
        # A run must not start over without a word where there was progress.
        if committed:
            raise StorageError(
                f"all checkpoints in {str(self.folder)!r} are damaged: restore one of them, "
                "or delete the folder to start over"
            ).of("checkpoints.damaged")
        return None

    def _read_or_warn(self, checkpoint: Checkpoint, read: Callable[[Checkpoint], T]) -> T | None:
        """Return the result of ``read``. For a damaged checkpoint, warn and return None."""
        try:
            return read(checkpoint)
        except StorageError as error:
            self._log(f"checkpoint {checkpoint.name} is damaged and left out: {error}")
            return None

    def _verify(self, checkpoint: Checkpoint) -> Checkpoint:
        verify_checksums(self.folder_of(checkpoint), self._on_progress)
        return checkpoint

    def intact_of(self, step: int) -> Checkpoint:
        """Return the newest intact checkpoint of ``step``.

        Raises:
            StorageError: there is none. The error names the steps that have one.
            OSError: storage cannot be read at the moment. The checkpoints may be intact.
        """
        committed = self.committed()
        of_step = [checkpoint for checkpoint in committed if checkpoint.step == step]
        intact = next(filter(self.is_intact, reversed(of_step)), None)
        if intact is None:
            others = ", ".join(str(other) for other in sorted({checkpoint.step for checkpoint in committed} - {step}))
            raise StorageError(
                f"{str(self.folder)!r} has no intact checkpoint of step {step}, "
                + (f"but of step {others}: choose one of them" if others else "nor one of any other")
            ).of("checkpoint.no_step")
        return intact

    def sweep(self, after: Checkpoint | None) -> None:
        """Clean up after an interrupted run: remove unfinished checkpoints, and rename damaged ones after ``after``.

        If that fails, warn and leave the folder. It does no harm.
        """
        committed = set(self.committed())
        for checkpoint in self._started():
            if checkpoint not in committed:
                warn(f"checkpoint {checkpoint.name} was never finished: removed")
                best_effort(partial(self.remove, checkpoint), f"checkpoint {checkpoint.name} cannot be removed")
            # It is newer than the one that was restored, so it was found to be damaged.
            elif after is not None and checkpoint > after:
                rename = partial(self._rename_damaged, checkpoint)
                best_effort(rename, f"damaged checkpoint {checkpoint.name} cannot be renamed")

    def prune(self, written: Checkpoint, num_to_keep: int, best: Sequence[int] = ()) -> None:
        """Remove all checkpoints up to ``written`` but those of the ``num_to_keep`` newest steps and of the best one.

        For each step, the newest checkpoint is kept. ``best`` lists the steps of epochs, best first. The best one is
        the first that has a checkpoint: those of others may be gone, or were never written.
        """
        committed = [checkpoint for checkpoint in self.committed() if checkpoint <= written]
        # A later checkpoint of a step replaces the one before.
        by_step = {checkpoint.step: checkpoint for checkpoint in committed}
        kept = {*list(by_step)[-num_to_keep:], next((step for step in best if step in by_step), None)}
        for checkpoint in committed:
            if checkpoint.step not in kept or checkpoint != by_step[checkpoint.step]:
                self.remove(checkpoint)

    def remove(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint. Its checksums go first, so that a half-removed one is never taken for whole."""
        folder = self.folder_of(checkpoint)
        (folder / CHECKSUMS_FILE).unlink(missing_ok=True)
        folder.fs.rm(folder.path, recursive=True)

    def _rename_damaged(self, checkpoint: Checkpoint) -> None:
        """Rename the folder of a damaged checkpoint to a free name that no longer counts as a checkpoint."""
        names = (f"damaged_{Checkpoint(checkpoint.step, number).name}" for number in count(1))
        target = next(candidate for name in names if not (candidate := self.folder / name).exists())
        folder = self.folder_of(checkpoint)
        folder.fs.mv(folder.path, target.path, recursive=True)

    def _started(self) -> list[Checkpoint]:
        """Return the checkpoints that have a folder, the newest last."""
        if not self.folder.exists():
            return []
        named = [Checkpoint.named(folder.name) for folder in self.folder.iterdir()]
        return sorted(checkpoint for checkpoint in named if checkpoint is not None)
