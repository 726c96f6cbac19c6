"""Options that several commands share."""

from typing import Annotated

import typer
from upath import UPath

from app.cluster.state import read_state
from app.errors import StorageError
from app.runs import CONFIG_FILE, folder_of_run
from app.storage import absolute_location, open_storage

Storage = Annotated[str | None, typer.Option(help="Default: the local cluster's, else $RAYLOOM_STORAGE.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Such as train.epochs=3.")]


def chosen_storage(storage: str | None) -> UPath:
    """Return the given storage, else the local cluster's, else the default."""
    cluster = read_state()
    return open_storage(absolute_location(storage) if storage else cluster.storage if cluster else None)


def train_run(run_id: str, storage: str | None) -> UPath:
    """Return the folder of a training run. Raise StorageError if there is none."""
    folder = folder_of_run(chosen_storage(storage), "train", run_id)
    if not (folder / CONFIG_FILE).exists():
        raise StorageError(f"{str(folder)!r} is no training run: check the run's id, and --storage")
    return folder
