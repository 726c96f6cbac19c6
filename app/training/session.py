"""One worker's part of a training run, from its first step or from its newest checkpoint."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from upath import UPath

from app.artifacts import CHECKPOINTS, FAILURE_FILE
from app.best_effort import warn
from app.checksums import code_revision
from app.config import Layout, Recipe, TrainConfig
from app.config.alerts import Act
from app.data.prepared import PreparedData
from app.errors import NonFiniteLossError, TrainingError
from app.models.factory import blueprint_of
from app.planner.calibration import machine_name
from app.storage import no_op
from app.tasks import find_task
from app.telemetry.alerts import Alerts, Notification, Notifier
from app.telemetry.events import EventKind, EventLog
from app.telemetry.metrics import Publish
from app.telemetry.mfu import computes_in_bf16
from app.telemetry.mirror import Mirror
from app.telemetry.profiler import profile_steps
from app.telemetry.tensorboard import TensorBoardLog
from app.telemetry.usage import (
    Counter,
    GpuCounter,
    GpuUtilisation,
    RaplCounter,
    UsageMeter,
    Utilisation,
    begin_usage,
)
from app.training.activity import Activity
from app.training.checkpoints.manager import CheckpointManager
from app.training.checkpoints.state import Position
from app.training.checkpoints.store import CheckpointStore
from app.training.coordination.sync import StepSync
from app.training.coordination.watchdog import Watchdog, note_failure, read_failure
from app.training.data.feed import Feed
from app.training.data.order import SampleOrder
from app.training.engine import TrainingEngine, create_engine
from app.training.engine.deepspeed_internals import restore_linear
from app.training.engine.nvme import remove_own_folders
from app.training.loop import Loop
from app.training.plan import TrainingPlan
from app.training.records import Ending, EpochRecord
from app.training.reporting.meter import Meter
from app.training.reporting.recorder import Recorder, Report, Sink
from app.training.reporting.run_metrics import RunMetrics
from app.training.reporting.sinks import MetricsLog, Progress
from app.training.stop_request import StopRequest, StopSignals
from app.training.worker import Worker, on_first, seed_random

if TYPE_CHECKING:
    from app.training.data.micro_epochs import MicroEpochs

_MAX_ROLLBACKS = 3
_END_EVENTS: dict[StopRequest, EventKind] = {
    StopRequest.NONE: "finished",
    StopRequest.YIELD: "yielded",
    StopRequest.PAUSE: "paused",
    StopRequest.STOP: "stopped",
}
_STOP_REQUESTS: dict[Act, StopRequest] = {
    "notify": StopRequest.NONE,
    "pause": StopRequest.PAUSE,
    "stop": StopRequest.STOP,
}


def train(
    plan: TrainingPlan,
    data: PreparedData,
    worker: Worker,
    run_folder: UPath,
    report: Report = no_op,
    poll_stop_request: Callable[[], StopRequest] | None = None,
    last_reported_epoch: int | None = None,
    publish: Publish = no_op,
) -> Ending:
    """Train as one worker of the run, from its newest intact checkpoint if it has any.

    ``report`` is called with the record of each epoch. ``poll_stop_request`` asks the platform for a stop request
    (preemption, or another number of workers). It is collective: every worker calls it, about once a second. Epochs of
    the checkpoint after ``last_reported_epoch`` are reported now. If it is None, all of them were reported before. The
    first worker calls ``publish`` with the run's metrics.

    Raises:
        RecipeError: the model cannot be built from the recipe.
        TrainingError: a checkpoint cannot be read or written, a loss is not finite.
        StorageError: every checkpoint is damaged.
    """
    with ExitStack() as stack:
        loop = _begin(_Attempt(plan, data, worker, run_folder, report, poll_stop_request, publish, stack))
        stack.enter_context(_noted_failure(loop))
        for record in loop.records:
            # A search may have missed what was saved just before a failure.
            if last_reported_epoch is not None and record.epoch > last_reported_epoch:
                loop.recorder.report(record)
        resumed_from_step = loop.position.step
        stop_request = _run(loop)
        loop.events.add(_END_EVENTS[stop_request], f"after step {loop.position.step:,}", loop.position.step)
        return Ending(
            records=loop.records,
            stop_request=stop_request,
            step=loop.position.step,
            workers=worker.size,
            resumed_from_step=resumed_from_step,
            first_step_s=loop.recorder.first_step_s,
        )


def _run(loop: Loop) -> StopRequest:
    """Train. If the recipe allows it, roll back and skip a batch that is not finite, up to ``_MAX_ROLLBACKS`` times."""
    while True:
        try:
            return loop.run()
        except NonFiniteLossError as error:
            # The checkpoint that is being written may be the one to go back to.
            loop.checkpoints.writer.wait()
            left_out = loop.position.left_out
            if loop.config.non_finite != "rollback":
                raise
            # Checkpoints hold ``left_out``, so the limit is for the whole life of the run.
            if len(left_out) >= _MAX_ROLLBACKS:
                raise NonFiniteLossError(f"{error}; {len(left_out)} were left out, no run leaves out more") from error
            if not loop.checkpoints.has_any():
                raise TrainingError(f"{error}; there is no checkpoint to go back to").of(
                    "rollback.no_checkpoint", "train.non_finite"
                ) from error
            broken = (loop.position.epoch, loop.position.batches_done - 1)
            if loop.worker.is_first:
                warn(f"{error}; going back to the last checkpoint, without this batch")
            loop.events.add("rolled_back", str(error), loop.position.step, loop.position.epoch)
        loop.restore([*left_out, broken])


@dataclass(frozen=True)
class _Attempt:
    """The arguments of ``train``, and the stack that closes what is opened."""

    plan: TrainingPlan
    data: PreparedData
    worker: Worker
    run_folder: UPath
    report: Report
    poll_stop_request: Callable[[], StopRequest] | None
    publish: Publish
    stack: ExitStack
    started: float = field(default_factory=time.monotonic)


def _begin(attempt: _Attempt) -> Loop:
    """Start what watches the run, build what trains it, and go to the newest checkpoint."""
    worker, recipe, run_folder, stack = attempt.worker, attempt.plan.recipe, attempt.run_folder, attempt.stack
    # This comes first, because starting the watchdog removes the note.
    earlier_failure = read_failure(run_folder) if worker.is_first else None
    watchdog = _start_watchdog(worker, recipe.train, run_folder)
    # It closes last, so it also watches what is closed before.
    stack.callback(watchdog.close)
    mirror = stack.enter_context(Mirror(run_folder))
    events = EventLog(mirror if worker.is_first else None)
    if worker.is_first:
        stack.enter_context(_measure_usage(mirror, recipe.train, worker))
    alerts = _make_alerts(recipe, run_folder.name, worker, events)
    stack.callback(alerts.close)
    loop = _make_loop(attempt, watchdog, mirror, events, alerts)
    loop.restore()
    _note_start(loop, earlier_failure)
    alerts.recall(loop.records)
    return loop


def _make_loop(attempt: _Attempt, watchdog: Watchdog, mirror: Mirror, events: EventLog, alerts: Alerts) -> Loop:
    """Build the model and everything that trains it."""
    plan, data, worker, stack = attempt.plan, attempt.data, attempt.worker, attempt.stack
    recipe, config, run_folder = plan.recipe, plan.recipe.train, attempt.run_folder
    layout = config.layout(worker.size)
    selection = find_task(recipe.task).selection(config)
    activity = Activity(watchdog.beat, watchdog.report_progress)
    order = _order_of(plan, data, run_folder, activity)
    # One process looks for a checkpoint, so that all build the model in the same way.
    is_resumed = bool(on_first(CheckpointStore(run_folder / CHECKPOINTS).committed))
    stack.callback(restore_linear)
    if config.plan.uses_nvme:
        stack.callback(remove_own_folders)
    engine, meter = _make_engine(plan, data, layout, worker, activity, is_resumed)
    # Otherwise its gradient hooks keep the model alive until the process ends.
    stack.callback(engine.deepspeed.destroy)
    stop_signals = _listen_for_stops(run_folder, worker, alerts, stack)
    # With ``mirror.flush``, the logs in storage are never behind a committed checkpoint.
    folder = run_folder / CHECKPOINTS
    checkpoints = CheckpointManager(folder, engine, config, selection, layout, worker, activity, mirror.flush)
    writer = checkpoints.writer
    stack.callback(writer.close)
    metrics = RunMetrics(attempt.publish, run_folder.name, recipe, plan.total_steps, lambda: writer.last_commit)

    def open_sinks(position: Position, records: list[EpochRecord]) -> Sequence[Sink]:
        if not worker.is_first:
            return ()
        progress = Progress(config, selection, plan.total_steps, position.step, records)
        return (*_open_logs(mirror, position.step, records, stack), alerts, progress, metrics)

    taught = _with_teacher(data, recipe) if config.teacher else data
    feed = Feed(taught, config, layout, worker, activity, order, plan.augmentation)
    stack.callback(feed.close)
    # A search may answer only when its other trials have.
    report = watchdog.rest()(attempt.report)
    return Loop(
        config=config,
        selection=selection,
        total_steps=plan.total_steps,
        worker=worker,
        engine=engine,
        feed=feed,
        checkpoints=checkpoints,
        sync=StepSync(worker, stop_signals, lambda: writer.has_failed, attempt.poll_stop_request),
        recorder=Recorder(worker.device, data.tokens_per_sample, report, open_sinks, attempt.started, metrics.ranks),
        meter=meter,
        profiler=stack.enter_context(profile_steps(config.profile, run_folder, worker.rank, metrics.profiled)),
        activity=activity,
        events=events,
        stream=_open_stream(attempt, feed) if recipe.data.stream else None,
    )


def _open_stream(attempt: _Attempt, feed: Feed) -> "MicroEpochs":
    from app.training.data.micro_epochs import MicroEpochs  # imports what collects messages

    stream = MicroEpochs(attempt.plan.recipe, attempt.data, feed, attempt.worker, attempt.run_folder)
    return attempt.stack.enter_context(closing(stream))


def _order_of(plan: TrainingPlan, data: PreparedData, run_folder: UPath, activity: Activity) -> SampleOrder:
    """Return the order of the training samples. Collective."""
    difficulty = None
    if plan.recipe.train.curriculum:
        from app.training.difficulty import recorded_difficulty  # other runs do not need it

        activity.begin("measuring how hard samples are")
        difficulty = on_first(partial(recorded_difficulty, plan.recipe, data, run_folder, activity.report_progress))
    return plan.order(data, difficulty)


def _with_teacher(data: PreparedData, recipe: Recipe) -> PreparedData:
    from app.training.teacher import taught  # imports an engine, which other runs do not need

    return taught(data, recipe)


def _listen_for_stops(
    run_folder: UPath, worker: Worker, alerts: Alerts, stack: ExitStack
) -> Sequence[Callable[[], StopRequest]]:
    """Start to listen for stop requests: by signal, by file in the first worker, and by its alerts."""
    signals = StopSignals(run_folder)
    signals.listen()
    if worker.is_first:
        stack.enter_context(signals.poll_file())
    return signals.strongest, lambda: _STOP_REQUESTS[alerts.action]


def _note_start(loop: Loop, earlier_failure: str | None) -> None:
    """Note that training starts, or goes on. ``earlier_failure``: why a worker of the last attempt ended itself."""
    step, workers = loop.position.step, f"{loop.worker.size} worker{'s' if loop.worker.size > 1 else ''}"
    if step or earlier_failure:
        cause = f" after: {earlier_failure}" if earlier_failure else ""
        loop.events.add("continued", f"went on from step {step:,} with {workers}{cause}", step, loop.position.epoch)
    else:
        loop.events.add("started", f"started with {workers}", step, loop.position.epoch)


@contextmanager
def _noted_failure(loop: Loop) -> Iterator[None]:
    """Note an error that ends this attempt."""
    try:
        yield
    except Exception as error:
        loop.events.add("failed", f"{type(error).__name__}: {error}", loop.position.step, loop.position.epoch)
        raise


def _measure_usage(mirror: Mirror, config: TrainConfig, worker: Worker) -> AbstractContextManager[None]:
    """Measure device-hours, energy and GPU utilisation, from now until the workers end."""
    sources: dict[str, Callable[[], Counter]] = {"cpu": RaplCounter}
    utilisation: Callable[[], Utilisation] | None = None
    if worker.device.type == "cuda":
        uuid = str(torch.cuda.get_device_properties(worker.device).uuid)
        sources["gpu"] = partial(GpuCounter, uuid)
        utilisation = partial(GpuUtilisation, uuid)
    machine = machine_name()
    if worker.device.type == "cuda":
        machine = f"{torch.cuda.get_device_name(worker.device)}, {machine}"
    code = code_revision()
    usage = begin_usage(worker.size, config.device, config.cpus_per_worker, machine=machine, code=code)
    return UsageMeter(mirror, usage, sources, utilisation).measure()


def _make_alerts(recipe: Recipe, run_id: str, worker: Worker, events: EventLog) -> Alerts:
    """Return the recipe's alerts in the first worker. The others have none."""

    def note(alert: Notification) -> None:
        events.add("alert", alert.line.removeprefix("alert: "), alert.step, alert.epoch)

    return Alerts.of(recipe, run_id, note) if worker.is_first else Alerts([], Notifier(), run_id, recipe.name)


def _make_engine(
    plan: TrainingPlan,
    data: PreparedData,
    layout: Layout,
    worker: Worker,
    activity: Activity,
    is_resumed: bool,
) -> tuple[TrainingEngine, Meter]:
    """Build the model with the same weights in every worker. Return the engine that trains it, and its meter.

    A resumed run gets its weights from a checkpoint, so the folder of a pretrained model may be gone.
    """
    recipe, config = plan.recipe, plan.recipe.train
    if worker.is_first:
        _warn_of_emulated_bf16(config, worker)
    seed_random(config.seed)
    activity.begin("building the model")
    blueprint = blueprint_of(recipe.model, data.facts, adapted=True)
    if recipe.model.pretrained and not is_resumed:
        from app.models.pretrained import with_pretrained_weights

        blueprint = with_pretrained_weights(blueprint, recipe.model, activity.report_progress)
    # The meter copies the model before the engine splits it.
    meter = Meter.of(blueprint.model, config, layout, worker)
    activity.begin("making DeepSpeed's engine")
    deepspeed = plan.deepspeed.get(worker.size)
    engine = create_engine(blueprint, config, layout, plan.total_steps, plan.objective, deepspeed)
    # Each data-parallel rank has its own dropout.
    seed_random(config.seed + layout.data_rank(worker.rank))
    return engine, meter


def _start_watchdog(worker: Worker, config: TrainConfig, run_folder: UPath) -> Watchdog:
    """Start the watchdog, and remove the failure note of an earlier attempt."""
    if worker.is_first:
        (run_folder / FAILURE_FILE).unlink(missing_ok=True)
    return Watchdog(worker, config.hang_timeout_s, lambda reason: note_failure(run_folder, reason))


def _warn_of_emulated_bf16(config: TrainConfig, worker: Worker) -> None:
    if config.precision == "bf16" and not computes_in_bf16(worker.device):
        warn("this machine does not compute in bf16, and is many times slower at it: set train.precision to fp32")


def _open_logs(mirror: Mirror, step: int, records: list[EpochRecord], stack: ExitStack) -> tuple[Sink, Sink]:
    """Open the run's metrics files, with the epochs ``records`` and without steps after ``step``."""
    log = MetricsLog(mirror)
    log.restore(step, records)
    tensorboard = TensorBoardLog(mirror, step + 1)
    stack.callback(tensorboard.close)
    return log, tensorboard
