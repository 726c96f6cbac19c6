"""Checks on this machine, before a job is sent, of inputs that the job would refuse."""

from os.path import exists  # False for a text that is no path
from pathlib import Path

from app.cluster.packages import PACKAGES
from app.cluster.uploads import require_uploaded
from app.config import BUILT_IN_TASKS, Recipe
from app.errors import StorageError
from app.import_string import require_named
from app.repository.repository import Repository
from app.runs import latest_result
from app.storage import open_storage
from app.tasks import find_task

_READERS = ("lifecycle", "prepare", "train", "tune")
"""Jobs that read the recipe's data."""
_WITH_FILES = ("audio", "image", "record")
"""What a source holds whose cells may name other files."""


def require_inputs(job: str, recipe: Recipe, folder: Path, is_local: bool) -> None:
    """Check that the files which a recipe names are sent along, and that the data can be read.

    Data and modules that lie on a remote cluster alone are left to the job, and so are data of a task of one's own.

    Raises:
        RecipeError: a file is not sent along, or the model's factory does not exist.
        DataError: the data cannot be read.
    """
    require_uploaded(recipe, folder)
    if job not in _READERS:
        return
    if recipe.model.factory and (is_local or _has_module(folder, recipe.model.factory)):
        require_named(recipe.model.factory)
    # A chat is read with its pretrained model, which may lie on the nodes alone.
    if recipe.task not in BUILT_IN_TASKS.keys() - {"chat"} or recipe.data.stream is not None:
        return
    kind = find_task(recipe.task).samples(recipe)
    if is_local or _lies_in(recipe, folder, kind.contents):
        from app.data.preparation.preview import require_readable  # imports pyarrow

        require_readable(recipe.data, kind)


def require_stored(job: str, recipe: Recipe, location: str, is_local: bool) -> None:
    """Check that storage has what a job starts from: a training run to compile, or a version to deploy.

    Storage that cannot be opened here is left to the job of a remote cluster, whose nodes may have the driver and the
    credentials.

    Raises:
        StorageError: storage lacks that, or cannot be opened.
    """
    try:
        storage = open_storage(location)
    except StorageError:
        if is_local:
            raise
        return
    if job == "compile" and recipe.compile.weights is None:
        latest_result(storage, "train", recipe.name)
    if job == "deploy":
        repository = Repository(storage)
        if version := recipe.serve.version:
            repository.manifest(recipe.name, version)
        else:
            repository.production(recipe.name)


def _has_module(folder: Path, import_string: str) -> bool:
    """Return whether the module is sent along: it lies in ``folder``, or is one of Rayloom's."""
    package = import_string.partition(":")[0].partition(".")[0]
    return package in PACKAGES or exists(folder / package) or exists(folder / f"{package}.py")


def _lies_in(recipe: Recipe, folder: Path, contents: str) -> bool:
    """Return whether each source is sent along with ``folder``, and all that its cells name."""
    sources = [section.source for section in recipe.data.each_source()]
    uris = [uri for uri in (*sources, recipe.data.test_source) if uri]
    is_whole = contents not in _WITH_FILES
    return all(":" in uri or (is_whole and not Path(uri).is_absolute() and exists(folder / uri)) for uri in uris)
