"""From data to an endpoint in one job, train, compile, deploy: python -m jobs.lifecycle RECIPE [key=value …]"""

import sys

from pydantic import BaseModel

from app.config import Recipe
from app.errors import RayloomError
from app.runs import Outcome, Result, Run, Step, execute
from app.tasks import find_processor
from app.training.resume import start_or_resume
from jobs._runner import main
from jobs.compile import compile_model
from jobs.deploy import deploy
from jobs.train import train


class LifecycleMetrics(BaseModel):
    """The metrics of every step, as the step's own result has them."""

    train: dict[str, object]
    compile: dict[str, object]
    deploy: dict[str, object]


def lifecycle(run: Run) -> Outcome:
    """Run every step on what the one before it made; each keeps a run of its own."""
    find_processor(run.recipe.task)  # refuses a task that cannot be compiled, before it is trained
    run.open()
    trained = _step(start_or_resume("train", run.recipe), train)
    compiled = _step(
        Run.start("compile", _with(run.recipe, "compile", weights=trained.artifacts["weights"])), compile_model
    )
    version = int(compiled.artifacts["model"].rpartition("/")[2])
    deployed = _step(Run.start("deploy", _with(run.recipe, "serve", version=version)), deploy)
    return Outcome(
        LifecycleMetrics(train=trained.metrics, compile=compiled.metrics, deploy=deployed.metrics),
        trained.artifacts | compiled.artifacts | deployed.artifacts,
    )


def _step(run: Run, step: Step) -> Result:
    print(f"── {run.job} ──", flush=True)
    result = execute(run, step)
    if result.status == "stopped":
        raise RayloomError(f"{run.job} was stopped: go on with train.resume={run.run_id}")
    if result.status == "failed":
        raise RayloomError(f"{run.job}: {result.error}")
    return result


def _with(recipe: Recipe, section: str, **values: object) -> Recipe:
    """The recipe with other values in a section."""
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})


if __name__ == "__main__":
    sys.exit(main("lifecycle", lifecycle))
