"""The private parts of Ray that the client of jobs uses (Ray 2.60). Ray is imported when they are called."""

import logging
import os
from collections import Counter
from pathlib import Path

_TALKATIVE = (
    "ray.dashboard.modules.dashboard_sdk",  # a line for each upload
    "ray.dashboard.modules.job.sdk",  # that a WebSocket was closed
    "ray._private.runtime_env.packaging",  # which ignore files it has read
    "ray._private.runtime_env.working_dir",  # that it leaves out .git
)
"""Loggers of Ray's client. Importing some of them sets their level, so that a level above them has no effect."""


def silence_client() -> None:
    """Let Ray's client report errors only. Call this once it is imported."""
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)


def is_uploaded(file: Path, folder: Path) -> bool:
    """Return True if Ray uploads ``file`` with the working directory ``folder``.

    Ray leaves out what the ``.gitignore`` and ``.rayignore`` of each folder on the way exclude, also outside a
    repository. Only its own code knows exactly what that is.
    """
    from ray._private.runtime_env.packaging import get_excludes_from_ignore_files

    silence_client()
    file, folder = file.absolute(), folder.absolute()
    if not file.is_relative_to(folder) or ".." in file.parts or not file.is_file():
        return False
    reads_gitignore, excluded = _reads_gitignore(), []
    # From the folder down: an ignore file holds for everything below it.
    for path in reversed([file, *(parent for parent in file.parents if parent.is_relative_to(folder))]):
        excluded += get_excludes_from_ignore_files(path, reads_gitignore)
        if any(excludes(path) for excludes in excluded):
            return False
    return True


def uploaded_bytes(folder: Path) -> Counter[str]:
    """Return the bytes that Ray uploads of each file and folder in a working directory, before compression."""
    from ray._private.runtime_env.packaging import _dir_travel

    sizes: Counter[str] = Counter()

    def add(path: Path) -> None:
        if path.is_file():
            sizes[path.relative_to(folder).parts[0]] += path.stat().st_size

    _dir_travel(folder, [], add, include_gitignore=_reads_gitignore())
    # Ray leaves it out by default.
    del sizes[".git"]
    return sizes


def _reads_gitignore() -> bool:
    from ray._private.ray_constants import RAY_RUNTIME_ENV_IGNORE_GITIGNORE

    return os.environ.get(RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
