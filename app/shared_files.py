"""Read files that other processes write, and write only if no other process has written in between."""

import fcntl
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Self, TypeVar

from pydantic import BaseModel
from upath import UPath

from app.storage import is_local, write_atomically

Item = TypeVar("Item")
Result = TypeVar("Result")

_LOCK_FILE = ".lock"
_S3 = ("s3", "s3a")
_ONE_REQUEST = {"max_concurrency": 1}
"""Without this, s3fs first requests the size, to read large files in pieces."""
_MAX_REQUESTS = 32
"""Maximum number of concurrent requests to an object store."""
_COMPARED_BYTES = 256
"""Bytes before new lines that are compared with what was there: longer than what a line says of time."""
_REFUSALS = ("PreconditionFailed", "ConditionalRequestConflict")
"""S3 error codes for a conditional write whose condition fails, or that conflicts with a concurrent write."""


@contextmanager
def exclusive(folder: UPath) -> Iterator[None]:
    """Hold an exclusive lock on a folder of a local disk. On an object store do nothing."""
    if not is_local(folder):
        yield
        return
    with Path(folder.path, _LOCK_FILE).open("ab") as file:  # NFS locks only files that are open for writing
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def map_concurrently(storage: UPath, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Call ``work`` on each item and return the results in order. On an object store the calls run concurrently."""
    if is_local(storage):
        return list(map(work, items))
    with ThreadPoolExecutor(_MAX_REQUESTS, thread_name_prefix="storage") as pool:
        return list(pool.map(work, items))


def read(path: UPath) -> bytes | None:
    """Return the content of a file that other processes may be replacing: old or new; None if there is no file.

    It is read in one request: after a file on S3 is replaced, reads from an open handle fail.
    """
    try:
        content: bytes = path.fs.cat_file(path.path, **(_ONE_REQUEST if path.protocol in _S3 else {}))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return content


class KeptFile(BaseModel):
    """What a run keeps in a file of its folder, for its page."""

    file: ClassVar[str]
    """The name of the file."""

    def save(self, run_folder: UPath) -> None:
        """Write it for ``load``."""
        write_atomically(run_folder / self.file, self.model_dump_json().encode())

    @classmethod
    def load(cls, run_folder: UPath) -> Self | None:
        """Return what ``save`` wrote; None if the run has not come so far, or has none."""
        content = read(run_folder / cls.file)
        return None if content is None else cls.model_validate_json(content)


class GrowingFile:
    """A file of lines that another process appends to, read again and again. Each time only new lines are read."""

    def __init__(self, path: UPath) -> None:
        self._path = path
        self._read = 0
        """Bytes that were returned: whole lines."""
        self._last = b""
        """The last of these bytes. Others in their place mean that the file was written anew."""

    def new_lines(self) -> tuple[bytes, bool]:
        """Return the lines since the last call, and whether the file was written anew: then they are all its lines."""
        new, is_new_file = self._read_from(self._read - len(self._last)), False
        if not new.startswith(self._last):
            self._read, self._last, is_new_file = 0, b"", True
            new = self._read_from(0)
        whole = new[len(self._last) : new.rfind(b"\n") + 1]
        if whole:
            self._read += len(whole)
            self._last = whole[-_COMPARED_BYTES:]
        return whole, is_new_file

    def _read_from(self, start: int) -> bytes:
        """Return the file's content from a position on; nothing if the file is shorter, or missing."""
        try:
            if start == 0:
                return read(self._path) or b""
            content: bytes = self._path.fs.cat_file(self._path.path, start=start)
        except (FileNotFoundError, NotADirectoryError):
            return b""
        except (OSError, ValueError):  # S3 refuses a range that lies behind the end
            return b""
        return content


def claim(path: UPath) -> bool:
    """Create an empty file and return True, or False if it exists. Of concurrent calls only one succeeds."""
    try:
        path.fs.pipe_file(path.path, b"", mode="create")
    except OSError as error:
        if _lost_race(error):
            return False
        raise
    return True


def change(path: UPath, changed: Callable[[bytes], bytes]) -> None:
    """Replace a file's content with ``changed(content)``; the content of a missing file is ``b""``.

    No concurrent write is lost. On a local disk writers take a lock; on S3 ``changed`` is called again if the file was
    replaced in between. Other object stores give no such guarantee: there the callers must serialize their writes.
    """
    if path.protocol in _S3:
        while not _changed_on_s3(path, changed):
            pass
        return
    with exclusive(path.parent):
        write_atomically(path, changed(read(path) or b""), durable=True)


def _changed_on_s3(path: UPath, changed: Callable[[bytes], bytes]) -> bool:
    """Apply ``changed`` once. Return False if the file was replaced in between."""
    try:
        content, condition = _read_from_s3(path)
        new = changed(content)
        if new != content:
            path.fs.pipe_file(path.path, new, **condition)
    except OSError as error:
        if _lost_race(error):
            return False
        raise
    return True


def _read_from_s3(path: UPath) -> tuple[bytes, dict[str, str]]:
    """Return the content, and the write condition that it is still current."""
    try:
        with path.fs.open(path.path, "rb") as file:  # reads the version with this ETag, or fails
            return file.read(), {"IfMatch": file.details["ETag"]}
    except FileNotFoundError:
        return b"", {"IfNoneMatch": "*"}


def _lost_race(error: BaseException | None) -> bool:
    """Return whether storage refused because another writer was faster; s3fs puts that error in ``__cause__``."""
    while error is not None:
        answer = getattr(error, "response", {}).get("Error", {})
        if isinstance(error, FileExistsError) or answer.get("Code") in _REFUSALS:
            return True
        error = error.__cause__
    return False
