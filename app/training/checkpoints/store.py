"""The checkpoints of a run: one folder each, there when its checksums are."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Self, TypeVar

from upath import UPath

from app.checksums import CHECKSUMS_FILE, verify_checksums
from app.errors import StorageError
from app.storage import Advance, no_op
from app.warnings import attempt, warn

T = TypeVar("T")
_NAME = re.compile(r"step_(\d+)(?:-(\d+))?")


@dataclass(frozen=True, order=True)
class Checkpoint:
    """The state after ``step`` optimizer steps; the greatest is the newest.

    A state that is kept again, as at the end of an epoch that was paused on its last batch, is written beside the
    one before, under the next ``number``: there is a whole one at every moment.
    """

    step: int
    number: int = 1

    @property
    def name(self) -> str:
        """Of its folder: ``step_00000120``, and ``step_00000120-2`` for the second of this step."""
        return f"step_{self.step:08d}" + (f"-{self.number}" if self.number > 1 else "")

    @classmethod
    def named(cls, name: str) -> Self | None:
        """The checkpoint whose folder has this name; None if it is no name of one."""
        match = _NAME.fullmatch(name)
        return cls(int(match[1]), int(match[2] or 1)) if match else None


class CheckpointStore:
    """The folder of a run's checkpoints."""

    def __init__(self, folder: UPath, advance: Advance = no_op, tell: Callable[[str], None] = warn) -> None:
        """``tell`` is called with a message for each damaged checkpoint."""
        self.folder, self._advance, self._tell = folder, advance, tell

    def folder_of(self, checkpoint: Checkpoint) -> UPath:
        """Where its files are."""
        return self.folder / checkpoint.name

    def next(self, step: int) -> Checkpoint:
        """A checkpoint to be written of the state after ``step`` optimizer steps, newer than every other of it."""
        numbers = (checkpoint.number for checkpoint in self._begun() if checkpoint.step == step)
        return Checkpoint(step, 1 + max(numbers, default=0))

    def committed(self) -> list[Checkpoint]:
        """Those that were written whole, the newest last."""
        return [checkpoint for checkpoint in self._begun() if (self.folder_of(checkpoint) / CHECKSUMS_FILE).exists()]

    def is_intact(self, checkpoint: Checkpoint) -> bool:
        """Whether its files are what was written; a warning says which is not.

        Raises:
            OSError: storage cannot be read just now, which says nothing of the checkpoint.
        """
        return self._read_or_warn(checkpoint, self._verify) is not None

    def newest_intact(self) -> Checkpoint | None:
        """The newest that is intact; None if there never was a whole one.

        Raises:
            StorageError: there are checkpoints, and all of them are damaged.
            OSError: storage cannot be read just now, which says nothing of the checkpoints.
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
        if committed:
            raise StorageError(
                f"all checkpoints in {str(self.folder)!r} are damaged: restore one of them, "
                "or delete the folder to start over"
            )
        return None

    def _read_or_warn(self, checkpoint: Checkpoint, read: Callable[[Checkpoint], T]) -> T | None:
        """Return the result of ``read``. For a damaged checkpoint, warn and return None."""
        try:
            return read(checkpoint)
        except StorageError as error:
            self._tell(f"checkpoint {checkpoint.name} is damaged and left out: {error}")
            return None

    def _verify(self, checkpoint: Checkpoint) -> Checkpoint:
        verify_checksums(self.folder_of(checkpoint), self._advance)
        return checkpoint

    def intact_of(self, step: int) -> Checkpoint:
        """The newest of ``step`` that is intact.

        Raises:
            StorageError: there is none; it names the steps that have one.
            OSError: storage cannot be read just now, which says nothing of the checkpoints.
        """
        committed = self.committed()
        of_step = [checkpoint for checkpoint in committed if checkpoint.step == step]
        found = next(filter(self.is_intact, reversed(of_step)), None)
        if found is None:
            others = ", ".join(str(other) for other in sorted({checkpoint.step for checkpoint in committed} - {step}))
            raise StorageError(
                f"{str(self.folder)!r} has no intact checkpoint of step {step}, "
                + (f"but of step {others}: choose one of them" if others else "nor one of any other")
            )
        return found

    def sweep(self, after: Checkpoint | None) -> None:
        """Clear up after an interrupted run: remove what was never finished, put damaged ones after ``after`` aside.

        What cannot be cleared up is named and left: it is in nobody's way.
        """
        committed = set(self.committed())
        for checkpoint in self._begun():
            if checkpoint not in committed:
                warn(f"checkpoint {checkpoint.name} was never finished: removed")
                attempt(partial(self.remove, checkpoint), f"checkpoint {checkpoint.name} cannot be removed")
            elif after is not None and checkpoint > after:
                put_aside = partial(self._put_aside, checkpoint)
                attempt(put_aside, f"damaged checkpoint {checkpoint.name} cannot be put aside")

    def prune(self, written: Checkpoint, newest: int, best: int | None) -> None:
        """Remove what ``written`` makes needless: all but the ``newest`` so many steps up to it, and step ``best``.

        Of a step the newest checkpoint is kept.
        """
        committed = [checkpoint for checkpoint in self.committed() if checkpoint <= written]
        by_step = {checkpoint.step: checkpoint for checkpoint in committed}
        kept = {*list(by_step)[-newest:], best}
        for checkpoint in committed:
            if checkpoint.step not in kept or checkpoint != by_step[checkpoint.step]:
                self.remove(checkpoint)

    def remove(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint, its checksums first, so that half of it is never taken for whole."""
        folder = self.folder_of(checkpoint)
        (folder / CHECKSUMS_FILE).unlink(missing_ok=True)
        folder.fs.rm(folder.path, recursive=True)

    def _put_aside(self, checkpoint: Checkpoint) -> None:
        """Move a damaged checkpoint where nobody takes it for one, beside those of its step that lie there."""
        names = (f"damaged_{Checkpoint(checkpoint.step, number).name}" for number in count(1))
        aside = next(candidate for name in names if not (candidate := self.folder / name).exists())
        folder = self.folder_of(checkpoint)
        folder.fs.mv(folder.path, aside.path, recursive=True)

    def _begun(self) -> list[Checkpoint]:
        """Those that have a folder, the newest last."""
        if not self.folder.exists():
            return []
        named = [Checkpoint.named(folder.name) for folder in self.folder.iterdir()]
        return sorted(checkpoint for checkpoint in named if checkpoint is not None)
