"""The process that copies a run to its trackers: python -m app.tracking FOLDER

It ends once its standard input does, or after a while then: a job waits for it.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

from upath import UPath

from app.best_effort import BestEffort, warn
from app.config import Recipe, load_stored_recipe
from app.config.notify import is_reference
from app.config.tracking import is_mlflow_server
from app.errors import DeliveryError
from app.storage import is_local, to_path
from app.telemetry.alerts.receivers import read_secret
from app.tracking.mlflow_tracker import MlflowTracker
from app.tracking.process import FINISH_TIMEOUT_S
from app.tracking.tracked_run import TrackedRun
from app.tracking.tracker import Tracker
from app.tracking.wandb_tracker import WandbTracker
from app.uris import has_split_login

_INTERVAL_S = 5.0
_RETRY_S = 1.0
_NICE = 10
"""Of this process: training comes first."""


class TrackerThread:
    """Copies a run to one tracker, until the run has ended and all is there."""

    def __init__(self, tracker: Tracker, run: TrackedRun, interval_s: float = _INTERVAL_S) -> None:
        self.name, self._run, self._interval_s = tracker.name, run, interval_s
        self._has_run_ended = threading.Event()
        self._try = BestEffort(
            f"tracking: {tracker.name} cannot be reached, and is tried again",
            "the run",
            hides_error=tracker.has_secret_address,
        )
        self._thread = threading.Thread(target=self._copy, daemon=True, name=f"tracking: {tracker.name}")
        self._thread.start()

    def finish(self) -> None:
        """Copy the rest and end the run, from now on."""
        self._has_run_ended.set()

    def join(self, deadline_s: float) -> bool:
        """Wait until all is copied, or ``time.monotonic()`` reaches ``deadline_s``. Return whether all is copied."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        return not self._thread.is_alive()

    def _copy(self) -> None:
        while not self._has_run_ended.wait(self._interval_s):
            self._try(self._run.advance)
        # ``finish`` raises nothing while the run must wait for its lifecycle, so it is asked whether it has finished.
        while not (self._try(self._run.finish) and self._run.is_finished):
            time.sleep(_RETRY_S)


def copy_run(
    folder: UPath, trackers: Sequence[Tracker], wait_for_end: threading.Event, timeout_s: float = FINISH_TIMEOUT_S
) -> bool:
    """Copy a run until ``wait_for_end`` is set, and then the rest, for ``timeout_s``.

    Return whether all is copied. If not, a warning says so.
    """
    runs = [TrackedRun(folder, tracker) for tracker in trackers]
    threads = [TrackerThread(tracker, run) for tracker, run in zip(trackers, runs, strict=True)]
    wait_for_end.wait()
    deadline_s = time.monotonic() + timeout_s
    # All are told to finish before any is waited for, so that they share the time.
    for thread in threads:
        thread.finish()
    copied = [thread.join(deadline_s) for thread in threads]
    for thread, run, is_copied in zip(threads, runs, copied, strict=True):
        if not is_copied:
            warn(
                f"tracking: {thread.name} lacks up to {run.count_waiting():,} records and the end of this run. They "
                f"are in its folder: 'rayloom runs track {folder.name}' copies them"
            )
        elif left_out := run.count_left_out():
            print(f"tracking: {thread.name} has all epochs, and not {left_out:,} steps that came too fast", flush=True)
    return all(copied)


def create_trackers(recipe: Recipe, folder: UPath) -> list[Tracker]:
    """Return the recipe's trackers. If a secret is missing here, warn and leave its tracker out."""
    config, found = recipe.tracking, list[Tracker]()
    if config.mlflow:
        is_secret = is_reference(config.mlflow)
        try:
            uri = _address_of(config.mlflow) if is_secret else config.mlflow
        except DeliveryError as error:
            warn(f"tracking: {error}; the run is not copied to MLflow")
        else:
            found.append(MlflowTracker(uri, config.experiment or recipe.name, config.register_versions, is_secret))
    if config.wandb:
        found.append(WandbTracker(config.wandb, folder.path if is_local(folder) else tempfile.gettempdir()))
    return found


def _address_of(reference: str) -> str:
    """Return the address of MLflow's server. Raise DeliveryError, which does not show it, if it is not valid."""
    address = read_secret("tracking.mlflow", reference)
    if not is_mlflow_server(address) or has_split_login(address):
        raise DeliveryError(
            f"tracking.mlflow is {reference}, which holds no URI such as https://mlflow.example.org: correct it, and "
            "percent-encode each @ that ends no password, as %40"
        ).of("url.invalid", "tracking.mlflow")
    return address


def main() -> None:
    """Copy the run in a folder until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m app.tracking")
    parser.add_argument("folder", type=to_path)
    arguments = parser.parse_args()
    os.nice(_NICE)
    ended = threading.Event()
    threading.Thread(target=_await_end, args=(ended,), daemon=True).start()
    recipe = load_stored_recipe(str(arguments.folder / "config.yaml"))
    copy_run(arguments.folder, create_trackers(recipe, arguments.folder), ended)
    sys.stdout.flush()
    os._exit(0)  # a thread may wait for a server, and W&B for its own process


def _await_end(ended: threading.Event) -> None:
    """Wait for a line from the job, or for the job's death."""
    sys.stdin.readline()
    ended.set()


if __name__ == "__main__":
    main()
