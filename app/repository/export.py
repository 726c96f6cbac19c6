"""A model repository that ``tritonserver --model-repository`` takes."""

import secrets

from upath import UPath

from app.errors import StorageError
from app.repository.repository import Repository
from app.repository.triton import BACKENDS, CONFIG_FILE, config_of
from app.repository.version import remove


def export_to_triton(repository: Repository, name: str, version: int, target: UPath) -> UPath:
    """Copy a version into the folder ``target`` on this machine, verified and with a configuration; return its model.

    Raises:
        StorageError: the version is not there or was changed, Triton has no backend for its engine, or the model is
            in ``target`` already.
    """
    manifest = repository.manifest(name, version)
    config = config_of(manifest)
    if config is None:
        raise StorageError(
            f"model {name!r}, version {version}, is of engine {manifest.engine_key.engine}, which Triton does not run: "
            f"export a version of {', '.join(BACKENDS)}"
        )
    model, staged = target / name, target / f".{secrets.token_hex(4)}.tmp"
    if model.exists():
        raise StorageError(f"{str(model)!r} is there already: remove it, or give another folder")
    try:
        repository.fetch(name, version, staged / str(version))
        (staged / CONFIG_FILE).write_text(config, encoding="utf-8")
        staged.rename(model)
    except BaseException:
        remove(staged)
        raise
    return model
