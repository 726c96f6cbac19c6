"""The run that ``train.resume`` names."""

import os
from operator import attrgetter

from upath import UPath

from app.config import AutoPlan, Recipe, StreamConfig, load_stored_recipe
from app.config.sources import join_sources
from app.errors import RecipeError, StorageError
from app.heartbeat import require_not_running
from app.runs import (
    CONFIG_FILE,
    JOB_FILE,
    LOST_JOB,
    Run,
    folder_of_run,
    has_succeeded,
    newest_first,
    recipe_named_in,
    runs_folder,
)
from app.shared_files import read
from app.storage import open_storage
from app.training.stop_request import written_request

LATEST = "latest"
_FIXED_KEYS = (
    "task", "data", "model", "train.seed", "train.global_batch_size", "train.tokens_per_batch", "train.curriculum",
    "train.optimizer.name", "train.prune",
)  # fmt: skip
"""Keys that must not change, because a checkpoint is of no use with other values."""
_SCHEDULE_KEYS = ("train.epochs", "train.max_steps", "train.schedule")
"""Keys that determine the factor of ``train.optimizer.lr`` at each step."""


def start_or_resume(job: str, recipe: Recipe) -> Run:
    """Return the run that the recipe's ``train.resume`` names, or a new one.

    Raises:
        StorageError: the named run does not exist, is being trained, or has finished.
        RecipeError: the run's checkpoints do not fit the recipe, or its own recipe cannot be read.
    """
    resume = recipe.train.resume
    if resume is None:
        return Run.start(job, recipe)
    storage = open_storage(recipe.storage)
    run_id = newest_unfinished(storage, job, recipe.name) if resume == LATEST else resume
    if run_id is None:
        print(f"train.resume={LATEST}: no run of {recipe.name} is unfinished; starting one", flush=True)
        return Run.start(job, recipe)
    folder = folder_of_run(storage, job, run_id)
    if not (folder / CONFIG_FILE).exists():
        raise StorageError(
            f"train.resume is {run_id!r}, and {str(folder.parent)!r} has no such run: give a run's id, or {LATEST}"
        ).of("run.unknown", "train.resume")
    # For ``latest``, ``newest_unfinished`` has looked already.
    if resume != LATEST and _has_finished(folder):
        raise StorageError(f"train.resume is {run_id!r}, which has finished: leave it out to start a new run").of(
            "resume.finished", "train.resume"
        )
    # The run's own recipe, because the one that is given may have changed.
    earlier = _recipe_of(folder)
    recipe = recipe.as_found_by(earlier)
    _check_same(recipe, earlier, run_id)
    print(f"run {run_id} goes on", flush=True)
    _print_schedule_changes(recipe, earlier)
    run = Run.start(job, _with_plan_of(earlier, recipe), run_id)
    run.earlier_request = written_request(folder)
    return run


def _with_plan_of(earlier: Recipe, recipe: Recipe) -> Recipe:
    """Return ``recipe`` with the plan of ``earlier``, if its own is auto and the number of workers is the same."""
    train = recipe.train
    if not isinstance(train.plan, AutoPlan) or train.workers != earlier.train.workers:
        return recipe
    return recipe.with_plan(earlier.train.plan)


def newest_unfinished(storage: UPath, job: str, recipe_name: str) -> str | None:
    """Return the id of a job's newest run of a recipe, or None if it has succeeded.

    A job that was submitted in place of a lost one sees only the runs that the lost one opened. If that was still
    waiting for its turn, it had none, and the newest run is that of another job.

    Raises:
        StorageError: the run is under way.
    """
    lost = os.environ.get(LOST_JOB)
    for run in newest_first(runs_folder(storage, job)):
        is_candidate = recipe_named_in(run.name) == recipe_name and (run / CONFIG_FILE).exists()
        if is_candidate and (lost is None or read(run / JOB_FILE) == lost.encode()):
            return None if _has_finished(run) else run.name
    return None


def require_unfinished(run: Run) -> None:
    """Check that no other job has finished the run since this one began. Call it when the run is locked.

    Raises:
        StorageError: another job has.
    """
    if has_succeeded(run.folder):
        run.is_ours = False  # the result of the other job stays
        raise StorageError(f"run {run.run_id} has finished while this job waited: submit a new run").of("run.finished")


def _has_finished(run: UPath) -> bool:
    """Return whether the run has succeeded. Raises StorageError if it is under way, since it may succeed any moment."""
    require_not_running(run)
    return has_succeeded(run)


def _recipe_of(run: UPath) -> Recipe:
    """Return the recipe of the run. Raises RecipeError if it cannot be read, or is of another version."""
    try:
        return load_stored_recipe(str(run / CONFIG_FILE))
    except RecipeError as error:
        raise RecipeError(f"run {run.name} cannot go on: {error}; leave train.resume out to start a new run").of(
            "run.unreadable"
        ) from error


def _comparable(recipe: Recipe, num_sources: int) -> Recipe:
    """Return the recipe as given, without keys that affect only later batches: weights and added sources."""
    given = recipe.as_given
    update: dict[str, object] = {}
    if stream := given.data.stream:
        update = {"stream": StreamConfig(labels=stream.labels, samples=stream.samples)}
    if given.data.sources:
        kept = [source.model_copy(update={"weight": None}) for source in given.data.sources[:num_sources]]
        update = {"sources": kept, "source": join_sources(kept), "temperature": 1.0}
    return given.model_copy(update={"data": given.data.model_copy(update=update)}) if update else given


def _check_same(recipe: Recipe, earlier: Recipe, run_id: str) -> None:
    num_sources = len(earlier.data.sources)
    for key in _FIXED_KEYS:
        value_in = attrgetter(key)
        if value_in(_comparable(recipe, num_sources)) != value_in(_comparable(earlier, num_sources)):
            raise RecipeError(
                f"{key} is not what run {run_id} was started with, and its checkpoints are of no use with another: "
                "change it back, or leave train.resume out to start a new run"
            ).of("resume.differs", "train.resume")


def _print_schedule_changes(recipe: Recipe, earlier: Recipe) -> None:
    changed = [key for key in _SCHEDULE_KEYS if attrgetter(key)(recipe) != attrgetter(key)(earlier)]
    if changed:
        new = " and ".join(changed)
        print(f"the learning rate continues as if the run had started with the new {new}", flush=True)
