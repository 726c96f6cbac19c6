"""How a trial trains: in the process that was asked, or with several workers of Ray Train."""

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from ray.train import Checkpoint, UserCallback, get_context
from ray.train.v2._internal.execution.callback import TrainContextCallback
from ray.util.queue import Empty, Queue
from tenacity import Retrying, retry_if_exception_type, stop_after_delay
from upath import UPath

from app.config import Recipe
from app.errors import StorageError
from app.telemetry.alerts import Action
from app.training.coordination.control import request, withdraw
from app.training.coordination.heartbeat import HEARTBEAT_FILE, require_silence
from app.training.ray_worker import fit
from app.training.records import Ending, EpochRecord
from app.training.reporting.recorder import Report
from app.training.session import train
from app.training.worker import start_worker
from app.tuning.attempt import log_to
from app.tuning.trial_data import DataCache, prepare_data

_POLL_S = 0.2
_GO_ON, _LEAVE = "go on", "leave"
"""A turn: train the next epoch; or wait no more, for the run is asked to stop."""

_SILENCE_TIMEOUT_S = 60.0
"""An attempt that is cut may take half of it to end."""


def train_here(recipe: Recipe, data: DataCache, folder: UPath, report: Report, last_reported_epoch: int) -> Ending:
    """Train in this process, whose process group and imports serve every trial that it is given.

    ``last_reported_epoch`` is the last epoch that an earlier attempt reported.
    """
    withdraw(folder)
    worker = start_worker(recipe.train)  # before the log: DeepSpeed keeps the screen that it first sees
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # it warns of each trial what it warns of once in training
    with log_to(folder):
        return train(recipe, data.get(recipe), worker, folder, report, last_reported_epoch=last_reported_epoch)


def train_with_workers(
    recipe: Recipe, data: DataCache, folder: UPath, report: Report, last_reported_epoch: int
) -> Ending:
    """Train with Ray Train, whose workers wait after each epoch until ``report`` returns; if it raises, they stop."""
    folder.mkdir(parents=True, exist_ok=True)
    _await_silence(folder)
    withdraw(folder)
    place = prepare_data(recipe, data.folder)
    records, turns = (Queue(actor_options={"num_cpus": 0}) for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(fit, recipe, folder, place, [_Forward(records), _Wait(turns)], last_reported_epoch)
        try:
            _pass_on(records, turns, training, report, last_reported_epoch)
        except BaseException:
            request(folder, Action.STOP)
            turns.put(_LEAVE)
            raise
        finally:
            training.exception()
            records.shutdown()
            turns.shutdown()
            (folder / HEARTBEAT_FILE).unlink(missing_ok=True)
    return training.result()


def _await_silence(folder: UPath) -> None:
    """Until the workers of an attempt before this one have ended: two would remove each other's checkpoints."""
    patience = stop_after_delay(_SILENCE_TIMEOUT_S)
    Retrying(retry=retry_if_exception_type(StorageError), stop=patience, reraise=True)(require_silence, folder)


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


class _Wait(TrainContextCallback):  # type: ignore[misc] # Ray has no types
    """Holds the first worker after each report, and so the others at their next exchange with it."""

    def __init__(self, turns: Queue) -> None:
        self._turns = turns

    @contextmanager
    def on_report(self) -> Iterator[None]:
        """Called by Ray Train in each worker, around its report."""
        yield
        while get_context().get_world_rank() == 0:
            with suppress(Empty):  # waits without end outlive a worker that is killed, and take its successor's turn
                if self._turns.get(timeout=_POLL_S) == _LEAVE:
                    self._turns.put(_LEAVE)  # for later epochs, and for workers that begin again
                return


def _pass_on(records: Queue, turns: Queue, training: Future[Ending], report: Report, last_reported_epoch: int) -> None:
    """Every epoch once, until training has ended and none is left; workers that began again repeat some."""
    while True:
        ended = training.done()
        try:
            record = EpochRecord.model_validate(records.get(timeout=_POLL_S))
        except Empty:
            if ended:
                return
            continue
        if record.epoch > last_reported_epoch:
            last_reported_epoch = record.epoch
            report(record)
        turns.put(_GO_ON)
