"""Writing of checkpoints: each process writes its own part in the background, and one file commits them all."""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from upath import UPath

from app.best_effort import best_effort, warn
from app.checksums import checksums_of, read_checksums, write_checksums
from app.config import CheckpointConfig
from app.errors import StorageError, TrainingError
from app.storage import ProgressCallback, is_local, link, local_folder, no_op, sync_files, upload, version_of
from app.training.checkpoints.names import FROZEN_METADATA, is_frozen_file
from app.training.checkpoints.snapshot import Snapshot
from app.training.checkpoints.store import Checkpoint, CheckpointStore
from app.training.checkpoints.verified_file import write_piece_sums
from app.training.worker import gather, gather_on_first, on_first, run_on_all

STATE_FILE = "state.json"
PARTS_SUFFIX = ".distcp"


class CheckpointWriter:
    """Writes snapshots one after the other. Every process of the run has one, and calls it in the same order.

    At most one snapshot is in memory. A write that fails is retried once, immediately.
    """

    def __init__(
        self,
        store: CheckpointStore,
        config: CheckpointConfig,
        on_progress: ProgressCallback = no_op,
        before_commit: Callable[[], None] = no_op,
    ) -> None:
        """``before_commit`` runs in a thread of the first process once all files of a checkpoint are stored.

        What it stores is therefore complete before the checkpoint is committed.
        """
        self._store, self._config, self._on_progress, self._before_commit = store, config, on_progress, before_commit
        # A group of its own: the thread's collectives must not mix with those of training.
        self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[str | None] | None = None
        self._frozen_in: UPath | None = None
        self._frozen_versions: dict[str, _Version] = {}
        self.takes_frozen = True
        """Whether the next snapshot needs the frozen weights. Otherwise an earlier checkpoint has them."""
        self.last_commit: Commit | None = None
        """The newest checkpoint that this writer has stored."""

    @property
    def has_failed(self) -> bool:
        """Return whether this process knows that the last write failed. Other processes may not know yet."""
        pending = self._pending
        return pending is not None and pending.done() and pending.result() is not None

    def reuse_frozen(self, folder: UPath) -> None:
        """Take the frozen weights of later checkpoints from one that holds the engine's."""
        if FROZEN_METADATA in (sums := read_checksums(folder)):
            self._frozen_in, self.takes_frozen = folder, False
            self._frozen_versions = _frozen_versions(folder, sums)

    def save(self, take: Callable[[], Snapshot], best: Sequence[int] = ()) -> None:
        """Store the snapshot that ``take`` returns, then remove old checkpoints.

        ``best`` lists the steps of epochs, best first. The checkpoint of the first one that has any is kept.

        ``take`` is called after the previous snapshot is stored and its memory is free. If the previous write failed,
        this call waits until the new snapshot is stored.

        Raises:
            TrainingError: the snapshot cannot be written. In the background the next ``wait`` raises it.
        """
        failure = self._wait_for_pending()
        # ``take`` runs here and not in the thread, because the next step changes the state.
        self._pending = self._thread.submit(self._write_with_retry, take(), best)
        if failure or not self._config.background:
            self.wait()
        if failure and dist.get_rank() == 0:
            warn(f"{failure}. A later state has been stored since, and training continues")

    def wait(self) -> None:
        """Wait until everything that was saved is stored. Raises TrainingError if it cannot be."""
        if failure := self._wait_for_pending():
            raise TrainingError(
                f"{failure}. Earlier checkpoints are whole: resume from them with train.resume=latest"
            ).of("checkpoint.not_written")

    def close(self) -> None:
        """Finish the write under way, also after an error in training, and end the group's threads.

        Those of gloo wake up a hundred times a second, which would slow down a process that trains many times.
        """
        self._thread.shutdown()
        dist.destroy_process_group(self._group)

    def _wait_for_pending(self) -> str | None:
        """Wait for the pending write. Return why it failed, or None."""
        pending, self._pending = self._pending, None
        return pending.result() if pending else None

    def _write_with_retry(self, snapshot: Snapshot, best: Sequence[int]) -> str | None:
        """Write the snapshot, with one retry. Return why it failed, or None.

        Returning the exception itself would keep the snapshot in memory.
        """
        try:
            return self._try_write(snapshot, best) and self._try_write(snapshot, best)
        finally:
            # The executor drops its reference only later.
            snapshot.content.clear()
            snapshot.frozen.clear()

    def _try_write(self, snapshot: Snapshot, best: Sequence[int]) -> str | None:
        try:
            self._write(snapshot, best)
        except TrainingError as error:
            return str(error)
        return None

    def _write(self, snapshot: Snapshot, best: Sequence[int]) -> None:
        first, began_s = dist.get_rank() == 0, time.monotonic()
        checkpoint = on_first(partial(self._next, snapshot.state.position.step), self._group)
        folder = self._store.folder_of(checkpoint)
        has_frozen = any(gather(bool(snapshot.frozen), self._group))
        write_part = partial(self._write_part, snapshot, folder, first, has_frozen)
        try:
            with ExitStack() as stack:
                # All processes have a folder before any writes: the write waits for all of them.
                local = run_on_all(partial(self._enter_folder, stack, snapshot, folder), self._group)
                own_sums = run_on_all(partial(write_part, local), self._group)
            sums = {name: sha256 for part in gather_on_first(own_sums, self._group) for name, sha256 in part.items()}
            source = None if has_frozen else self._frozen_in
            on_first(partial(self._commit, folder, sums, snapshot, source), self._group)
            self.last_commit = Commit(time.time(), time.monotonic() - began_s)
            if has_frozen or source:
                self._frozen_in, self.takes_frozen = folder, False
        except TrainingError:
            # The earlier checkpoint may be what cannot be read.
            self.takes_frozen = True
            # This frees a full disk at once. On an object store, ``sweep`` does it at the next start.
            if first and is_local(folder):
                shutil.rmtree(folder.path, ignore_errors=True)
            raise
        if first:
            # Outside the try block: the new checkpoint is stored, even if old ones cannot be removed.
            prune = partial(self._store.prune, checkpoint, self._config.num_to_keep, best)
            best_effort(prune, "old checkpoints cannot be removed")

    def _next(self, step: int) -> Checkpoint:
        """Return the checkpoint to write."""
        try:
            return self._store.next(step)
        except Exception as error:
            raise TrainingError(f"checkpoints in {str(self._store.folder)!r} cannot be listed: {error}").of(
                "checkpoints.unreadable"
            ) from error

    def _enter_folder(self, stack: ExitStack, snapshot: Snapshot, folder: UPath) -> "_LocalFolder":
        """Return the folder to which this process writes. If it is temporary, ``stack`` removes it."""
        try:
            path = stack.enter_context(local_folder(folder))
            return _LocalFolder(path, frozenset(path.iterdir()) if path.exists() else frozenset())
        except OSError as error:
            raise _not_written(folder, snapshot, error) from error

    def _write_part(
        self, snapshot: Snapshot, folder: UPath, is_first: bool, has_frozen: bool, local: "_LocalFolder"
    ) -> dict[str, str]:
        """Write this process's files, and return their checksums. ``has_frozen``: whether any process has any."""
        from app.training.checkpoints.parts import write_parts

        try:
            write_parts(snapshot.content, local.path, self._group, self._on_progress)
            if has_frozen:
                write_parts(snapshot.frozen, local.path, self._group, self._on_progress, is_frozen=True)
            if is_first:
                (local.path / STATE_FILE).write_text(snapshot.state.model_dump_json(indent=1), encoding="utf-8")
            own = [file for file in local.new_files() if _is_own(file.name, is_first)]
            # Only the files of tensors are read in part.
            own += [write_piece_sums(file) for file in own if file.suffix == PARTS_SUFFIX]
            if is_local(folder):
                # On a shared disk, only the machine that wrote a file can wait for it.
                sync_files(own)
            else:
                for file in own:
                    upload(file, folder / file.name, self._on_progress)
            return checksums_of(own, self._on_progress)
        except Exception as error:  # each protocol's driver has errors of its own
            raise _not_written(folder, snapshot, error) from error

    def _commit(self, folder: UPath, sums: dict[str, str], snapshot: Snapshot, frozen_in: UPath | None) -> None:
        try:
            self._before_commit()
            whole = sums | (self._link_frozen(frozen_in, folder) if frozen_in else {})
            write_checksums(folder, whole)
            self._frozen_versions = _frozen_versions(folder, whole)
        except Exception as error:
            raise _not_written(folder, snapshot, error) from error

    def _link_frozen(self, source: UPath, folder: UPath) -> dict[str, str]:
        """Give a checkpoint the frozen weights of an earlier one, without writing them again. Return their checksums.

        Raises:
            StorageError: a file was changed, so its checksum may be wrong.
        """
        sums = {name: sha256 for name, sha256 in read_checksums(source).items() if is_frozen_file(name)}
        for name in sums:
            link(source / name, folder / name)
        were, given = self._frozen_versions, _frozen_versions(folder, sums)
        if _frozen_versions(source, sums) != were or any(given[name].size != were[name].size for name in sums):
            raise StorageError(
                f"the frozen weights in {str(source)!r} were changed; the next checkpoint writes them"
            ).of("weights.changed")
        return sums


@dataclass(frozen=True)
class Commit:
    """A checkpoint that was stored."""

    time_s: float
    """When, in seconds since 1970."""
    seconds: float
    """How long it took."""


@dataclass(frozen=True)
class _LocalFolder:
    """A folder on this machine's disk, and the files that it had before the write."""

    path: Path
    before: frozenset[Path]

    def new_files(self) -> list[Path]:
        return [file for file in self.path.iterdir() if file not in self.before]


class _Version(NamedTuple):
    """The size and version of a file, which show whether it was changed."""

    size: int
    version: str | None


def _frozen_versions(folder: UPath, names: Iterable[str]) -> dict[str, _Version]:
    infos = {name: folder.fs.info((folder / name).path) for name in names if is_frozen_file(name)}
    return {name: _Version(info["size"], version_of(info)) for name, info in infos.items()}


def _is_own(name: str, is_first: bool) -> bool:
    """Return whether this process wrote the file. The first process also writes the files that belong to none."""
    return name.startswith(f"__{dist.get_rank()}_") or (is_first and not name.startswith("__"))


def _not_written(folder: UPath, snapshot: Snapshot, error: Exception) -> TrainingError:
    """Return a TrainingError for ``error`` that states the free space on the disk."""
    room = "check its rights and quota"
    if is_local(folder):
        # The folder itself may not exist yet.
        existing = next(parent for parent in Path(folder.path).parents if os.path.exists(parent))
        room = f"{shutil.disk_usage(existing).free:,} bytes are free there"
    return TrainingError(
        f"checkpoint {str(folder)!r} cannot be written: {error}; this process's part takes "
        f"{snapshot.nbytes:,} bytes, {room}"
    ).of("checkpoint.not_written")
