"""The tracking of a job: a process of its own copies the run, so that no tracker can slow or hold up training."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from upath import UPath

from app.best_effort import BestEffort, repeat_in_background, warn
from app.config import Recipe, TrackingConfig
from app.errors import RecipeError
from app.storage import is_local, open_storage, write_atomically

PARENT_FILE = "part_of.txt"
"""In the folder of a lifecycle's part: names the folder of the lifecycle."""
FINISH_TIMEOUT_S = 15.0
"""How long the end of a job waits for trackers that do not answer."""
_START_INTERVAL_S = 1.0
_GRACE_S = 10.0
"""Time for the process to start and to say what is missing."""


def require_clients(recipe: Recipe) -> None:
    """Raise RecipeError if a tracker's client is not installed here, or has no place to write to."""
    config = recipe.tracking
    for name in config.trackers:
        if find_spec(name) is None:
            raise RecipeError(f"tracking.{name} needs its client: install rayloom[{name}], or leave the key out").of(
                "package.not_installed", f"tracking.{name}"
            )
    if config.wandb and config.wandb.mode == "offline" and not is_local(open_storage(recipe.storage)):
        raise RecipeError(
            "tracking.wandb.mode is offline, which writes into the run's folder, on a disk: set online"
        ).of("storage.not_local", "tracking.wandb.mode")


@contextmanager
def keep_tracked(
    run_folder: UPath, config: TrackingConfig, may_write: Callable[[], bool], parent: UPath | None = None
) -> Iterator[None]:
    """Copy the run to its trackers within the block, and at its end what is left.

    Args:
        may_write: returns whether the folder is this job's. The copy begins then.
        parent: the folder of the lifecycle that the run is a part of.
    """
    if not config.trackers:
        yield
        return
    started: list[subprocess.Popen[str]] = []

    def start() -> None:
        if not started and may_write():
            if parent:
                write_atomically(run_folder / PARENT_FILE, str(parent).encode())
            started.append(_start(run_folder))

    starting = BestEffort("tracking: the process that copies the run cannot be started, and is tried again", "the job")
    with repeat_in_background(lambda: starting(start), _START_INTERVAL_S, name="tracking"):
        yield
    # A short run may have ended before the first check.
    starting(start)
    for process in started:
        _finish(process, run_folder.name)


def _start(run_folder: UPath) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "app.tracking", str(run_folder)],
        cwd=Path(__file__).parents[2],  # where ``app`` lies
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # signals to the job's process group must not end it before the job
    )


def _finish(process: subprocess.Popen[str], run_id: str) -> None:
    """Tell the process that the run has ended, and wait for it."""
    try:
        process.communicate("ended\n", timeout=FINISH_TIMEOUT_S + _GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.returncode:
        warn(
            f"tracking: the process that copies the run hung or was killed (exit code {process.returncode}): "
            f"'rayloom runs track {run_id}' copies the rest"
        )
