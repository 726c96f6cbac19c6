"""Run tune, train, compile and deploy in one job: python -m jobs.lifecycle RECIPE [key=value …]"""

import os
import sys
import time
from functools import partial
from itertools import chain

import psutil
from pydantic import BaseModel

from app.artifacts import DATA
from app.cluster.state import MARK, read_state
from app.compile.run import require_compilable
from app.config import Recipe
from app.errors import RayloomError
from app.heartbeat import require_not_running, run_lock
from app.pages.page import REPORT_FILE
from app.reports.lifecycle import lifecycle_page, note_part
from app.reports.run_folder import write_page
from app.runs import RESULT_FILE, Outcome, Result, Run, Step, execute, has_succeeded, runs_folder
from app.storage import write_atomically
from app.training.resume import newest_unfinished, start_or_resume
from app.training.stop_request import read_stop_request
from app.tuning.outcome import tuned_recipe
from app.tuning.trial_data import find_data
from jobs._cluster import connect
from jobs._runner import main
from jobs._shared_storage import require_shared_storage
from jobs._turn import in_turn
from jobs.compile import compile_demand, compile_on_node, require_compile_room
from jobs.deploy import deploy, require_deployable
from jobs.train import require_train_room, train, train_demand
from jobs.tune import keep_found, tune, tune_demand

_STAGES = {"tune": "search"}
"""Steps that have another name as a stage."""
SEARCH_FILE = "search"
"""A file in the lifecycle's folder with the id of its tune run. It is written before the search begins."""


class LifecycleMetrics(BaseModel):
    """The metrics of every step, as in the step's own result."""

    tune: dict[str, object] | None = None
    """None if the recipe has no tune section."""
    train: dict[str, object]
    compile: dict[str, object]
    deploy: dict[str, object]
    stage_s: dict[str, float]
    """Seconds by stage. ``up`` is the start of the local cluster, before this job, and ``start`` that of this job."""


def lifecycle(run: Run) -> Outcome:
    """Run every step on the artifacts of the previous one. Each step has its own run."""
    require_compilable(run.recipe)  # before it is trained
    check_later_steps(run)
    # Looked up before this run has a folder, so that it does not find itself.
    resumes = run.recipe.train.resume or (run.recipe.tune and run.recipe.tune.resume)
    previous = newest_unfinished(run.storage, run.job, run.recipe.name) if resumes else None
    run.hold(run_lock(run.folder))
    run.until_result.callback(write_page, lifecycle_page, run.folder)
    run.open()
    tuned, recipe = _search(run, previous) if run.recipe.tune else (None, run.recipe)
    training = start_or_resume("train", recipe)
    # Trials that read the same data have prepared them already.
    prepared = find_data(recipe, runs_folder(run.storage, "tune") / tuned.run_id / DATA) if tuned else None
    trained = _step(run, training, partial(train, prepared=prepared))
    require_no_request(training)
    compiled = _step(
        run, Run.start("compile", _with(recipe, "compile", weights=trained.artifacts["weights"])), compile_on_node
    )
    # Without a version, deploy would serve the one that is already in production.
    version = int(compiled.artifacts["model"].rpartition("/")[2])
    deployed = _step(run, Run.start("deploy", _with(recipe, "serve", version=version)), deploy)
    steps = [*([tuned] if tuned else []), trained, compiled, deployed]
    metrics = LifecycleMetrics(
        tune=tuned.metrics if tuned else None,
        train=trained.metrics,
        compile=compiled.metrics,
        deploy=deployed.metrics,
        stage_s=_stage_times(run, steps),
    )
    print("time  " + ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in metrics.stage_s.items()), flush=True)
    artifacts = {name: location for step in steps for name, location in step.artifacts.items()}
    return Outcome(metrics, artifacts | {"report": str(run.folder / REPORT_FILE)})


def check_later_steps(run: Run) -> None:
    """Check everything that a later step would refuse, before the first step starts. Raises the same errors."""
    recipe = run.recipe
    connect()
    require_train_room(recipe.train)
    require_compile_room(recipe.compile)
    require_deployable(recipe, run.storage)
    others = (recipe.compile.placement, recipe.serve.placement)
    require_shared_storage(run.storage, recipe.train.placement, *others)


def lifecycle_demand(recipe: Recipe) -> dict[str, float]:
    """Return the maximum of each resource over the steps, for the queue. Replicas outlive the job and do not count."""
    demands = [tune_demand(recipe), train_demand(recipe), compile_demand(recipe)]
    return {kind: max(demand.get(kind, 0.0) for demand in demands) for kind in {*chain(*demands)}}


def _stage_times(run: Run, steps: list[Result]) -> dict[str, float]:
    """Return the seconds of each stage: the local cluster's start, this job's own, and each step."""
    cluster = read_state()
    is_ours = cluster is not None and cluster.id == os.environ.get(MARK)
    up = {"up": cluster.start_s} if cluster and is_ours and cluster.start_s is not None else {}
    process_s = time.time() - psutil.Process().create_time()
    start = {"start": round(process_s - (time.monotonic() - run.started), 3)}
    return up | start | {_STAGES.get(step.job, step.job): step.duration_s for step in steps}


def _search(run: Run, previous: str | None) -> tuple[Result, Recipe]:
    """Return the result of the recipe's search, and the recipe with the best values.

    A resumed lifecycle reuses or resumes its own search only. It takes only the drawn values from an earlier
    search, because the recipe may have changed since.
    """
    search = _search_of(run, previous) or Run.start("tune", run.recipe)
    write_atomically(run.folder / SEARCH_FILE, search.run_id.encode())
    tuned = _search_result(run, search)
    best_params, best_trial = tuned.metrics["best_params"], tuned.metrics["best_trial"]
    return tuned, tuned_recipe(search.recipe, best_params, best_trial, search.run_id)


def _search_result(run: Run, search: Run) -> Result:
    if has_succeeded(search.folder):
        print(f"search {search.run_id} has already finished", flush=True)
        note_part(run.folder, search.job, search.run_id)
        return Result.read(search.folder / RESULT_FILE)
    if search.was_opened:
        require_not_running(search.folder)
        print(f"resuming search {search.run_id}", flush=True)
    return _step(run, search, tune)


def _search_of(run: Run, previous: str | None) -> Run | None:
    """Return the search that the previous lifecycle began; None if it did not come that far."""
    if previous is None or not (file := run.folder.parent / previous / SEARCH_FILE).exists():
        return None
    search = Run.start("tune", run.recipe, file.read_text(encoding="utf-8"))
    return keep_found(search) if search.was_opened else None


def _step(lifecycle: Run, part: Run, step: Step) -> Result:
    print(f"── {part.job} ──", flush=True)
    note_part(lifecycle.folder, part.job, part.run_id)
    result = execute(part, step, lifecycle.folder)
    if result.status == "stopped":
        override = "tune.resume=true" if part.job == "tune" else f"train.resume={part.run_id}"
        raise RayloomError(f"{part.job} was stopped: resume with {override}").of("step.stopped")
    if result.status == "failed":
        raise RayloomError(f"{part.job}: {result.error}").of("step.failed")
    return result


def require_no_request(training: Run) -> None:
    """Go on, unless the run was asked to stop or pause too late for its training to hear of it. Raises RayloomError."""
    if read_stop_request(training.folder):
        raise RayloomError(
            f"asked to stop after train, whose run {training.run_id} is finished: "
            "continue with jobs.compile and jobs.deploy"
        ).of("stop.too_late")


def _with(recipe: Recipe, section: str, **values: object) -> Recipe:
    """Return the recipe with other values in a section."""
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})


if __name__ == "__main__":
    sys.exit(main("lifecycle", in_turn(lifecycle, lifecycle_demand)))
