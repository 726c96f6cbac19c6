"""From data to an endpoint in one job, tune, train, compile, deploy: python -m jobs.lifecycle RECIPE [key=value …]"""

import sys

from pydantic import BaseModel

from app.compile.variants import requested_variants
from app.config import Recipe, load_recipe
from app.errors import RayloomError
from app.runs import RESULT_FILE, Outcome, Result, Run, Step, execute, has_succeeded
from app.storage import write_atomically
from app.tasks import find_processor
from app.training.coordination.heartbeat import require_not_running
from app.training.resume import newest_unfinished, start_or_resume
from app.training.stop_request import read_stop_request
from jobs._runner import main
from jobs.compile import compile_on_node
from jobs.deploy import deploy
from jobs.train import train
from jobs.tune import tune

SEARCH_FILE = "search"
"""In a lifecycle's folder: the id of its tune run, noted before it begins."""


class LifecycleMetrics(BaseModel):
    """The metrics of every step, as the step's own result has them."""

    tune: dict[str, object] | None = None
    """None: the recipe has no tune section."""
    train: dict[str, object]
    compile: dict[str, object]
    deploy: dict[str, object]


def lifecycle(run: Run) -> Outcome:
    """Run every step on what the one before it made; each keeps a run of its own."""
    find_processor(run.recipe.task)  # refuses a task that cannot be compiled, before it is trained
    if not run.recipe.compile.chooses_node:
        requested_variants(run.recipe.compile)  # raises if an engine is not available on this machine
    goes_on = run.recipe.train.resume or (run.recipe.tune and run.recipe.tune.resume)
    before = newest_unfinished(run.storage, run.job, run.recipe.name) if goes_on else None
    run.open()
    tuned = _search(run, before) if run.recipe.tune else None
    best = load_recipe(tuned.artifacts["best_recipe"]) if tuned else run.recipe
    recipe = _with(best, "train", resume=run.recipe.train.resume)
    training = start_or_resume("train", recipe)
    trained = _step(training, train)
    require_no_request(training)
    compiled = _step(
        Run.start("compile", _with(recipe, "compile", weights=trained.artifacts["weights"])), compile_on_node
    )
    version = int(compiled.artifacts["model"].rpartition("/")[2])
    deployed = _step(Run.start("deploy", _with(recipe, "serve", version=version)), deploy)
    return Outcome(
        LifecycleMetrics(
            tune=tuned.metrics if tuned else None,
            train=trained.metrics,
            compile=compiled.metrics,
            deploy=deployed.metrics,
        ),
        (tuned.artifacts if tuned else {}) | trained.artifacts | compiled.artifacts | deployed.artifacts,
    )


def _search(run: Run, before: str | None) -> Result:
    """What the recipe's search came to. A lifecycle that goes on keeps its own, or goes on with it; never another's."""
    search = _search_of(run, before) or Run.start("tune", run.recipe)
    write_atomically(run.folder / SEARCH_FILE, search.run_id.encode())
    if has_succeeded(search.folder):
        print(f"search {search.run_id} is over already", flush=True)
        return Result.model_validate_json((search.folder / RESULT_FILE).read_bytes())
    if search.was_opened:
        require_not_running(search.folder)
        print(f"search {search.run_id} goes on", flush=True)
    return _step(search, tune)


def _search_of(run: Run, before: str | None) -> Run | None:
    """The search that an earlier lifecycle began, if it came so far."""
    if before is None or not (noted := run.folder.parent / before / SEARCH_FILE).exists():
        return None
    search = Run.start("tune", run.recipe, noted.read_text(encoding="utf-8"))
    return search if search.was_opened else None


def _step(run: Run, step: Step) -> Result:
    print(f"── {run.job} ──", flush=True)
    result = execute(run, step)
    if result.status == "stopped":
        how = "tune.resume=true" if run.job == "tune" else f"train.resume={run.run_id}"
        raise RayloomError(f"{run.job} was stopped: go on with {how}")
    if result.status == "failed":
        raise RayloomError(f"{run.job}: {result.error}")
    return result


def require_no_request(training: Run) -> None:
    """Go on, unless the run was asked to stop or pause too late for its training to hear of it. Raises RayloomError."""
    if read_stop_request(training.folder):
        raise RayloomError(
            f"asked to stop after train, whose run {training.run_id} is finished: "
            "go on with jobs.compile and jobs.deploy"
        )


def _with(recipe: Recipe, section: str, **values: object) -> Recipe:
    """The recipe with other values in a section."""
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})


if __name__ == "__main__":
    sys.exit(main("lifecycle", lifecycle))
