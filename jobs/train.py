"""Train a recipe's model on the Ray cluster: python -m jobs.train RECIPE [key=value …]"""

import os
import signal
import sys
import uuid
from types import FrameType

import ray.train
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.train.torch import TorchConfig, TorchTrainer

from app.config import TrainConfig
from app.errors import NonFiniteLossError, TrainingError
from app.runs import Outcome, Run
from app.telemetry.alerts import Action
from app.training.coordination.control import request
from app.training.ray_worker import WorkerArguments, train_worker
from app.training.records import Ending
from app.training.resume import start_or_resume
from app.training.run import finish_run, open_run, prepare_run
from app.training.run_folder import FAILURE_FILE
from app.training.worker import COLLECTIVE_TIMEOUT
from app.warnings import warn
from jobs._cluster import connect, require
from jobs._runner import main

_RESIZE_INTERVAL_S = 10.0
_ROOM_TIMEOUT_S = 15.0


def train(run: Run) -> Outcome:
    """Check everything, train on the cluster, keep the best weights."""
    config = run.recipe.train
    data = prepare_run(run)
    _set_timeouts(config)
    connect()
    least, _ = config.workers_range
    require(_resources(config, least), f"train.workers, of which there are {least},")
    open_run(run, data)
    _stop_on_sigterm(run)
    return finish_run(run, data, _fit(run))


def _set_timeouts(config: TrainConfig) -> None:
    """Ray Train reads them from the driver's environment."""
    # A frozen process: the other workers notice, but a single one has no other.
    os.environ["RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"] = str(config.hang_timeout_s)
    least, most = config.workers_range
    if least < most:  # when a node is lost, Ray first waits for room for as many workers as there were
        os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(_ROOM_TIMEOUT_S)


def _fit(run: Run) -> Ending:
    """Train with Ray; if Ray's own controller of the run is lost, once more from the last checkpoint."""
    try:
        return _fit_once(run)
    except (ActorDiedError, ActorUnavailableError) as error:
        warn(f"Ray's training controller is gone ({_first_line(error)}); starting it again")
        return _fit_once(run)


def _fit_once(run: Run) -> Ending:
    config = run.recipe.train
    trainer = TorchTrainer(
        train_worker,
        torch_config=TorchConfig(timeout_s=int(COLLECTIVE_TIMEOUT.total_seconds())),
        train_loop_config=WorkerArguments(recipe=run.recipe.model_dump_json(), run_folder=str(run.folder)),
        scaling_config=ray.train.ScalingConfig(
            num_workers=config.workers,
            use_gpu=config.device == "gpu",
            resources_per_worker=_resources(config, workers=1),
            elastic_resize_monitor_interval_s=_RESIZE_INTERVAL_S,
        ),
        run_config=ray.train.RunConfig(
            # A name that Ray never saw: what it remembers of a run can keep it from starting again, and
            # everything that the run needs lies in its own checkpoints.
            name=f"{run.run_id}-{uuid.uuid4().hex[:6]}",
            storage_path=str(run.folder / "ray"),
            logging_config=ray.train.LoggingConfig(log_level="WARNING"),
            failure_config=ray.train.FailureConfig(max_failures=config.max_failures),
        ),
    )
    try:
        answer: Ending | NonFiniteLossError = trainer.fit().return_value
    except ray.train.TrainingFailedError as error:
        raise TrainingError(f"training failed: {_cause(run, error)}") from error
    if isinstance(answer, NonFiniteLossError):
        raise answer
    return answer


def _resources(config: TrainConfig, workers: int) -> dict[str, float]:
    """What Ray reserves for so many workers."""
    gpus = {"GPU": 1.0 * workers} if config.device == "gpu" else {}
    return {"CPU": config.cpus_per_worker * workers, **gpus}


def _stop_on_sigterm(run: Run) -> None:
    """``ray job stop`` sends SIGTERM: ask the workers to keep their state and end."""

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        print("asked to stop: keeping the state", flush=True)
        request(run.folder, Action.STOP)

    signal.signal(signal.SIGTERM, stop)


def _cause(run: Run, error: ray.train.TrainingFailedError) -> str:
    """What a worker noted before it ended itself; else who died; else the first worker's own error.

    Those that live on fail too, because they cannot reach the one that died.
    """
    note = run.folder / FAILURE_FILE
    if note.exists():
        return note.read_text(encoding="utf-8")
    failures = getattr(error, "worker_failures", {})
    died = sorted(rank for rank, failure in failures.items() if hasattr(failure, "health_check_failure"))
    if died:
        ranks = ", ".join(map(str, died))
        return f"rank {ranks} died: the process was killed, for want of memory perhaps, or its node was lost"
    return str(failures[min(failures)] if failures else error).strip().splitlines()[-1]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


if __name__ == "__main__":
    sys.exit(main("train", train, start=start_or_resume))
