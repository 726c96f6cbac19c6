"""Serve a recipe's model, or a named one, no longer: python -m jobs.undeploy RECIPE [key=value …]"""

import sys

from pydantic import BaseModel

from app.errors import ClusterError
from app.runs import Outcome, Run
from jobs._cluster import connect
from jobs._endpoint import await_routes, desired_pools, endpoint_lock, roll_out
from jobs._runner import main


class UndeployMetrics(BaseModel):
    """The models that the endpoint continues to serve."""

    models: tuple[str, ...]


def undeploy(run: Run) -> Outcome:
    """Remove all versions of the recipe's model from the endpoint. Published versions stay in storage.

    Raises:
        ClusterError: the model is not served.
    """
    name = run.recipe.name
    connect()
    with endpoint_lock():
        before = desired_pools()
        if name not in before.deployed:
            raise ClusterError(
                f"model {name!r} is not deployed: the endpoint serves {', '.join(before.deployed) or 'none'}"
            ).of("model.not_deployed")
        run.open()
        after = before.without(name)
        roll_out(before, after, before.of(name), run.recipe.serve.ready_timeout_s)
        await_routes()
    print(f"{name} is served no longer", flush=True)
    return Outcome(UndeployMetrics(models=tuple(after.deployed)), {})


if __name__ == "__main__":
    sys.exit(main("undeploy", undeploy))
