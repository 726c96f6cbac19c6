"""A marker file in the run's folder, with which workers check that all nodes share its storage."""

import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from upath import UPath

from app.errors import UnsharedStorageError
from app.training.worker import Worker, run_on_all


@contextmanager
def marked(folder: UPath) -> Iterator[str]:
    """Keep a new marker file in ``folder`` inside the context, and yield its name.

    The name is unique, because NFS may show stale content of a file that existed before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f".mark-{uuid.uuid4().hex}"
    mark.write_bytes(b"")
    try:
        yield mark.name
    finally:
        mark.unlink(missing_ok=True)


def require_mark(folder: UPath, mark: str, name: str = "") -> None:
    """Check that this process sees the ``mark`` that another process wrote to ``folder``.

    ``name`` is what the error calls this process, before its host.

    Raises:
        UnsharedStorageError: it does not see the mark.
    """
    if not (folder / mark).exists():
        raise UnsharedStorageError(
            f"the nodes do not share storage: {name}{socket.gethostname()} cannot see {str(folder)!r}, which was just "
            "written; set storage, or RAYLOOM_STORAGE, to a folder that every node mounts, or to an object store such "
            "as s3://bucket/prefix"
        ).of("storage.not_shared", "storage")


def require_shared(worker: Worker, folder: UPath, mark: str) -> None:
    """Check that every worker sees the ``mark``. Collective: all return or all raise.

    Raises:
        UnsharedStorageError: some workers do not see it. The first is named.
    """
    run_on_all(partial(require_mark, folder, mark, f"rank {worker.rank} on "))
