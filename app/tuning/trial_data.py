"""The prepared data of trials: made once for all that read the same, kept in memory from one trial to the next."""

import shutil
import uuid
from dataclasses import dataclass, field

from upath import UPath

from app.checksums import CHECKSUMS_FILE, sha256_of
from app.config import Recipe
from app.data.prepared import PreparedData
from app.storage import is_local
from app.tasks import load_prepared, prepare


def prepare_data(recipe: Recipe, folder: UPath) -> UPath:
    """Where the recipe's prepared data lies under ``folder``; it is made if it is not there.

    Raises:
        DataError: the data cannot be read, or is not what the recipe says.
    """
    place = _place(recipe, folder)
    if not _is_whole(place):
        _publish(prepare(recipe), place)
    return place


def keep_data(data: PreparedData, recipe: Recipe, folder: UPath) -> None:
    """Put what was prepared of the recipe where its trials look for it."""
    if not _is_whole(place := _place(recipe, folder)):
        _publish(data, place)


def _is_whole(place: UPath) -> bool:
    return (place / CHECKSUMS_FILE).exists()


def _publish(data: PreparedData, place: UPath) -> None:
    """Save the data where others may be saving the same: on a disk whole or not at all; the first one's counts."""
    if not is_local(place):
        data.save(place)
        return
    aside = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}.tmp")
    data.save(aside)
    try:
        aside.rename(place)
    except OSError:
        if not _is_whole(place):
            raise
        shutil.rmtree(aside.path)


def _place(recipe: Recipe, folder: UPath) -> UPath:
    """A folder for each way to prepare data."""
    return folder / sha256_of(f"{recipe.task} {recipe.data.model_dump_json()}".encode())[:12]


@dataclass
class DataCache:
    """The data of the last trial of this process."""

    folder: UPath
    _place: UPath | None = None
    _data: PreparedData | None = field(default=None, repr=False)

    def get(self, recipe: Recipe) -> PreparedData:
        """The recipe's prepared data."""
        place = prepare_data(recipe, self.folder)
        if self._data is None or place != self._place:
            self._data, self._place = load_prepared(recipe, place), place
        return self._data
