"""Writing checkpoints: every process its own part, in the background, committed by one file."""

import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch.distributed as dist
from upath import UPath

from app.checksums import checksums_of, write_checksums
from app.config import CheckpointConfig
from app.errors import TrainingError
from app.storage import Advance, is_local, local_folder, unheard, upload
from app.training.checkpoints.snapshot import Snapshot
from app.training.checkpoints.store import Checkpoint, CheckpointStore
from app.warnings import attempt

STATE_FILE = "state.json"


class CheckpointWriter:
    """Writes snapshots one after the other. Every process of the run has one, and calls it in the same order."""

    def __init__(self, store: CheckpointStore, config: CheckpointConfig, advance: Advance = unheard) -> None:
        self._store, self._config, self._advance = store, config, advance
        # Of its own: what the thread says to the others must not mix with what training says.
        self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(self, snapshot: Snapshot, best: int | None) -> None:
        """Store ``snapshot`` once the one before it is stored, then remove old ones, but never that of step ``best``.

        Raises:
            TrainingError: the one before cannot be written; or this one, unless that is found out in the background.
        """
        self.wait()
        self._pending = self._thread.submit(self._write, snapshot, best)
        if not self._config.background:
            self.wait()

    def wait(self) -> None:
        """Until everything that was saved is stored. Raises TrainingError if it cannot be."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Let what is being written be finished, also where training breaks off, and end the group's threads.

        Those of gloo wake up a hundred times a second: a process that tries many configurations would be kept busy.
        """
        self._thread.shutdown()
        dist.destroy_process_group(self._group)

    def _write(self, snapshot: Snapshot, best: int | None) -> None:
        checkpoint = self._agree_on_next(snapshot.state.position.step)
        folder = self._store.folder_of(checkpoint)
        is_first = dist.get_rank() == 0
        try:
            sums = self._write_part(snapshot, folder, is_first)
            parts: list[dict[str, str] | None] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, sums, group=self._group)
            if is_first:
                write_checksums(folder, {name: each for part in parts if part for name, each in part.items()})
        except OSError as error:
            if is_local(folder):
                shutil.rmtree(folder.path, ignore_errors=True)
            raise TrainingError(_cannot_write(folder, snapshot, error)) from error
        if is_first:
            keep = partial(self._store.prune, checkpoint, self._config.num_to_keep, best)
            attempt(keep, "old checkpoints cannot be removed")

    def _agree_on_next(self, step: int) -> Checkpoint:
        """The checkpoint that all processes write: the first looks which are there."""
        try:
            message = [self._store.next(step) if dist.get_rank() == 0 else None]
        except OSError as error:
            raise TrainingError(f"checkpoints in {str(self._store.folder)!r} cannot be listed: {error}") from error
        dist.broadcast_object_list(message, src=0, group=self._group)
        assert message[0] is not None
        return message[0]

    def _write_part(self, snapshot: Snapshot, folder: UPath, is_first: bool) -> dict[str, str]:
        """Write this process's files; their checksums."""
        from app.training.checkpoints.parts import write_parts

        with local_folder(folder) as local:
            before = set(local.iterdir()) if local.exists() else set()
            write_parts(snapshot.content, local, self._group, self._advance)
            if is_first:
                (local / STATE_FILE).write_text(snapshot.state.model_dump_json(indent=1), encoding="utf-8")
            own = [file for file in local.iterdir() if file not in before and _is_own(file.name, is_first)]
            if not is_local(folder):
                for file in own:
                    upload(file, folder / file.name, self._advance)
            return checksums_of(own, self._advance)


def _is_own(name: str, is_first: bool) -> bool:
    """The first also wrote what is not of one process."""
    return name.startswith(f"__{dist.get_rank()}_") or (is_first and not name.startswith("__"))


def _cannot_write(folder: UPath, snapshot: Snapshot, error: OSError) -> str:
    """What went wrong, and whether there was room."""
    room = "check its rights and quota"
    if is_local(folder):
        there = next(each for each in Path(folder.path).parents if os.path.exists(each))
        room = f"{shutil.disk_usage(there).free:,} bytes are free there"
    return (
        f"checkpoint {str(folder)!r} cannot be written: {error}; this process's part takes "
        f"{snapshot.nbytes:,} bytes, {room}. Those before it are whole: go on from them with train.resume=latest"
    )
