"""Compile a recipe's trained model and publish it: python -m jobs.compile RECIPE [key=value …]"""

import sys
from functools import partial

from app.compile.run import compile_model, find_weights, require_compilable
from app.config import CompileConfig, Recipe
from app.runs import Outcome, Run
from jobs._cluster import connect, require
from jobs._node import run_on_node
from jobs._runner import main
from jobs._turn import in_turn


def compile_on_node(run: Run) -> Outcome:
    """Compile on a node with the resources that the recipe reserves. The measurements are those of this node."""
    require_compilable(run.recipe)
    find_weights(run)  # raises before the job waits for a node
    connect()
    require_compile_room(run.recipe.compile)
    return run_on_node("compile", partial(compile_model, run), run.recipe.compile.placement)


def require_compile_room(config: CompileConfig) -> None:
    """Check that the cluster has what compiling reserves, as ``require`` does."""
    require(config.reserved, "compile.cpus, compile.gpus and compile.resources")


def compile_demand(recipe: Recipe) -> dict[str, float]:
    """Return what compiling reserves, for the queue."""
    return recipe.compile.reserved


if __name__ == "__main__":
    sys.exit(main("compile", in_turn(compile_on_node, compile_demand, each=compile_demand)))
