"""From data to an endpoint in one job, tune, train, compile, deploy: python -m jobs.lifecycle RECIPE [key=value …]"""

import sys

from pydantic import BaseModel

from app.config import Recipe, load_recipe
from app.errors import RayloomError
from app.runs import Outcome, Result, Run, Step, execute, latest_result, newest_unfinished
from app.storage import open_storage
from app.tasks import find_processor
from app.training.resume import start_or_resume
from jobs._runner import main
from jobs.compile import compile_model
from jobs.deploy import deploy
from jobs.train import train
from jobs.tune import start_or_resume as start_or_resume_search
from jobs.tune import tune


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
    run.open()
    tuned = _search(run.recipe) if run.recipe.tune else None
    best = load_recipe(tuned.artifacts["best_recipe"]) if tuned else run.recipe
    recipe = _with(best, "train", resume=run.recipe.train.resume)
    trained = _step(start_or_resume("train", recipe), train)
    compiled = _step(
        Run.start("compile", _with(recipe, "compile", weights=trained.artifacts["weights"])), compile_model
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


def _search(recipe: Recipe) -> Result:
    """What the recipe's search came to. If training goes on, so does the search before it, or it is over already."""
    if recipe.train.resume:
        storage = open_storage(recipe.storage)
        recipe = _with(recipe, "tune", resume=True)
        if not newest_unfinished(storage, "tune", recipe.name) and newest_unfinished(storage, "train", recipe.name):
            return latest_result(storage, "tune", recipe.name)
    return _step(start_or_resume_search("tune", recipe), tune)


def _step(run: Run, step: Step) -> Result:
    print(f"── {run.job} ──", flush=True)
    result = execute(run, step)
    if result.status == "stopped":
        how = "tune.resume=true" if run.job == "tune" else f"train.resume={run.run_id}"
        raise RayloomError(f"{run.job} was stopped: go on with {how}")
    if result.status == "failed":
        raise RayloomError(f"{run.job}: {result.error}")
    return result


def _with(recipe: Recipe, section: str, **values: object) -> Recipe:
    """The recipe with other values in a section."""
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})


if __name__ == "__main__":
    sys.exit(main("lifecycle", lifecycle))
