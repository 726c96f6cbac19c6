"""One worker's part of a training run, from its first step or from where the run stood."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import torch
from pydantic import BaseModel
from upath import UPath

from app.config import Layout, NotifyConfig, Recipe, TrainConfig
from app.data.prepared import PreparedData
from app.errors import NonFiniteLossError, RayloomError, TrainingError
from app.models.factory import build_model
from app.telemetry.alerts import Action, Alerts, start_alerts
from app.telemetry.profiler import StepProfiler, profile_steps
from app.telemetry.tensorboard import TensorBoardLog
from app.training.checkpoints.fragments import fragments_of
from app.training.checkpoints.reader import load_checkpoint
from app.training.checkpoints.state import Position, TrainState
from app.training.checkpoints.store import CheckpointStore
from app.training.checkpoints.writer import CheckpointWriter
from app.training.coordination.control import Control
from app.training.coordination.heartbeat import Heartbeat
from app.training.coordination.watchdog import Watchdog
from app.training.engine import TrainingEngine, create_engine
from app.training.loop import Loop
from app.training.records import EpochRecord
from app.training.reporting.meter import Meter
from app.training.reporting.metrics_log import MetricsLog
from app.training.reporting.observer import Observer, Report
from app.training.reporting.progress import Progress
from app.training.run_folder import CHECKPOINTS, FAILURE_FILE
from app.training.worker import Worker

_MOST_ROLLBACKS = 3
T = TypeVar("T")


class Ending(BaseModel):
    """How a run's workers ended."""

    records: list[EpochRecord]
    request: Action
    """CONTINUE: training is done; otherwise what was asked, with the state kept."""
    step: int
    workers: int


def train(recipe: Recipe, data: PreparedData, worker: Worker, run_folder: UPath, report: Report) -> Ending:
    """Train the recipe's model as one worker of the run, from its newest intact checkpoint if it has any.

    Raises:
        RecipeError: the model cannot be built from the recipe.
        TrainingError: a checkpoint cannot be read or written, a loss is not finite.
        StorageError: every checkpoint is damaged.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        return _Session.start(recipe, data, worker, run_folder, report, started, stack).run()


@dataclass
class _Session:
    recipe: Recipe
    layout: Layout
    data: PreparedData
    worker: Worker
    engine: TrainingEngine
    run_folder: UPath
    report: Report
    started: float
    store: CheckpointStore
    writer: CheckpointWriter
    control: Control
    watchdog: Watchdog
    alerts: Alerts
    meter: Meter
    profiler: StepProfiler
    total_steps: int
    stack: ExitStack

    @classmethod
    def start(
        cls,
        recipe: Recipe,
        data: PreparedData,
        worker: Worker,
        run_folder: UPath,
        report: Report,
        started: float,
        stack: ExitStack,
    ) -> "_Session":
        """Build the model and its engine, with the same weights in every worker; ``stack`` ends what was begun."""
        config = recipe.train
        layout = config.layout(worker.size)
        if worker.is_first:
            (run_folder / FAILURE_FILE).unlink(missing_ok=True)  # of the attempt before this one
        watchdog = Watchdog(worker, config.hang_timeout_s, lambda reason: _note_failure(run_folder, reason))
        stack.callback(watchdog.close)
        alerts = _start_alerts(recipe, worker, run_folder.name)
        stack.callback(alerts.close)
        total_steps = count_steps(config, len(data.train))
        torch.manual_seed(config.seed)
        watchdog.beat("building the model")
        model = build_model(recipe.model, data.facts)
        meter = Meter.of(model, config, layout, worker)
        watchdog.beat("making DeepSpeed's engine")
        engine = create_engine(model, config, layout, total_steps)
        fragments_of(engine, layout)  # what cannot be kept is found out before there is work to lose
        torch.manual_seed(config.seed + layout.data_rank(worker.rank))  # other dropout in each share
        control = Control(run_folder)
        control.listen()
        store = CheckpointStore(run_folder / CHECKPOINTS)
        writer = CheckpointWriter(store, config.checkpoint)
        if worker.is_first:
            stack.callback(Heartbeat(run_folder).close)
        stack.callback(writer.close)
        return cls(
            recipe=recipe,
            layout=layout,
            data=data,
            worker=worker,
            engine=engine,
            run_folder=run_folder,
            report=report,
            started=started,
            store=store,
            writer=writer,
            control=control,
            watchdog=watchdog,
            alerts=alerts,
            meter=meter,
            profiler=stack.enter_context(profile_steps(config.profile, run_folder, worker.rank)),
            total_steps=total_steps,
            stack=stack,
        )

    def run(self) -> Ending:
        """Train; where the recipe says so, go back from a batch that breaks the numbers."""
        left_out: list[tuple[int, int]] = []
        while True:
            loop = self._loop(left_out)
            try:
                request = loop.run()
                return Ending(records=loop.records, request=request, step=loop.position.step, workers=self.worker.size)
            except NonFiniteLossError as error:
                position = loop.position
                self.writer.wait()
                if self.recipe.train.non_finite != "rollback" or len(left_out) == _MOST_ROLLBACKS:
                    raise
                if not on_first(self.worker, self.store.committed):
                    raise TrainingError(f"{error}; there is no checkpoint to go back to") from error
                left_out.append((position.epoch, position.batches_done - 1))
                if self.worker.is_first:
                    print(f"warning: {error}; going back to the last checkpoint, without this batch", flush=True)

    def _loop(self, left_out: list[tuple[int, int]]) -> Loop:
        """The loop from the newest intact checkpoint, or from the start."""
        state = self._resume()
        position = state.position if state else Position()
        position.left_out = sorted({*position.left_out, *left_out})
        records = state.records if state else []
        if not left_out:
            self.alerts.recall(record.model_dump() for record in records)
        return Loop(
            config=self.recipe.train,
            layout=self.layout,
            worker=self.worker,
            engine=self.engine,
            train_data=self.data.train,
            validation_data=self.data.validation,
            is_language_model=self.recipe.is_language_model,
            total_steps=self.total_steps,
            writer=self.writer,
            control=self.control,
            watchdog=self.watchdog,
            observer=self._observer(position),
            meter=self.meter,
            profiler=self.profiler,
            started=self.started,
            position=position,
            records=records,
        )

    def _observer(self, position: Position) -> Observer:
        """One that goes on after ``position``; what was written of later steps is forgotten."""
        log, tensorboard = MetricsLog(self.run_folder), None
        if self.worker.is_first:
            log.forget_after(position.step)
            tensorboard = TensorBoardLog(self.run_folder, position.step + 1)
            self.stack.callback(tensorboard.close)
        lengths = self.data.train.lengths
        return Observer(
            config=self.recipe.train,
            speaks=self.worker.is_first,
            log=log,
            tensorboard=tensorboard,
            alerts=self.alerts,
            progress=Progress(self.recipe.train.epochs, self.total_steps, position.step),
            report=self.report,
            device=self.worker.device,
            tokens_per_sample=lengths[0] if self.recipe.is_language_model else None,
        )

    def _resume(self) -> TrainState | None:
        self.watchdog.beat("looking for a checkpoint")
        step = on_first(self.worker, self._find_checkpoint)
        if step is None:
            return None
        self.watchdog.beat(f"reading the checkpoint of step {step}")
        state = load_checkpoint(self.engine, self.layout, self.store.folder_of(step))
        if self.worker.is_first:
            print(f"going on from step {step:,} of {self.total_steps:,}", flush=True)
        return state

    def _find_checkpoint(self) -> int | None:
        step = self.store.newest_intact()
        self.store.sweep(after=step)
        return step


def _start_alerts(recipe: Recipe, worker: Worker, run_id: str) -> Alerts:
    """The recipe's in the first worker; the others have none."""
    return start_alerts(
        recipe if worker.is_first else recipe.model_copy(update={"alerts": [], "notify": NotifyConfig()}), run_id
    )


def on_first(worker: Worker, work: Callable[[], T]) -> T:
    """What ``work`` answers, or raises, in the first worker; the same in all."""
    answer: list[T | RayloomError | None] = [None]
    if worker.is_first:
        try:
            answer = [work()]
        except RayloomError as error:
            answer = [error]
    torch.distributed.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], RayloomError):
        raise answer[0]
    return answer[0]  # type: ignore[return-value]


def count_steps(config: TrainConfig, num_samples: int) -> int:
    """Optimizer steps of the whole run.

    Raises:
        TrainingError: there are fewer samples than one batch takes.
    """
    per_epoch = num_samples // config.global_batch_size
    if not per_epoch:
        raise TrainingError(
            f"train.global_batch_size is {config.global_batch_size}, the training split has {num_samples} samples: "
            "lower the batch size or give more data"
        )
    return min(config.epochs * per_epoch, config.max_steps or config.epochs * per_epoch)


def _note_failure(run_folder: UPath, reason: str) -> None:
    """Leave the reason where the job finds it: a process that is ended cannot raise an error.

    The first is the right one: those that look later find gone who has ended itself since.
    """
    note = run_folder / FAILURE_FILE
    if not note.exists():
        note.write_text(reason, encoding="utf-8")
