"""The checkpoints of a run: one folder each, there when its checksums are."""

from upath import UPath

from app.checksums import CHECKSUMS_FILE, verify_checksums
from app.errors import StorageError
from app.warnings import warn

_PREFIX, _DAMAGED = "step_", "damaged_"


class CheckpointStore:
    """Folders ``step_00000120``, named by the optimizer steps that led there."""

    def __init__(self, folder: UPath) -> None:
        self.folder = folder

    def folder_of(self, step: int) -> UPath:
        """The folder of the checkpoint after ``step`` optimizer steps."""
        return self.folder / f"{_PREFIX}{step:08d}"

    def committed(self) -> list[int]:
        """The steps of the checkpoints that were written whole, the newest last."""
        return [step for step in self._steps() if (self.folder_of(step) / CHECKSUMS_FILE).exists()]

    def newest_intact(self) -> int | None:
        """The newest checkpoint whose files are what was written; None if there never was a whole one.

        Raises:
            StorageError: there are checkpoints, and all of them are damaged.
            OSError: storage cannot be read just now, which says nothing of the checkpoints.
        """
        committed = self.committed()
        for step in reversed(committed):
            try:
                verify_checksums(self.folder_of(step))
            except StorageError as error:
                warn(f"checkpoint {self.folder_of(step).name} is damaged and left out: {error}")
            else:
                return step
        if committed:
            raise StorageError(
                f"all checkpoints in {str(self.folder)!r} are damaged: restore one of them, "
                "or delete the folder to start over"
            )
        return None

    def sweep(self, after: int | None) -> None:
        """Clear up after an interrupted run: remove what was never finished, put damaged ones after ``after`` aside."""
        committed = set(self.committed())
        for step in self._steps():
            folder = self.folder_of(step)
            if step not in committed:
                warn(f"checkpoint {folder.name} was never finished: removed")
                self.remove(step)
            elif after is not None and step > after:
                folder.rename(folder.with_name(f"{_DAMAGED}{folder.name}"))

    def prune(self, newest: int, best: int | None) -> None:
        """Remove every finished checkpoint but the ``newest`` so many and that of step ``best``."""
        for step in self.committed()[:-newest]:
            if step != best:
                self.remove(step)

    def remove(self, step: int) -> None:
        """Remove a checkpoint, its checksums first, so that half of it is never taken for whole."""
        folder = self.folder_of(step)
        (folder / CHECKSUMS_FILE).unlink(missing_ok=True)
        folder.fs.rm(folder.path, recursive=True)

    def _steps(self) -> list[int]:
        if not self.folder.exists():
            return []
        names = [each.name.removeprefix(_PREFIX) for each in self.folder.iterdir() if each.name.startswith(_PREFIX)]
        return sorted(int(name) for name in names if name.isdecimal())
