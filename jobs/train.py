"""Train a recipe's model on the Ray cluster: python -m jobs.train RECIPE [key=value …]"""

import os
import sys
from collections.abc import Mapping

from ray.exceptions import ActorDiedError, ActorUnavailableError
from upath import UPath

from app.best_effort import warn
from app.config import Recipe, TrainConfig
from app.errors import first_line
from app.runs import Outcome, Run
from app.telemetry.tracing import stage
from app.training.coordination.topology import require_room_for_groups
from app.training.plan import TrainingPlan
from app.training.publication import finish_run
from app.training.ray_worker import fit, resources_of, worker_slots
from app.training.records import Ending
from app.training.resume import start_or_resume
from app.training.run import open_run, prepare_run
from app.training.stop_request import StopRequest, request_stop
from jobs._cluster import connect, may_grow, require, require_node, training_cluster
from jobs._runner import main, on_sigterm
from jobs._shards import prepare_on_cluster
from jobs._turn import in_turn

_RESOURCES_TIMEOUT_S = 15.0


def train(run: Run, prepared: UPath | None = None) -> Outcome:
    """Check everything, train on the cluster, and publish the best weights.

    ``prepared`` is the folder of data that another job has prepared for this recipe.
    """
    with stage("prepare"):
        prepare_on_cluster(run, prepared)
        plan, data = prepare_run(run, training_cluster, prepared)
    config = plan.recipe.train
    _set_timeouts(config)
    connect()
    require_train_room(config)
    min_workers = config.worker_counts[0]
    # A cluster that grows may still get nodes with more room.
    if not may_grow():
        require_room_for_groups(config.plan, min_workers, worker_slots(config))
    open_run(run, plan, data)
    with stage("steps"), on_sigterm(lambda: request_stop(run.folder, StopRequest.STOP), "keeping the state"):
        ending = _fit(plan, run.folder)
    with stage("publish"):
        return finish_run(run, data, ending, training_cluster)


def train_demand(recipe: Recipe) -> dict[str, float]:
    """Return the resources of the smallest number of workers, for the queue."""
    return resources_of(recipe.train, recipe.train.worker_counts[0])


def worker_demand(recipe: Recipe) -> Mapping[str, float]:
    """Return what a worker needs on one node, for the queue."""
    return recipe.train.placement.resources


def require_train_room(config: TrainConfig) -> None:
    """Check that the cluster has what the smallest number of workers reserves, as ``require`` and ``require_node``."""
    min_workers = config.worker_counts[0]
    require(resources_of(config, min_workers), f"train.workers, of which there are {min_workers},", config.labels)
    require_node(config.placement, "a worker of train.workers")


def _set_timeouts(config: TrainConfig) -> None:
    """Set Ray Train's timeouts, which it reads from the driver's environment."""
    # For a single worker: if its process is frozen, there is no other worker whose watchdog would notice.
    os.environ["RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"] = str(config.hang_timeout_s)
    min_workers, max_workers = config.workers_range
    if min_workers < max_workers:  # when a node is lost, Ray first waits for resources for as many workers as before
        os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(_RESOURCES_TIMEOUT_S)


def _fit(plan: TrainingPlan, folder: UPath) -> Ending:
    """Train with Ray. If Ray's controller of the run is lost, resume once from the last checkpoint."""
    try:
        return fit(plan, folder)
    except (ActorDiedError, ActorUnavailableError) as error:
        warn(f"Ray's training controller is gone ({first_line(error)}); starting it again")
        return fit(plan, folder)


if __name__ == "__main__":
    sys.exit(main("train", in_turn(train, train_demand, worker_demand), start=start_or_resume))
