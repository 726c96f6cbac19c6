"""The shards in storage: listed, found by name, and deleted; and which runs read them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Self

from upath import UPath

from app.artifacts import DATA
from app.data.preparation.prepare import SHARDS
from app.data.prepared import SHARDS_FILE
from app.data.sharded import ShardReference
from app.data.shards import INDEX_FILE, ShardIndex
from app.errors import StorageError
from app.runs import runs_folder
from app.shared_files import map_concurrently, read
from app.storage import list_names

_JOBS = ("train", "tune")
"""Jobs whose runs keep a reference to shards."""
_YOUNG = timedelta(hours=1)
"""A run prepares shards before it has a reference to them."""


@dataclass(frozen=True)
class ShardSet:
    """A folder of shards in storage."""

    path: UPath
    index: ShardIndex | None
    """None: its preparation was interrupted, or is under way, or the index cannot be read."""
    runs: Sequence[str] = field(default=())
    """Runs that read it, as JOB/RUN."""
    problem: str | None = None
    """Why the index cannot be read, if there is one that cannot."""

    @classmethod
    def open(cls, path: UPath, runs: Sequence[str] = ()) -> Self:
        """Return the shards in a folder. One index that cannot be read keeps nobody from the others."""
        try:
            return cls(path, ShardIndex.find(path), runs)
        except StorageError as error:
            return cls(path, None, runs, str(error))

    @property
    def is_unused(self) -> bool:
        """Whether it is complete and no run reads it."""
        return self.index is not None and not self.runs

    @property
    def is_young(self) -> bool:
        """Whether a run that is starting may be about to read it."""
        return self.index is not None and datetime.now(UTC) - self.index.created < _YOUNG

    @property
    def name(self) -> str:
        """The beginning of its fingerprint."""
        return str(self.path.name)


def list_shards(storage: UPath) -> list[ShardSet]:
    """List all shards in storage, the newest first. Takes a request for each, and for each run."""
    root = storage / SHARDS
    found = map_concurrently(storage, lambda name: ShardSet.open(root / name), sorted(list_names(root)))
    # Runs come last: one that began meanwhile is seen.
    runs = readers(storage)
    found = [replace(one, runs=runs.get(one.name, ())) for one in found]
    return sorted(found, key=lambda one: one.index.created.timestamp() if one.index else 0.0, reverse=True)


def find_shards(storage: UPath, named: str) -> ShardSet:
    """Return the shards whose name begins with ``named``. Raises StorageError if there are none, or several."""
    names = [name for name in list_names(storage / SHARDS) if name.startswith(named)]
    if len(names) != 1:
        found = f"{len(names)} data, such as {sorted(names)[0]}: give more of the name" if names else "no such data"
        raise StorageError(f"storage {str(storage)!r} has {found} ({named!r}): 'rayloom data list' shows them").of(
            "prepared_data.ambiguous" if names else "prepared_data.unknown"
        )
    path = storage / SHARDS / names[0]
    return ShardSet.open(path, readers(storage).get(names[0], ()))


def readers(storage: UPath) -> Mapping[str, list[str]]:
    """Return the runs that read shards, as JOB/RUN, by the name of the shards."""
    folders = [
        (f"{job}/{run_id}", runs_folder(storage, job) / run_id / DATA)
        for job in _JOBS
        for run_id in list_names(runs_folder(storage, job))
    ]
    found = map_concurrently(storage, lambda item: (item[0], _references(item[1])), folders)
    runs = defaultdict[str, list[str]](list)
    for run, names in found:
        for name in sorted(names):
            runs[name].append(run)
    return runs


def _references(folder: UPath) -> set[str]:
    """Return the names of the shards that a run's data refer to. A search has a folder for each way to prepare them."""
    inner = [folder / name / SHARDS_FILE for name in list_names(folder) if "." not in name]
    contents = [content for file in [folder / SHARDS_FILE, *inner] if (content := read(file)) is not None]
    references = [ShardReference.model_validate_json(content) for content in contents]
    return {reference.location.rstrip("/").rpartition("/")[2] for reference in references}


def delete_shards(shards: ShardSet) -> None:
    """Remove shards for good. The index goes first: what has none is not read."""
    (shards.path / INDEX_FILE).unlink(missing_ok=True)
    with suppress(FileNotFoundError):  # in an object store a folder ends with its last file
        shards.path.fs.rm(shards.path.path, recursive=True)
