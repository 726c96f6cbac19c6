"""The private parts of Ray that the client of jobs uses (Ray 2.60). Ray is imported when they are called."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from app.errors import ClusterError, first_line

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
    """Return True if Ray uploads ``file`` with the working directory ``folder``."""
    file, folder = file.absolute(), folder.absolute()
    return file.is_relative_to(folder) and ".." not in file.parts and file in uploaded_files(file, folder)


def uploaded_files(path: Path, folder: Path) -> set[Path]:
    """Return the files that Ray uploads of ``path``, a file or a folder in the working directory ``folder``.

    Both are absolute. Ray leaves out what the ``.gitignore`` and ``.rayignore`` of each folder on the way exclude, also
    outside a repository. Only its own code knows exactly what that is.

    Raises:
        ClusterError: a folder or an ignore file cannot be read.
    """
    from ray._private.runtime_env.packaging import _dir_travel, get_excludes_from_ignore_files

    silence_client()
    reads_gitignore, excluded = _reads_gitignore(), [_default_excludes(folder)]
    travelled: list[Path] = []
    with _reading(folder):
        # From the folder down: an ignore file holds for everything below it.
        for parent in _parents_within(path, folder):
            excluded += get_excludes_from_ignore_files(parent, reads_gitignore)
            if any(excludes(parent) for excludes in excluded):
                return set()
        _dir_travel(path, excluded, travelled.append, include_gitignore=reads_gitignore)
    return {file for file in travelled if file.is_file()}


def ignoring_rule(file: Path, folder: Path) -> tuple[Path, str] | None:
    """Return the ignore file, and its line, by which Ray does not upload ``file``; None if there is none."""
    from ray._private.runtime_env.packaging import _get_excludes

    names = [".gitignore", ".rayignore"] if _reads_gitignore() else [".rayignore"]
    ignore_files: list[Path] = []
    for path in [*_parents_within(file, folder), file]:
        ignore_files += [path / name for name in names if (path / name).is_file()]
        for ignore_file in ignore_files:
            lines = ignore_file.read_text(encoding="utf-8").splitlines()
            if _get_excludes(ignore_file.parent, lines)(path):
                # As in git, the last line that matches decides.
                return ignore_file, next(
                    line for line in reversed(lines) if _get_excludes(ignore_file.parent, [line])(path)
                )
    return None


def _parents_within(path: Path, folder: Path) -> list[Path]:
    """Return ``folder`` and the folders between it and ``path``, outermost first."""
    return [parent for parent in reversed(path.parents) if parent.is_relative_to(folder)]


def uploaded_bytes(folder: Path) -> Counter[str]:
    """Return the bytes that Ray uploads of each file and folder in a working directory, before compression."""
    sizes: Counter[str] = Counter()

    def add(path: Path) -> None:
        if path.is_file():
            sizes[path.relative_to(folder).parts[0]] += path.stat().st_size

    visit_uploaded(folder, add)
    return sizes


def visit_uploaded(folder: Path, visit: Callable[[Path], None]) -> None:
    """Call ``visit`` on each file and folder that Ray uploads of a working directory, which is absolute.

    Raises:
        ClusterError: a folder or an ignore file cannot be read.
    """
    from ray._private.runtime_env.packaging import _dir_travel

    quiet = logging.Logger("", logging.CRITICAL)  # Ray logs the errors of ``visit``, too
    with _reading(folder):
        _dir_travel(folder, [_default_excludes(folder)], visit, include_gitignore=_reads_gitignore(), logger=quiet)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Raise ClusterError if something in a working directory cannot be read within the block."""
    try:
        yield
    except OSError as error:
        raise ClusterError(
            f"{str(folder)!r} cannot be sent with the job ({first_line(error)}): make it readable, or move it elsewhere"
        ).of("path.not_readable") from error
    except (ValueError, IndexError) as error:
        raise ClusterError(
            f"{str(_invalid_ignore_file(folder))!r} is not UTF-8, or has an invalid pattern: correct it"
        ).of("ignore_file.invalid") from error


def _invalid_ignore_file(folder: Path) -> Path:
    """Return the ignore file that Ray cannot read. Return ``folder`` if there is none."""
    from ray._private.runtime_env.packaging import _get_ignore_file

    for name in (".gitignore", ".rayignore"):
        for file in folder.rglob(name):
            try:
                _get_ignore_file(file.parent, ignore_file=name)
            except (ValueError, IndexError):  # an IndexError for a lone exclamation mark
                return file
    return folder


def _default_excludes(folder: Path) -> Callable[[Path], bool]:
    """Return a predicate for what Ray leaves out of every working directory, such as .git and .venv."""
    from ray._private.ray_constants import get_runtime_env_default_excludes
    from ray._private.runtime_env.packaging import _get_excludes

    excludes: Callable[[Path], bool] = _get_excludes(folder, get_runtime_env_default_excludes())
    return excludes


def _reads_gitignore() -> bool:
    from ray._private.ray_constants import RAY_RUNTIME_ENV_IGNORE_GITIGNORE

    return os.environ.get(RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
