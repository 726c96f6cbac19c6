"""The one place where training meets Ray: a worker of Ray Train V2."""

import logging
from typing import TypedDict

import ray.train
from ray.train.v2._internal.execution import context as ray_context
from upath import UPath

from app.config import Recipe
from app.errors import NonFiniteLossError
from app.tasks import load_prepared
from app.telemetry.alerts import Action
from app.training.records import Ending, EpochRecord
from app.training.run_folder import DATA
from app.training.session import train
from app.training.worker import start_worker


class WorkerArguments(TypedDict):
    """What the driver sends to every worker; plain values, so that they can be shown in the dashboard."""

    recipe: str
    run_folder: str


def train_worker(arguments: WorkerArguments) -> Ending | NonFiniteLossError:
    """Train as one of Ray Train's workers; what is returned is the result's ``return_value``.

    An error that is raised would have Ray train the same batches once more: so one of these is returned.
    """
    ray_context.logger.setLevel(logging.WARNING)  # it prints the whole of each report, past LoggingConfig
    recipe = Recipe.model_validate_json(arguments["recipe"])
    run_folder = UPath(arguments["run_folder"])
    data = load_prepared(recipe, run_folder / DATA)
    try:
        worker = start_worker(recipe.train.device)
        return train(recipe, data, worker, run_folder, _report, _announced)
    except NonFiniteLossError as error:
        return error


def _report(record: EpochRecord) -> None:
    """Tell Ray Train of an epoch; checkpoints are kept by the run itself, which Ray only starts again."""
    ray.train.report(record.model_dump())


def _announced() -> Action:
    """STOP once the cluster says that a worker's node is about to go, as clouds take back what they lend."""
    return Action.STOP if ray.train.get_preemption_info() else Action.CONTINUE
