"""Reading storage that others write, and writing only if nobody else has written meanwhile."""

import fcntl
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from upath import UPath

from app.storage import is_local, write_atomically

Item = TypeVar("Item")
Made = TypeVar("Made")

_LOCK_FILE = ".lock"
_S3 = ("s3", "s3a")
_ONE_REQUEST = {"max_concurrency": 1}
"""Else s3fs asks for the size first, to read large files in pieces."""
_MAX_REQUESTS = 32
"""At once, of an object store."""
_REFUSALS = ("PreconditionFailed", "ConditionalRequestConflict")
"""What S3 answers when a condition of a write does not hold, or somebody writes at the same time."""


@contextmanager
def alone(folder: UPath) -> Iterator[None]:
    """On a local disk keep everybody else who asks out of a folder; on an object store do nothing."""
    if not is_local(folder):
        yield
        return
    with Path(folder.path, _LOCK_FILE).open("ab") as file:  # NFS locks only what is open for writing
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def map_at_once(storage: UPath, work: Callable[[Item], Made], items: Iterable[Item]) -> list[Made]:
    """Do the same work for each item, in order; on an object store, where it waits for requests, many at once."""
    if is_local(storage):
        return list(map(work, items))
    with ThreadPoolExecutor(_MAX_REQUESTS, thread_name_prefix="storage") as pool:
        return list(pool.map(work, items))


def read(path: UPath) -> bytes | None:
    """The content of a file that others may replace just now, old or new; None if there is none.

    In one request: a file that is opened on S3 cannot be read on once it has been replaced.
    """
    try:
        content: bytes = path.fs.cat_file(path.path, **(_ONE_REQUEST if path.protocol in _S3 else {}))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return content


def claim(path: UPath) -> bool:
    """Make an empty file, unless it is there: of all who try at once, one succeeds."""
    try:
        path.fs.pipe_file(path.path, b"", mode="create")
    except OSError as error:
        if _was_late(error):
            return False
        raise
    return True


def change(path: UPath, changed: Callable[[bytes], bytes]) -> None:
    """Replace a file's content, ``b""`` if it is not there, by what ``changed`` makes of it.

    Nothing that another writes meanwhile is lost: on a local disk writers take turns, on S3 ``changed`` is asked again
    when the file has become another. On other object stores there is no such guarantee, and writers must take turns.
    """
    if path.protocol in _S3:
        while not _changed_on_s3(path, changed):
            pass
        return
    with alone(path.parent):
        write_atomically(path, changed(read(path) or b""))


def _changed_on_s3(path: UPath, changed: Callable[[bytes], bytes]) -> bool:
    """Whether it was done, before the file became another."""
    try:
        content, condition = _read_from_s3(path)
        new = changed(content)
        if new != content:
            path.fs.pipe_file(path.path, new, **condition)
    except OSError as error:
        if _was_late(error):
            return False
        raise
    return True


def _read_from_s3(path: UPath) -> tuple[bytes, dict[str, str]]:
    """The content, and the condition under which it is still so."""
    try:
        with path.fs.open(path.path, "rb") as file:  # reads what had this ETag, or fails
            return file.read(), {"IfMatch": file.details["ETag"]}
    except FileNotFoundError:
        return b"", {"IfNoneMatch": "*"}


def _was_late(error: BaseException | None) -> bool:
    """Whether storage refused because somebody else was faster; s3fs says so in a cause."""
    while error is not None:
        answer = getattr(error, "response", {}).get("Error", {})
        if isinstance(error, FileExistsError) or answer.get("Code") in _REFUSALS:
            return True
        error = error.__cause__
    return False
