"""From data to an endpoint in one job, train, compile, deploy: python -m jobs.lifecycle RECIPE [key=value …]"""

import sys

from pydantic import BaseModel

from app.config import Recipe
from app.errors import RayloomError
from app.runs import Outcome, Result, Run, Step, execute
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
    run.open()
    trained = _step("train", train, run.recipe)
    compiled = _step("compile", compile_model, _with(run.recipe, "compile", weights=trained.artifacts["weights"]))
    version = int(compiled.artifacts["model"].rpartition("/")[2])
    deployed = _step("deploy", deploy, _with(run.recipe, "serve", version=version))
    return Outcome(
        LifecycleMetrics(train=trained.metrics, compile=compiled.metrics, deploy=deployed.metrics),
        trained.artifacts | compiled.artifacts | deployed.artifacts,
    )


def _step(name: str, step: Step, recipe: Recipe) -> Result:
    print(f"── {name} ──", flush=True)
    result = execute(Run.start(name, recipe), step)
    if result.status != "succeeded":
        raise RayloomError(f"{name}: {result.error}")
    return result


def _with(recipe: Recipe, section: str, **values: object) -> Recipe:
    """The recipe with other values in a section."""
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})


if __name__ == "__main__":
    sys.exit(main("lifecycle", lifecycle))
