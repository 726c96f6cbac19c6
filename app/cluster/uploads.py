"""Check that the files a recipe names are uploaded with the folder from which a job is submitted."""

import os
from os.path import exists  # False for a text that is no path
from pathlib import Path

from app.cluster.ray_internals import ignoring_rule, uploaded_files, visit_uploaded
from app.config import Recipe, local_paths
from app.errors import ClusterError, RecipeError

_PROJECT_FILES = (".git", "pyproject.toml")
"""Each lies in the top folder of a project."""


def require_uploaded(recipe: Recipe, folder: Path) -> None:
    """Refuse a recipe with a relative path that exists here, and that the job's copy of ``folder`` will lack.

    A path that exists nowhere is left to the job: it may be the name of a model on a hub, or of a built-in set.

    Raises:
        RecipeError: a path is excluded by an ignore file, or lies in another folder of the project. The key is named.
        ClusterError: the folder has a file that cannot be sent.
    """
    require_sendable(folder)  # before folders are looked at, because of symlinks
    for key, given in local_paths(recipe):
        if reason := _reason_not_uploaded(given, folder):
            raise RecipeError(f"{key} {given!r} {reason}").of("path.not_uploaded", key)


def _reason_not_uploaded(given: str, folder: Path) -> str | None:
    path = folder / given
    if not exists(path):
        return _place_in_project(given, folder)
    inside = path.resolve() if ".." in path.parts else path
    if not inside.is_relative_to(folder):
        return f"is outside of the current folder {str(folder)!r}, which alone is uploaded: {_way_out(inside)}"
    files = _visible_files(inside)
    missing = sorted(files - uploaded_files(inside, folder))
    if not missing:
        return None
    what = "it is" if inside.is_file() else f"{len(missing):,} of its {len(files):,} files are"
    rule = ignoring_rule(missing[0], folder)
    because = f": {str(rule[0])!r} excludes {str(missing[0])!r} by its line {rule[1]!r}" if rule else ""
    return f"exists here, but {what} not uploaded with the job{because}; {_way_out(inside)}"


def require_sendable(folder: Path) -> None:
    """Raise ClusterError if a working directory has a file that Ray fails to send, or would read without end."""
    visit_uploaded(folder, lambda path: _require_sendable(path, str(path.relative_to(folder))))


def _require_sendable(path: Path, name: str) -> None:
    way_out = "remove it, or name it in .rayignore, which is written like .gitignore"
    if path.is_fifo():
        problem = "it is a named pipe"
    elif path.is_char_device() or path.is_block_device():
        problem = "it is a device"
    elif path.is_symlink() and os.path.realpath(path) in map(os.path.realpath, path.parents):
        problem = "it is a symlink to one of its parent folders"
    elif name.encode(errors="ignore").decode() != name:
        problem, way_out = "its name is not valid UTF-8", "rename or remove it"  # .rayignore is read as UTF-8
    else:
        return
    raise ClusterError(f"{str(path)!r} cannot be sent with the job, because {problem}: {way_out}").of(
        "path.not_sendable"
    )


def _place_in_project(given: str, folder: Path) -> str | None:
    """Say which folder of the project above ``folder`` has the path; None if there is none."""
    for parent in _parents_in_project(folder):
        if exists(parent / given):
            return (
                f"is in {str(parent)!r}, and only the current folder {str(folder)!r} is uploaded: submit from "
                f"{str(parent)!r}, or {_way_out(parent / given)}"
            )
    return None


def _visible_files(path: Path) -> set[Path]:
    """Return a file itself, or the files of a folder that sources read: those that are not hidden."""
    if path.is_file():
        return {path}
    return {
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    }


def _parents_in_project(folder: Path) -> list[Path]:
    """Return the folders above ``folder``, up to the top of its project; none if it is the top, or in no project."""
    for number, place in enumerate([folder, *folder.parents]):
        if any((place / name).exists() for name in _PROJECT_FILES):
            return [*folder.parents][:number]
    return []


def _way_out(path: Path) -> str:
    return f"give its absolute path, {str(path)!r}, if every machine of the cluster has it, or a URI"
