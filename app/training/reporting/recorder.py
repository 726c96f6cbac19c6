"""From what all workers know to the records of a run, and on to whoever writes or shows them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from app.config import TrainConfig
from app.telemetry.memory import memory_record
from app.training.checkpoints.state import Position
from app.training.coordination.exchange import Exchanged
from app.training.engine.objective import Totals
from app.training.records import EpochRecord, StepRecord, perplexity

Report = Callable[[EpochRecord], None]
"""Where an epoch goes besides the run's folder; every worker calls it."""


class Sink(Protocol):
    """Where records go."""

    def append(self, *records: StepRecord | EpochRecord) -> None:
        """Take in some records, in their order."""
        ...


@dataclass
class Recorder:
    """Makes the records of steps and epochs; every worker has one, and the first one's has sinks."""

    config: TrainConfig
    device: torch.device
    tokens_per_sample: int | None
    """Of language modelling, which also has a perplexity."""
    report: Report
    open_sinks: Callable[[Position, list[EpochRecord]], Sequence[Sink]]
    """The sinks of a run that goes on from a position, with its epochs so far; what was written later is forgotten."""
    started: float
    """Clock time at which this process began."""
    _sinks: Sequence[Sink] = ()
    first_step_s: float | None = None
    """From then to the end of the first step; None before it."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic clock in seconds."""
    _last_recorded: float = 0.0
    """Clock time at which steps were last recorded, or the epoch began."""

    def begin(self, position: Position, records: list[EpochRecord]) -> None:
        """Go on after ``position``."""
        self._sinks = self.open_sinks(position, records)

    def begin_epoch(self) -> None:
        """The clock of an epoch, or of what is left of it, starts."""
        self._last_recorded = self.clock()

    def end_step(self) -> None:
        """Take the time from the start to the end of the first step."""
        self.first_step_s = self.first_step_s or self.clock() - self.started

    def record_steps(self, position: Position, exchanged: Exchanged) -> None:
        """Record the steps that were just exchanged, and add them to the samples and time of ``position``."""
        now = self.clock()
        position.seconds += now - self._last_recorded
        position.samples += len(exchanged.steps) * self.config.global_batch_size
        self._last_recorded = now
        if not self._sinks:
            return
        seconds = sum(step.seconds for step in exchanged.steps)
        samples_per_s = len(exchanged.steps) * self.config.global_batch_size / seconds
        first = position.step - len(exchanged.steps) + 1
        memory = memory_record(self.device)
        self._append(
            *(
                StepRecord(
                    step=first + number,
                    epoch=position.epoch,
                    loss=loss,
                    lr=step.result.factors.lr,
                    grad_norm=step.result.grad_norm,
                    samples_per_s=samples_per_s,
                    data_stall=step.data_s / step.seconds,
                    loss_scale=step.result.factors.loss_scale,
                    tokens_per_s=samples_per_s * self.tokens_per_sample if self.tokens_per_sample else None,
                    mfu=step.mfu,
                    memory=memory,
                )
                for number, (step, loss) in enumerate(zip(exchanged.steps, exchanged.losses, strict=True))
            )
        )

    def make_epoch(self, position: Position, validation: Totals) -> EpochRecord:
        """The record of the epoch that ends at ``position``."""
        return EpochRecord(
            epoch=position.epoch,
            step=position.step,
            train_loss=position.loss_sum / max(position.losses, 1),
            val_loss=validation.mean_loss,
            val_accuracy=validation.accuracy,
            val_perplexity=perplexity(validation.mean_loss) if self.tokens_per_sample else None,
            samples_per_s=position.samples / position.seconds if position.seconds else 0.0,
        )

    def record_epoch(self, record: EpochRecord) -> None:
        """Record an epoch whose state is kept, and report it."""
        self._append(record)
        self.report(record)

    def _append(self, *records: StepRecord | EpochRecord) -> None:
        for sink in self._sinks:
            sink.append(*records)
