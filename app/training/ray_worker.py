"""The adapter between training and Ray: a run of Ray Train V2, and each of its workers."""

import logging
import os
import pickle
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TypedDict

import ray
import ray.train
from ray.train import UserCallback
from ray.train.v2._internal.execution import context as ray_context
from ray.util import metrics as ray_metrics
from upath import UPath

from app.amounts import count_in
from app.artifacts import DATA, FAILURE_FILE
from app.cluster.state import MARK
from app.config import TrainConfig
from app.errors import DataError, NonFiniteLossError, RayloomError, TopologyError, TrainingError, UnsharedStorageError
from app.heartbeat import keep_heartbeat
from app.process_state import keep_freed_memory
from app.storage import no_op, to_path
from app.tasks import load_prepared
from app.telemetry import catalog
from app.telemetry.metrics import publishing
from app.training.coordination.shared_folder import marked, require_shared
from app.training.coordination.topology import require_groups_within_nodes
from app.training.plan import TrainingPlan
from app.training.ray_trainer import FailureCounter, LightTrainer, await_room, was_asked_to_yield
from app.training.records import Ending, EpochRecord
from app.training.session import train
from app.training.stop_request import StopRequest, StopSignals
from app.training.worker import start_worker

_RESIZE_INTERVAL_S = 5.0
_STATE_TRACKING = "RAY_TRAIN_ENABLE_STATE_TRACKING"
"""Ray's setting for the list of training runs at ``/api/train/v2/runs/v1``. Its dashboard has no page for it."""
_MOVES_WORKERS = "RAY_CHDIR_TO_TRIAL_DIR"
"""Ray's setting that moves workers to a folder of the run, where the relative paths of a recipe lead nowhere."""


class WorkerArguments(TypedDict):
    """The arguments of every worker. All but ``plan`` are for the dashboard to show, too."""

    recipe: str
    plan: bytes
    """The ``TrainingPlan``, pickled: Ray Train's controller, which passes it on, would import torch to read it."""
    run_folder: str
    data_folder: str
    mark: str
    watches_nodes: bool
    """Whether nodes may leave the cluster during the run."""
    last_reported_epoch: int | None
    is_trial: bool
    """Whether the run is a trial of a search, whose job publishes the metrics."""


def fit(
    plan: TrainingPlan,
    run_folder: UPath,
    data_folder: UPath | None = None,
    callbacks: Sequence[UserCallback] = (),
    last_reported_epoch: int | None = None,
) -> Ending:
    """Train with Ray, from the run's newest checkpoint if it has any. ``data_folder`` None: the run's own.

    When the room for workers changes, they save their state and end, and other workers go on. A stop request ends the
    wait for room.

    ``last_reported_epoch`` is the last epoch that was reported to ``callbacks`` before. Later epochs of the checkpoint
    are reported now. None: all of them were reported.

    Raises:
        TrainingError: the workers failed more often than the recipe allows.
        NonFiniteLossError: a loss or gradient is not finite.
        UnsharedStorageError: a worker's node cannot see the run's folder.
        TopologyError: workers that split the same matrices are on several nodes.
    """
    # The controller inherits it. A user's own setting wins.
    os.environ.setdefault(_STATE_TRACKING, "1")
    os.environ[_MOVES_WORKERS] = "0"
    with marked(run_folder) as mark:
        arguments = WorkerArguments(
            recipe=plan.recipe.model_dump_json(),
            plan=plan.to_bytes(),
            run_folder=str(run_folder),
            data_folder=str(data_folder or run_folder / DATA),
            mark=mark,
            watches_nodes=isinstance(plan.recipe.train.workers, tuple) or not _is_single_node(),
            last_reported_epoch=last_reported_epoch,
            is_trial=data_folder is not None,
        )
        while (ending := _fit_once(plan, run_folder, arguments, callbacks)).stop_request is StopRequest.YIELD:
            arguments["last_reported_epoch"] = None  # all of them were reported
            if request := _await_room(plan.recipe.train, run_folder, ending.step):
                return ending.model_copy(update={"stop_request": request})
        return ending


def _fit_once(
    plan: TrainingPlan, run_folder: UPath, arguments: WorkerArguments, callbacks: Sequence[UserCallback]
) -> Ending:
    """Train until the workers end. Raises the same errors as ``fit``."""
    try:
        result = _trainer(plan.recipe.train, run_folder, arguments, callbacks).fit()
    except ray.train.TrainingFailedError as error:
        raise TrainingError(f"training failed: {_cause(run_folder, error)}").of("training.failed") from error
    outcome = pickle.loads(result.return_value)  # noqa: S301 # from our own worker
    if isinstance(outcome, RayloomError):
        raise outcome
    ending: Ending = outcome
    return ending


def _await_room(config: TrainConfig, run_folder: UPath, step: int) -> StopRequest:
    """Wait until there is room for the smallest number of workers. Return the request that ended the wait, or NONE."""
    print(f"saved at step {step:,}, because the room for workers has changed", flush=True)
    signals = StopSignals(run_folder)
    with signals.poll_file():
        has_room = await_room(
            _scaling_of(config),
            config.worker_counts,
            run_folder.name,
            lambda: signals.strongest() is not StopRequest.NONE,
        )
    return StopRequest.NONE if has_room else signals.strongest()


def _trainer(
    config: TrainConfig, run_folder: UPath, arguments: WorkerArguments, callbacks: Sequence[UserCallback]
) -> LightTrainer:
    return LightTrainer(
        train_worker,
        config.worker_counts,
        stays_on_nodes=not arguments["watches_nodes"],
        train_loop_config=arguments,
        scaling_config=_scaling_of(config),
        run_config=ray.train.RunConfig(
            # A new name each time: state that Ray keeps of a run can prevent it from starting again. Everything that
            # the run needs is in its own checkpoints.
            name=f"{run_folder.name}-{uuid.uuid4().hex[:6]}",
            storage_path=str(run_folder / "ray"),
            logging_config=ray.train.LoggingConfig(log_level="WARNING"),
            failure_config=ray.train.FailureConfig(max_failures=config.max_failures),
            callbacks=[*callbacks, *([] if arguments["is_trial"] else [_failures(run_folder)])],
        ),
    )


def _scaling_of(config: TrainConfig) -> ray.train.ScalingConfig:
    counts = config.worker_counts
    return ray.train.ScalingConfig(
        num_workers=(counts[0], counts[-1]) if isinstance(config.workers, tuple) else config.workers,
        use_gpu=config.device == "gpu",
        resources_per_worker=dict(config.placement.resources),
        label_selector=dict(config.placement.labels) or None,
        elastic_resize_monitor_interval_s=_RESIZE_INTERVAL_S,
    )


def _failures(run_folder: UPath) -> FailureCounter:
    metric = catalog.TRAIN_FAILURES
    return FailureCounter(metric.name, metric.description, dict(zip(metric.labels, [run_folder.name], strict=True)))


def _is_single_node() -> bool:
    """Return True on the local cluster while it has one node. It has no autoscaler, and this node goes with the run."""
    return MARK in os.environ and sum(node["Alive"] for node in ray.nodes()) == 1


def resources_of(config: TrainConfig, workers: int) -> dict[str, float]:
    """Return the resources that Ray reserves for this number of workers."""
    return {kind: amount * workers for kind, amount in config.placement.resources.items()}


def worker_slots(config: TrainConfig) -> dict[str, int]:
    """Return the number of workers that each living node of the cluster has room for, by its name."""
    needed = config.placement
    # Ray also lists nodes that have left.
    selected = {node["NodeName"]: node["Resources"] for node in ray.nodes() if needed.selects(node)}
    return {
        name: min(count_in(held.get(resource, 0), amount) for resource, amount in needed.resources.items())
        for name, held in selected.items()
    }


def train_worker(arguments: WorkerArguments) -> bytes:
    """Train as one of Ray Train's workers. Return an ``Ending``, pickled, as the result's ``return_value``.

    Ray restarts the workers after an exception. A RayloomError that would recur is returned instead. Ray Train's
    controller, which passes this on, would import torch to unpickle it.
    """
    return pickle.dumps(_train(arguments))


def _train(arguments: WorkerArguments) -> Ending | RayloomError:
    # This logger would print every report in full, despite LoggingConfig.
    ray_context.logger.setLevel(logging.WARNING)
    plan: TrainingPlan = pickle.loads(arguments["plan"])  # noqa: S301 # from our own job
    recipe = plan.recipe
    run_folder = to_path(arguments["run_folder"])
    keep_freed_memory()
    worker = start_worker(recipe.train)
    try:
        require_groups_within_nodes(worker, recipe.train.plan)
        require_shared(worker, run_folder, arguments["mark"])
    except (TopologyError, UnsharedStorageError) as error:
        return error

    data = load_prepared(recipe, to_path(arguments["data_folder"]))
    with ExitStack() as stack:
        # The job beats, too. If it is killed, its workers live on for seconds.
        if worker.is_first:
            stack.enter_context(keep_heartbeat(run_folder))
        try:
            poll_stop_request = _poll_cluster if arguments["watches_nodes"] else _poll_controller
            last_epoch = arguments["last_reported_epoch"]
            publish = no_op if arguments["is_trial"] else stack.enter_context(publishing(ray_metrics))
            return train(plan, data, worker, run_folder, _report, poll_stop_request, last_epoch, publish)
        except (DataError, NonFiniteLossError) as error:
            return error


def _report(record: EpochRecord) -> None:
    """Report an epoch to Ray Train, without a checkpoint: the run keeps its own, and Ray only restarts its workers."""
    ray.train.report(record.model_dump())


def _poll_cluster() -> StopRequest:
    """Return STOP once the cluster announces that it will take back a worker's node. Otherwise ask the controller."""
    return StopRequest.STOP if ray.train.get_preemption_info() else _poll_controller()


def _poll_controller() -> StopRequest:
    """Return YIELD once Ray Train's controller asks the workers to make room or to let more workers run."""
    return StopRequest.YIELD if was_asked_to_yield() else StopRequest.NONE


def _cause(run_folder: UPath, error: ray.train.TrainingFailedError) -> str:
    """Return the note of a worker that ended itself, else which ranks died, else the first worker's error.

    If a worker dies, the others fail too, because they cannot reach it. Their errors are not the cause.
    """
    note = run_folder / FAILURE_FILE
    if note.exists():
        return note.read_text(encoding="utf-8")
    failures = getattr(error, "worker_failures", {})
    died = sorted(rank for rank, failure in failures.items() if hasattr(failure, "health_check_failure"))
    if died:
        ranks = ", ".join(map(str, died))
        return f"rank {ranks} died: the process was killed, perhaps because memory ran out, or its node was lost"
    return str(failures[min(failures)] if failures else error).strip().splitlines()[-1]
