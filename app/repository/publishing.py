"""Adding a version to a model's folder, whole or not at all."""

import secrets
from collections.abc import Callable

from upath import UPath

from app.repository.manifest import Manifest, ModelCard
from app.repository.version import copy_files, remove, seal, take_number, withdraw
from app.storage import is_local


def add_version(model: UPath, files: UPath, card: ModelCard, next_number: Callable[[], int]) -> Manifest:
    """Make a version of the files, under the first number that no other publisher takes meanwhile.

    On a local disk it is staged and renamed. An object store cannot rename: there the publisher claims a number,
    which one can, and writes the manifest last. Whatever ends a publisher, a reader sees nothing of what it had begun.
    """
    add = _add_by_rename if is_local(model) else _add_in_place
    return add(model, files, card, next_number)


def _add_by_rename(model: UPath, files: UPath, card: ModelCard, next_number: Callable[[], int]) -> Manifest:
    staged = model / f".{secrets.token_hex(4)}.tmp"
    try:
        copy_files(files, staged)
        while True:
            manifest = seal(staged, files, next_number(), model.name, card)
            if _renamed(staged, model / str(manifest.version)):
                return manifest
    except BaseException:
        remove(staged)
        raise


def _add_in_place(model: UPath, files: UPath, card: ModelCard, next_number: Callable[[], int]) -> Manifest:
    while not take_number(folder := model / str(next_number())):
        pass
    try:
        copy_files(files, folder)
        return seal(folder, files, int(folder.name), model.name, card)
    except BaseException:
        withdraw(folder)
        raise


def _renamed(staged: UPath, target: UPath) -> bool:
    """Whether ``staged`` is ``target`` now; not if another publisher was faster."""
    try:
        staged.rename(target)
    except OSError:
        if target.exists():
            return False
        raise
    return True
