"""Which run a person means who says ``train.resume``."""

from operator import attrgetter

from upath import UPath

from app.config import Recipe, load_recipe
from app.errors import RecipeError, StorageError
from app.runs import CONFIG_FILE, Run, has_succeeded, newest_unfinished, runs_folder
from app.storage import open_storage
from app.training.coordination.heartbeat import require_silence

LATEST = "latest"
_FIXED = (
    "task", "data", "model", "train.seed", "train.global_batch_size", "train.optimizer.name",
)  # fmt: skip
"""Keys without which a checkpoint means something else."""


def start_or_resume(job: str, recipe: Recipe) -> Run:
    """The run that the recipe's ``train.resume`` names, or a new one.

    Raises:
        StorageError: the named run does not exist, is being trained, or has finished.
        RecipeError: the recipe has changed since in a way that its checkpoints do not fit, or cannot be read.
    """
    asked = recipe.train.resume
    if asked is None:
        return Run.start(job, recipe)
    storage = open_storage(recipe.storage)
    runs = runs_folder(storage, job)
    run_id = newest_unfinished(storage, job, recipe.name) if asked == LATEST else asked
    if run_id is None:
        print(f"train.resume={LATEST}: no run of {recipe.name} is unfinished; starting one", flush=True)
        return Run.start(job, recipe)
    if not (runs / run_id / CONFIG_FILE).exists():
        raise StorageError(f"train.resume is {run_id!r}, and {str(runs)!r} has no such run: give its id, or {LATEST}")
    require_silence(runs / run_id)  # first: a run that is being trained may be about to finish
    if has_succeeded(runs / run_id):
        raise StorageError(f"train.resume is {run_id!r}, which has finished: leave it out to start a new run")
    _check_same(recipe, _earlier(runs / run_id), run_id)
    print(f"run {run_id} goes on", flush=True)
    return Run.start(job, recipe, run_id)


def _earlier(run: UPath) -> Recipe:
    """What the run was started with. Raises RecipeError if it cannot be read, or is of another version."""
    try:
        return load_recipe(str(run / CONFIG_FILE))
    except RecipeError as error:
        raise RecipeError(f"run {run.name} cannot go on: {error}; leave train.resume out to start a new run") from error


def _check_same(recipe: Recipe, earlier: Recipe, run_id: str) -> None:
    for key in _FIXED:
        value_in = attrgetter(key)
        if value_in(recipe) != value_in(earlier):
            raise RecipeError(
                f"{key} is not what run {run_id} was started with, and its checkpoints are of no use with another: "
                "change it back, or leave train.resume out to start a new run"
            )
