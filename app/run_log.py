"""``log.txt`` of a run: what its job prints, kept in storage beside the result, also when the cluster is gone."""

import array
import fcntl
import os
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from upath import UPath

from app.best_effort import BestEffort, repeat_in_background, warn
from app.shared_files import read
from app.storage import is_local, write_atomically

LOG_FILE = "log.txt"
_INTERVAL_S = 2.0
_MAX_SHARE = 0.1
"""Maximum share of time spent copying. An object store takes the whole log each time."""
_DRAIN_TIMEOUT_S = 2.0


@contextmanager
def keep_log(run_folder: UPath, may_write: Callable[[], bool]) -> Iterator[None]:
    """Copy what this process and its children print within the block to ``log.txt`` in the run's folder.

    It is still printed. Two ``tee`` processes pass it on, so the last words of a process that is killed are not lost.

    Args:
        may_write: returns whether the folder is this job's. Before that, the output is kept on this machine.
    """
    with tempfile.TemporaryDirectory(prefix="rayloom-log-") as temporary:
        local = Path(temporary, LOG_FILE)
        copier = _Copier(local, run_folder / LOG_FILE)

        def copy() -> None:
            if may_write():
                copier.copy()

        with repeat_in_background(copy, _INTERVAL_S, name="log", max_share=_MAX_SHARE), _duplicated(local):
            yield
        copy()


@contextmanager
def _duplicated(file: Path) -> Iterator[None]:
    """Append to ``file`` what is written to standard output and standard error."""
    try:
        tees = [_Tee(descriptor, file) for descriptor in (1, 2)]
    except OSError as error:
        warn(f"{LOG_FILE} is not kept: tee cannot be started ({error})")
        yield
        return
    try:
        yield
    finally:
        _flush()
        for tee in tees:
            tee.close()


class _Tee:
    """A process that copies what is written to a file descriptor of this process."""

    def __init__(self, descriptor: int, file: Path) -> None:
        _flush()
        self._descriptor, self._original = descriptor, os.dup(descriptor)
        self._read_end, write_end = os.pipe()
        # In a session of its own: signals to the job's process group must not end it before the job.
        self._process = subprocess.Popen(
            ["tee", "-a", str(file)],  # noqa: S607 # wherever coreutils lie
            stdin=self._read_end,
            stdout=self._original,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.dup2(write_end, descriptor)
        os.close(write_end)

    def close(self) -> None:
        """Print to the original place again, once everything has been passed on.

        Children may still hold the pipe. The process ends with the last of them.
        """
        os.dup2(self._original, self._descriptor)
        deadline_s = time.monotonic() + _DRAIN_TIMEOUT_S
        while _bytes_waiting(self._read_end) and time.monotonic() < deadline_s:
            time.sleep(0.001)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.05)  # it may have read the last bytes without having written them
        os.close(self._read_end)
        os.close(self._original)


class _Copier:
    """Copies a growing local file to the end of a file in storage."""

    def __init__(self, source: Path, target: UPath) -> None:
        self._source, self._target = source, target
        self._copied = 0
        self._earlier: bytes | None = None
        """On an object store, the content from before this job."""
        self._writing = BestEffort(f"{str(target)!r} cannot be written and will be retried", "the job")

    def copy(self) -> None:
        """Copy what is new."""
        if self._source.exists() and self._source.stat().st_size > self._copied:
            self._writing(self._copy)

    def _copy(self) -> None:
        if is_local(self._target):
            with self._source.open("rb") as source, Path(self._target.path).open("ab") as target:
                source.seek(self._copied)
                new = source.read()
                target.write(new)
            self._copied += len(new)
            return
        if self._earlier is None:
            self._earlier = read(self._target) or b""
        content = self._source.read_bytes()
        write_atomically(self._target, self._earlier + content)
        self._copied = len(content)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _bytes_waiting(pipe: int) -> int:
    """Return how many bytes lie in a pipe."""
    waiting = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, waiting)
    return waiting[0]
