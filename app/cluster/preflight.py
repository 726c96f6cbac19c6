"""What a job would refuse first, found on this machine before the job is sent."""

from os.path import exists  # False for a text that is no path
from pathlib import Path

from upath import UPath

from app.cluster.uploads import require_uploaded
from app.config import BUILT_IN_TASKS, Recipe
from app.import_string import require_named
from app.repository.repository import Repository
from app.runs import latest_result
from app.tasks import find_task

_READERS = ("lifecycle", "prepare", "train", "tune")
"""Jobs that read the recipe's data."""


def require_inputs(job: str, recipe: Recipe, folder: Path, is_local: bool) -> None:
    """Check the files that a recipe names: that they are sent along, and that the data can be read.

    Data that lie on a remote cluster alone are left to the job, and so are those of a task of one's own.

    Raises:
        RecipeError: a file is not sent along, or the model's factory is not there.
        DataError: the data cannot be read.
    """
    require_uploaded(recipe, folder)
    if job not in _READERS:
        return
    if recipe.model.factory:
        require_named(recipe.model.factory)
    # A chat is read with its pretrained model, which may lie on the nodes alone.
    is_known = recipe.task in BUILT_IN_TASKS.keys() - {"chat"}
    if is_known and recipe.data.stream is None and (is_local or _lies_in(recipe, folder)):
        from app.data.preparation.preview import require_readable  # imports pyarrow

        require_readable(recipe.data, find_task(recipe.task).samples(recipe))


def require_stored(job: str, recipe: Recipe, storage: UPath) -> None:
    """Check that storage has what a job starts from: a training run to compile, or a version to deploy.

    Raises:
        StorageError: it lacks that.
    """
    if job == "compile" and recipe.compile.weights is None:
        latest_result(storage, "train", recipe.name)
    if job == "deploy":
        repository = Repository(storage)
        if version := recipe.serve.version:
            repository.manifest(recipe.name, version)
        else:
            repository.production(recipe.name)


def _lies_in(recipe: Recipe, folder: Path) -> bool:
    """Return whether each source is sent along with ``folder``."""
    uris = [section.source for section in recipe.data.each_source()]
    return all(":" in uri or (not Path(uri).is_absolute() and exists(folder / uri)) for uri in uris)
