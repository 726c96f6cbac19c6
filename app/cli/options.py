"""Options that several commands share."""

from typing import Annotated

import typer
from upath import UPath

from app.cluster.state import read_state
from app.storage import absolute_location, open_storage

Storage = Annotated[str | None, typer.Option(help="Default: the local cluster's, else $RAYLOOM_STORAGE.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Such as train.epochs=3.")]


def chosen_storage(storage: str | None) -> UPath:
    """Return the given storage, else the local cluster's, else the default."""
    cluster = read_state()
    return open_storage(absolute_location(storage) if storage else cluster.storage if cluster else None)
