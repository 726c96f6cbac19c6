"""One worker's part of a training run, from its first step or from where the run stood."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from upath import UPath

from app.config import Layout, Recipe, TrainConfig
from app.data.prepared import PreparedData
from app.errors import NonFiniteLossError, TrainingError
from app.models.factory import blueprint_of
from app.storage import no_op
from app.telemetry.alerts import Action, Alerts, Notifier
from app.telemetry.mirror import Mirror
from app.telemetry.peak import computes_in_bf16
from app.telemetry.profiler import profile_steps
from app.telemetry.tensorboard import TensorBoardLog
from app.training.activity import Activity
from app.training.checkpoints.manager import CheckpointManager
from app.training.checkpoints.state import Position
from app.training.coordination.control import Control
from app.training.coordination.exchange import Exchange
from app.training.coordination.watchdog import Watchdog
from app.training.data.batches import count_steps
from app.training.data.feed import Feed
from app.training.engine import TrainingEngine, create_engine
from app.training.loop import Loop
from app.training.records import Ending, EpochRecord
from app.training.reporting.meter import Meter
from app.training.reporting.metrics_log import MetricsLog
from app.training.reporting.progress import Progress
from app.training.reporting.recorder import Recorder, Report, Sink
from app.training.run_folder import CHECKPOINTS, FAILURE_FILE
from app.training.worker import Worker, seed_random
from app.warnings import warn

_MOST_ROLLBACKS = 3


def train(
    recipe: Recipe,
    data: PreparedData,
    worker: Worker,
    run_folder: UPath,
    report: Report = no_op,
    poll_stop_request: Callable[[], Action] | None = None,
    last_reported_epoch: int | None = None,
) -> Ending:
    """Train the recipe's model as one worker of the run, from its newest intact checkpoint if it has any.

    ``report`` is called with the record of each epoch. ``poll_stop_request`` asks the platform. It is collective:
    every worker calls it, about once a second. Epochs of the checkpoint after ``last_reported_epoch`` are reported now.
    If it is None, all of them were reported before.

    Raises:
        RecipeError: the model cannot be built from the recipe.
        TrainingError: a checkpoint cannot be read or written, a loss is not finite.
        StorageError: every checkpoint is damaged.
    """
    with ExitStack() as stack:
        loop = _begin(recipe, data, worker, run_folder, report, poll_stop_request, stack)
        for record in loop.records:
            if last_reported_epoch is not None and record.epoch > last_reported_epoch:
                loop.recorder.report(record)
        resumed_from_step = loop.position.step
        request = _run(loop)
        return Ending(
            records=loop.records,
            request=request,
            step=loop.position.step,
            workers=worker.size,
            resumed_from_step=resumed_from_step,
            first_step_s=loop.recorder.first_step_s,
        )


def _run(loop: Loop) -> Action:
    """Train; where the recipe says so, go back from a batch that breaks the numbers, three times in a run's life."""
    while True:
        try:
            return loop.run()
        except NonFiniteLossError as error:
            loop.checkpoints.wait()
            left_out = loop.position.left_out
            if loop.config.non_finite != "rollback":
                raise
            if len(left_out) >= _MOST_ROLLBACKS:
                raise NonFiniteLossError(f"{error}; {len(left_out)} were left out, no run leaves out more") from error
            if not loop.checkpoints.has_any():
                raise TrainingError(f"{error}; there is no checkpoint to go back to") from error
            broken = (loop.position.epoch, loop.position.batches_done - 1)
            if loop.worker.is_first:
                warn(f"{error}; going back to the last checkpoint, without this batch")
        loop.restore([*left_out, broken])


def _begin(
    recipe: Recipe,
    data: PreparedData,
    worker: Worker,
    run_folder: UPath,
    report: Report,
    poll_stop_request: Callable[[], Action] | None,
    stack: ExitStack,
) -> Loop:
    """Build the model and all that trains it. ``stack`` ends what was begun."""
    started, config = time.monotonic(), recipe.train
    layout = config.layout(worker.size)
    watchdog = _start_watchdog(worker, config, run_folder)
    stack.callback(watchdog.close)
    activity = Activity(watchdog.beat, watchdog.advance)
    alerts = _make_alerts(recipe, run_folder.name, worker)
    stack.callback(alerts.close)
    total_steps = count_steps(config, len(data.train))
    engine, meter = _make_engine(recipe, data, layout, total_steps, worker, activity)
    stack.callback(engine.deepspeed.destroy)  # else its gradient hooks keep the model alive until the process ends
    control = Control(run_folder)
    control.listen()
    if worker.is_first:
        stack.enter_context(control.poll())
    mirror = stack.enter_context(Mirror(run_folder))
    checkpoints = CheckpointManager(run_folder / CHECKPOINTS, engine, config, layout, worker, activity, mirror.flush)
    stack.callback(checkpoints.close)

    def open_sinks(position: Position, records: list[EpochRecord]) -> Sequence[Sink]:
        if not worker.is_first:
            return ()
        progress = Progress(config, total_steps, position.step, records)
        return (*_open_logs(mirror, position.step, records, stack), alerts, progress)

    feed = Feed(data, config, layout, worker, activity)
    stack.callback(feed.close)
    loop = Loop(
        config=config,
        total_steps=total_steps,
        worker=worker,
        engine=engine,
        feed=feed,
        checkpoints=checkpoints,
        exchange=Exchange(worker, (control.asked, alerts.pending), checkpoints.has_lost, poll_stop_request),
        recorder=Recorder(config, worker.device, data.tokens_per_sample, watchdog.rest()(report), open_sinks, started),
        meter=meter,
        profiler=stack.enter_context(profile_steps(config.profile, run_folder, worker.rank)),
        activity=activity,
    )
    loop.restore()
    alerts.recall(loop.records)
    return loop


def _make_alerts(recipe: Recipe, run_id: str, worker: Worker) -> Alerts:
    """Return the recipe's alerts in the first worker. The others have none."""
    return Alerts.of(recipe, run_id) if worker.is_first else Alerts([], Notifier(), run_id, recipe.name)


def _make_engine(
    recipe: Recipe, data: PreparedData, layout: Layout, total_steps: int, worker: Worker, activity: Activity
) -> tuple[TrainingEngine, Meter]:
    """Build the model with the same weights in every worker. Return the engine that trains it, and its meter."""
    config = recipe.train
    if worker.is_first:
        _warn_of_imitated_bf16(config, worker)
    seed_random(config.seed)
    activity.begin("building the model")
    blueprint = blueprint_of(recipe.model, data.facts)
    meter = Meter.of(blueprint.model, config, layout, worker)
    activity.begin("making DeepSpeed's engine")
    engine = create_engine(blueprint, config, layout, total_steps)
    seed_random(config.seed + layout.data_rank(worker.rank))  # other dropout in each share
    return engine, meter


def _start_watchdog(worker: Worker, config: TrainConfig, run_folder: UPath) -> Watchdog:
    """Watch over the worker; the note of an attempt that failed before is removed."""
    if worker.is_first:
        (run_folder / FAILURE_FILE).unlink(missing_ok=True)
    return Watchdog(worker, config.hang_timeout_s, lambda reason: _note_failure(run_folder, reason))


def _warn_of_imitated_bf16(config: TrainConfig, worker: Worker) -> None:
    if config.precision == "bf16" and not computes_in_bf16(worker.device):
        warn("this machine does not compute in bf16, and is many times slower at it: set train.precision to fp32")


def _open_logs(mirror: Mirror, step: int, records: list[EpochRecord], stack: ExitStack) -> tuple[Sink, Sink]:
    """Open the run's metrics files, with the epochs ``records`` and without steps after ``step``."""
    log = MetricsLog(mirror)
    log.restore(step, records)
    tensorboard = TensorBoardLog(mirror, step + 1)
    stack.callback(tensorboard.close)
    return log, tensorboard


def _note_failure(run_folder: UPath, reason: str) -> None:
    """Leave the reason where the job finds it: a process that is ended cannot raise an error.

    The first is the right one: those that look later find gone who has ended itself since.
    """
    note = run_folder / FAILURE_FILE
    if not note.exists():
        note.write_text(reason, encoding="utf-8")
