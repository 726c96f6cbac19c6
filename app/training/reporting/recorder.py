"""What of a run is written down and shown, by its first worker."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from pydantic import BaseModel

from app.config import EarlyStoppingConfig, TrainConfig
from app.telemetry.alerts import Alerts
from app.telemetry.memory import memory_record
from app.telemetry.tensorboard import TensorBoardLog
from app.training.checkpoints.state import Position
from app.training.coordination.exchange import Exchanged
from app.training.records import EpochRecord, StepRecord
from app.training.reporting.metrics_log import MetricsLog
from app.training.reporting.progress import Progress

Report = Callable[[EpochRecord], None]
"""Where an epoch goes besides the run's folder; every worker calls it."""


@dataclass
class Observer:
    """Logs steps and epochs; every worker has one, the first one speaks."""

    config: TrainConfig
    speaks: bool
    log: MetricsLog
    alerts: Alerts
    progress: Progress
    report: Report
    tensorboard: TensorBoardLog | None
    device: torch.device
    tokens_per_sample: int | None
    """Of language modelling."""
    samples_per_s: float = 0.0
    """Of the epoch under way."""
    _began: float = 0.0
    _first_step: int = 0

    def epoch_began(self, position: Position) -> None:
        """The clock of an epoch, or of what is left of it, starts."""
        self._began, self._first_step = time.monotonic(), position.step

    def exchanged(self, position: Position, exchanged: Exchanged) -> None:
        """Log the steps that all workers now know of."""
        steps_done = position.step - self._first_step
        self.samples_per_s = steps_done * self.config.global_batch_size / (time.monotonic() - self._began)
        first = position.step - len(exchanged.steps) + 1
        memory = memory_record(self.device)
        records = [
            StepRecord(
                step=first + number,
                epoch=position.epoch,
                loss=loss,
                lr=step.lr,
                grad_norm=step.grad_norm,
                samples_per_s=self.samples_per_s,
                data_stall=step.data_s / step.seconds,
                loss_scale=step.loss_scale,
                tokens_per_s=self.samples_per_s * self.tokens_per_sample if self.tokens_per_sample else None,
                mfu=step.mfu,
                memory=memory,
            )
            for number, (step, loss) in enumerate(zip(exchanged.steps, exchanged.losses, strict=True))
        ]
        if self.speaks and records:
            self._write(*records)
            self.progress.step(records[-1])
            self.progress.slow(exchanged)

    def epoch_ended(self, record: EpochRecord, is_best: bool) -> None:
        """Log the epoch, show it and report it."""
        if self.speaks:
            self._write(record)
            self.progress.epoch(record, is_best)
        self.report(record)

    def _write(self, *records: BaseModel) -> None:
        """Into the log, and past the alerts."""
        self.log.append(*records)
        if self.tensorboard:
            self.tensorboard.append(*records)
        for record in records:
            self.alerts.observe(record.model_dump())

    def stopped_early(self, epoch: int, stopping: EarlyStoppingConfig) -> None:
        """Say why the run ends before its last epoch."""
        if self.speaks:
            self.progress.stopped_early(epoch, stopping.metric, stopping.patience)
