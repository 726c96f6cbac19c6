"""Serve the production version of a recipe's model, or of a named one: python -m jobs.deploy RECIPE [key=value …]"""

import sys
import time

from pydantic import BaseModel
from upath import UPath

from app.config import Recipe
from app.heartbeat import run_lock
from app.pages.page import REPORT_FILE
from app.reports.deployment import DeploymentRecord, Laps, deployment_page
from app.reports.run_folder import write_page
from app.repository.repository import Repository
from app.runs import Outcome, Run
from app.serving.access import access_of, token_file_of
from app.serving.cascade.build import stages_before
from app.serving.cascade.rule import CascadeRule
from app.serving.config import AnyDeployed
from app.serving.deployment import deployed_model, promote_named, verified_candidates
from app.telemetry.tracing import stage
from jobs._cluster import connect, cores_of_nodes
from jobs._endpoint import (
    await_routes,
    desired_pools,
    endpoint_lock,
    require_calibration_room,
    require_room,
    roll_out,
    running_replicas,
)
from jobs._ingress import Address, require_address, start_serve
from jobs._node import run_on_node
from jobs._runner import main


class DeployMetrics(BaseModel):
    """The time until the endpoint answered, and the number of its replicas."""

    ready_s: float
    replicas: int
    cascade: CascadeRule | None = None
    """The calibrated rule, if the recipe asks for a cascade."""


def deploy(run: Run) -> Outcome:
    """Deploy the production version, or the one that the recipe promotes, and its candidates."""
    recipe, laps = run.recipe, Laps()
    run.until_result.callback(write_page, deployment_page, run.folder)
    # Before the lock is taken, so that other jobs do not wait for it.
    with stage("verify"):
        model = _planned(run)
    laps.end("connecting, and reading and verifying the versions")
    with endpoint_lock() as has_waited:
        if has_waited:  # the other job may have promoted another version
            model = _planned(run)
        laps.end("waiting for other jobs")
        if model.summary:
            print(model.summary, flush=True)
        before, pool = desired_pools(), recipe.serve.pool
        if (replaced := before.deployed.get(recipe.name)) and (lost := replaced.lost_in(model)):
            print(f"these settings drop the {' and the '.join(lost)} that {recipe.name} had", flush=True)
        access = access_of(recipe.serve, before.shared.access)
        after = before.serving(pool, recipe.name, model).with_access(access)
        require_room(before, pool, after[pool].demand)
        address = start_serve(recipe.serve)
        laps.end("starting Serve")

        # Everything is checked. A run that is refused before this leaves nothing in storage.
        run.hold(run_lock(run.folder))
        run.open()
        began = time.monotonic()
        with stage("load the models"):
            roll_out(before, after, pool, recipe.serve.ready_timeout_s)
        laps.end("loading the models in every replica")
        # Only versions that every replica has loaded are promoted.
        promote_named(recipe, Repository(run.storage))
        await_routes(address.http)
        laps.end("opening the routes")
    ready_s = round(time.monotonic() - began, 3)
    DeploymentRecord(model=model, phases_s=laps.seconds).save(run.folder)
    return _outcome(run, model, address, ready_s)


def require_deployable(recipe: Recipe, storage: UPath) -> None:
    """Check everything that a deployment needs besides the version itself, before training it.

    Raises:
        ClusterError: resources are short, a port is taken, Serve listens elsewhere, or a secret cannot be read.
        StorageError: a version that is served beside the new one is missing or was changed.
    """
    serve, before = recipe.serve, desired_pools()
    before.require_free(serve.pool, recipe.name)
    access_of(serve, before.shared.access)
    require_room(before, serve.pool, before[serve.pool].demand_with(recipe.name, serve))
    require_address(serve)
    verified_candidates(recipe, storage)
    if serve.cascade:
        require_calibration_room(before, serve.reserved)
        stages_before(serve.cascade, serve, storage)


def _outcome(run: Run, model: AnyDeployed, address: Address, ready_s: float) -> Outcome:
    """Say where the model answers, and return the result of the job."""
    recipe = run.recipe
    version = model.production.version
    print(f"{recipe.name}, version {version}, answers at {address.http}, and over gRPC at {address.grpc}", flush=True)
    if file := token_file_of(recipe.serve):
        print(f"it asks for the token in {file}", flush=True)
    return Outcome(
        DeployMetrics(ready_s=ready_s, replicas=running_replicas(recipe.serve.pool), cascade=model.cascade_rule),
        {
            "http": address.http,
            "grpc": address.grpc,
            "model": f"{recipe.name}/{version}",
            "report": str(run.folder / REPORT_FILE),
        },
    )


def _planned(run: Run) -> AnyDeployed:
    """Return the model to serve under the recipe's name. A cascade is calibrated on a node like its replicas'."""
    recipe, storage = run.recipe, run.storage

    def cores() -> list[int]:
        connect()
        return cores_of_nodes(recipe.serve.placement)

    if recipe.serve.cascade is None:
        return deployed_model(recipe, storage, cores, print)
    known = cores()
    require_calibration_room(desired_pools(), recipe.serve.reserved)
    return run_on_node(
        "calibration", lambda log: deployed_model(recipe, storage, lambda: known, log), recipe.serve.placement
    )


if __name__ == "__main__":
    sys.exit(main("deploy", deploy))
