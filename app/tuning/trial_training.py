"""How a trial trains: in the process that was asked, or with several workers of Ray Train."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ray.train import Checkpoint, UserCallback
from ray.util.queue import Empty, Queue
from upath import UPath

from app.config import Recipe
from app.telemetry.alerts import Action
from app.training.coordination.control import request, withdraw
from app.training.coordination.heartbeat import require_silence
from app.training.ray_worker import fit
from app.training.records import Ending, EpochRecord
from app.training.reporting.recorder import Report
from app.training.session import train
from app.training.worker import start_worker
from app.tuning.attempt import log_to
from app.tuning.trial_data import DataCache, prepare_data

_POLL_S = 0.2


def train_here(recipe: Recipe, data: DataCache, folder: UPath, report: Report, heard: int) -> Ending:
    """Train in this process, whose process group and imports serve every trial that it is given.

    ``heard`` is the last epoch that was reported by an attempt before this one.
    """
    withdraw(folder)
    worker = start_worker(recipe.train)  # before the log: DeepSpeed keeps the screen that it first sees
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # it warns of each trial what it warns of once in training
    with log_to(folder):
        return train(recipe, data.get(recipe), worker, folder, report, heard=heard)


def train_with_workers(recipe: Recipe, data: DataCache, folder: UPath, report: Report, heard: int) -> Ending:
    """Train with Ray Train, and pass on what its workers report; if ``report`` raises, they are asked to stop.

    Workers outlive a trial's process that was killed by some seconds: they are waited for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    require_silence(folder)
    withdraw(folder)
    place = prepare_data(recipe, data.folder)
    records = Queue(actor_options={"num_cpus": 0})
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(fit, recipe, folder, place, [_Forward(records)], heard)
        try:
            _pass_on(records, training, report, heard)
        except BaseException:
            request(folder, Action.STOP)
            raise
        finally:
            training.exception()
            records.shutdown()
    return training.result()


class _Forward(UserCallback):  # type: ignore[misc] # Ray has no types
    """Puts what the first worker reports into a queue."""

    def __init__(self, records: Queue) -> None:
        self._records = records

    def after_report(
        self,
        run_context: Any,  # noqa: ARG002
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,  # noqa: ARG002
    ) -> None:
        """Called by Ray Train's controller, in a process of its own."""
        self._records.put(metrics[0])


def _pass_on(records: Queue, training: Future[Ending], report: Report, heard: int) -> None:
    """Every epoch once, until training has ended and none is left; workers that began again repeat some."""
    while True:
        ended = training.done()
        try:
            record = EpochRecord.model_validate(records.get(timeout=_POLL_S))
        except Empty:
            if ended:
                return
            continue
        if record.epoch > heard:
            heard = record.epoch
            report(record)
