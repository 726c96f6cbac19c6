"""The one place where training meets Ray: a worker of Ray Train V2."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import ray.train
from ray.train.v2._internal.execution import context as ray_context
from upath import UPath

from app.config import Recipe
from app.data.prepared import PreparedData
from app.tasks import find_processor
from app.training.loop import train
from app.training.records import EpochRecord
from app.training.run_folder import DATA
from app.training.worker import start_worker


class WorkerArguments(TypedDict):
    """What the driver sends to every worker; plain values, so that they can be shown in the dashboard."""

    recipe: str
    run_folder: str


class _RayReporter:
    """Epochs go to Ray Train, which uploads every worker's part of a checkpoint into one folder."""

    def report(self, record: EpochRecord, checkpoint: Path) -> None:
        ray.train.report(record.model_dump(), checkpoint=ray.train.Checkpoint.from_directory(str(checkpoint)))

    @contextmanager
    def latest_checkpoint(self) -> Iterator[Path | None]:
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            yield None
        else:
            with checkpoint.as_directory() as folder:
                yield Path(folder)


def train_worker(arguments: WorkerArguments) -> list[dict[str, Any]]:
    """Train as one of Ray Train's workers; the epochs, as plain values, are the result's ``return_value``."""
    ray_context.logger.setLevel(logging.WARNING)  # it prints the whole of each report, past LoggingConfig
    recipe = Recipe.model_validate_json(arguments["recipe"])
    run_folder = UPath(arguments["run_folder"])
    data = PreparedData.load(run_folder / DATA, find_processor(recipe.task))
    records = train(recipe, data, start_worker(recipe.train.device), run_folder, _RayReporter())
    return [record.model_dump() for record in records]
