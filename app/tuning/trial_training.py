"""How a trial trains: one epoch at a time, in this process or with several workers of Ray Train."""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from queue import SimpleQueue
from typing import Any

from ray.train import Checkpoint, UserCallback
from ray.util.queue import Empty, Queue
from tenacity import Retrying, retry_if_exception_type, stop_after_delay
from upath import UPath

from app.config import Recipe
from app.errors import StorageError
from app.heartbeat import HEARTBEAT_FILE, require_not_running
from app.run_log import LOG_FILE
from app.telemetry.mirror import Mirror
from app.training.plan import TrainingPlan
from app.training.ray_worker import fit
from app.training.records import Ending, EpochRecord
from app.training.reporting.recorder import Report
from app.training.session import train
from app.training.stop_request import StopRequest, request_stop, withdraw_stop_request
from app.training.worker import start_worker
from app.tuning.ray_internals import CONTINUE, STOP, WaitAfterReport
from app.tuning.trial_data import DataCache, prepare_data

STOP_TIMEOUT_S = 30.0

_POLL_S = 0.2
_PREVIOUS_WORKERS_TIMEOUT_S = 60.0
"""Twice ``STOP_TIMEOUT_S``: stopped workers may need all of that to store their last checkpoint."""

Train = Callable[[Report], Ending]


class _StopTraining(BaseException):
    """Unwinds training from inside its report. It is no ``Exception``, so no handler on the way catches it."""


class TrialThread:
    """Training in a thread, one epoch at a time."""

    def __init__(self, train: Train) -> None:
        self._thread = threading.Thread(target=self._run, args=(train,), daemon=True, name="trial")
        self._outcomes: SimpleQueue[EpochRecord | Ending | BaseException] = SimpleQueue()
        self._turns: SimpleQueue[bool] = SimpleQueue()
        """True: train the next epoch. False: stop."""

    def next(self) -> EpochRecord | Ending:
        """Train the next epoch and return its record, or return the ending. Raise what training raises."""
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turns.put(True)
        outcome = self._outcomes.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def stop(self) -> bool:
        """Stop the training and wait until its last checkpoint is stored.

        Return whether the thread has ended: False if that takes longer than ``STOP_TIMEOUT_S``.
        """
        if self._thread.is_alive():
            self._turns.put(False)
            self._thread.join(STOP_TIMEOUT_S)
        return not self._thread.is_alive()

    def _run(self, train: Train) -> None:
        try:
            self._outcomes.put(train(self._report))
        except _StopTraining:
            return
        except BaseException as error:  # raised again by next()
            self._outcomes.put(error)

    def _report(self, record: EpochRecord) -> None:
        self._outcomes.put(record)
        if not self._turns.get():
            raise _StopTraining


@contextmanager
def log_to(folder: UPath) -> Iterator[None]:
    """Redirect standard output and standard error to ``log.txt`` in the trial's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        Mirror(folder) as mirror,
        mirror.fetch(LOG_FILE).open("a", encoding="utf-8", buffering=1) as log,
        redirect_stdout(log),
        redirect_stderr(log),
    ):
        yield


def train_here(recipe: Recipe, data: DataCache, folder: UPath, report: Report, last_reported_epoch: int) -> Ending:
    """Train in this process. Its process group and its imports serve every trial that it runs.

    ``last_reported_epoch`` is the last epoch that an earlier attempt reported.
    """
    withdraw_stop_request(folder)
    # This comes before ``log_to``, because DeepSpeed keeps the output stream that it sees first.
    worker = start_worker(recipe.train)
    # Training prints DeepSpeed's warnings once per run. Here every trial is a run.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with log_to(folder):
        prepared = data.get(recipe)
        plan = TrainingPlan.of(recipe, prepared)
        return train(plan, prepared, worker, folder, report, last_reported_epoch=last_reported_epoch)


def train_with_workers(
    recipe: Recipe, data: DataCache, folder: UPath, report: Report, last_reported_epoch: int
) -> Ending:
    """Train with Ray Train. The workers wait after each epoch until ``report`` returns, and stop if it raises."""
    folder.mkdir(parents=True, exist_ok=True)
    _await_previous_workers(folder)
    # Only now, because the previous workers may still have to read the request.
    withdraw_stop_request(folder)

    prepared = prepare_data(recipe, data.folder)
    plan = TrainingPlan.of(recipe, data.get(recipe))
    # The queues reserve nothing, because the trial's CPUs are for its workers.
    records, turns = (Queue(actor_options={"num_cpus": 0}) for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        callbacks = [_ForwardRecords(records), WaitAfterReport(turns)]
        training = pool.submit(fit, plan, folder, prepared, callbacks, last_reported_epoch)
        try:
            _forward_reports(records, turns, training, report, last_reported_epoch)
        except BaseException:
            request_stop(folder, StopRequest.STOP)
            turns.put(STOP)
            raise
        finally:
            # This waits until the workers have ended, whatever they raise.
            training.exception()
            records.shutdown()
            turns.shutdown()
            # Without the file, the next attempt need not wait for the last beats.
            (folder / HEARTBEAT_FILE).unlink(missing_ok=True)
    return training.result()


def _await_previous_workers(folder: UPath) -> None:
    """Wait until the workers of an earlier attempt have ended. Two attempts would remove each other's checkpoints."""
    deadline = stop_after_delay(_PREVIOUS_WORKERS_TIMEOUT_S)
    Retrying(retry=retry_if_exception_type(StorageError), stop=deadline, reraise=True)(require_not_running, folder)


class _ForwardRecords(UserCallback):  # type: ignore[misc] # Ray has no types
    """Put the first worker's records into a queue."""

    def __init__(self, records: Queue) -> None:
        self._records = records

    def after_report(
        self,
        run_context: Any,  # noqa: ARG002
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,  # noqa: ARG002
    ) -> None:
        """Forward a record. Ray Train's controller calls this, in its own process."""
        self._records.put(metrics[0])


def _forward_reports(
    records: Queue, turns: Queue, training: Future[Ending], report: Report, last_reported_epoch: int
) -> None:
    """Report every epoch once until training has ended. Restarted workers repeat epochs."""
    while True:
        has_ended = training.done()  # before the queue is read, so that no record is lost
        try:
            record = EpochRecord.model_validate(records.get(timeout=_POLL_S))
        except Empty:
            if has_ended:
                return
            continue
        if record.epoch > last_reported_epoch:
            last_reported_epoch = record.epoch
            report(record)
        # A repeated epoch was decided before, so its worker goes on at once.
        turns.put(CONTINUE)
