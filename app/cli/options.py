"""Options that several commands share."""

import os
from typing import Annotated

import typer
from upath import UPath

from app.cluster.job_view import Detail
from app.cluster.packages import default_storage
from app.cluster.state import read_state
from app.errors import RequestError, StorageError
from app.reports.catalog import find_run
from app.reports.run_folder import RunFolder
from app.storage import absolute_location, is_local, list_names, open_storage


def _run_ids(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the ids of runs that begin so, for completion in a shell."""
    root = chosen_storage(ctx.params.get("storage"))
    ids = [name for job in list_names(root / "runs") for name in list_names(root / "runs" / job)]
    return sorted((name for name in ids if name.startswith(incomplete)), reverse=True)


Storage = Annotated[
    str | None,
    typer.Option(help="Default: the local cluster's, else $RAYLOOM_STORAGE, else the default of this folder."),
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Such as train.epochs=3.")]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="The run's id, or its beginning.", autocompletion=_run_ids)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show only the result, warnings and errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also show Ray's own lines.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def chosen_storage(storage: str | None, is_new: bool = False) -> UPath:
    """Return the given storage, else the local cluster's, else the one that 'rayloom up' would use here.

    Raises:
        StorageError: a storage that was named does not exist, unless ``is_new`` allows that.
    """
    cluster = read_state()
    root = open_storage(absolute_location(storage) if storage else cluster.storage if cluster else default_storage())
    is_named = storage or (not cluster and os.environ.get("RAYLOOM_STORAGE"))
    # An object store has no empty folders.
    if is_named and not is_new and is_local(root) and not root.exists():
        source = "--storage" if storage else "RAYLOOM_STORAGE"
        raise StorageError(
            f"{source} is {str(root)!r}, which does not exist: give a folder that has runs/ or models/"
        ).of("storage.missing", "storage")
    if is_local(root) and root.is_file():
        raise StorageError(f"storage {str(root)!r} is a file: give a folder that has runs/ or models/").of(
            "storage.not_a_folder", "storage"
        )
    return root


def train_run(named: str, storage: str | None) -> RunFolder:
    """Return the training run with an id, which may be shortened. Raises StorageError."""
    return find_run(chosen_storage(storage), named, "train")


def detail_of(quiet: bool, verbose: bool) -> Detail:
    """Return how much of a job's log is shown. Raises RequestError for a contradiction."""
    if quiet and verbose:
        raise RequestError("--quiet and --verbose contradict each other: give one of them").of(
            "options.contradict", "--quiet"
        )
    return "quiet" if quiet else "verbose" if verbose else "normal"
