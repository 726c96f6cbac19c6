"""The records of a run, made after each sync and passed to the sinks that write or show them."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch

from app.storage import no_op
from app.telemetry.record import memory_record
from app.training.checkpoints.state import Position
from app.training.coordination.sync import SyncedSteps
from app.training.records import EpochRecord, StepRecord

Report = Callable[[EpochRecord], None]
"""Reports an epoch outside the run's folder. Every worker calls it."""


class Sink(Protocol):
    """Writes or shows records."""

    def append(self, *records: StepRecord | EpochRecord) -> None:
        """Add records, in order."""
        ...


@dataclass
class Recorder:
    """Makes the records of steps and epochs. Every worker has one; only the first worker's has sinks."""

    device: torch.device
    tokens_per_sample: int | None
    """None unless the task is language modelling. Its records also have a perplexity."""
    report: Report
    open_sinks: Callable[[Position, list[EpochRecord]], Sequence[Sink]]
    """Open the sinks of a run at a position, with its epochs so far. They drop later records."""
    started: float
    """Clock time at which this process began."""
    ranks: Callable[[Sequence[float]], None] = no_op
    """Told after each sync how busy each rank was, as ``SyncedSteps.busy_s``."""
    _sinks: Sequence[Sink] = ()
    first_step_s: float | None = None
    """Seconds from ``started`` to the end of the first step. None before it."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic clock in seconds."""
    _last_recorded: float = 0.0
    """Clock time at which steps were last recorded, or the epoch began."""

    def open(self, position: Position, records: list[EpochRecord]) -> None:
        """Open the sinks to go on after ``position``, with the epochs so far."""
        self._sinks = self.open_sinks(position, records)

    def begin_epoch(self) -> None:
        """Start the clock of an epoch, or of the rest of it."""
        self._last_recorded = self.clock()

    def end_step(self) -> None:
        """Set ``first_step_s``, after the first step."""
        self.first_step_s = self.first_step_s or self.clock() - self.started

    def record_steps(self, position: Position, synced: SyncedSteps) -> None:
        """Record the synced steps, and add them to the samples and seconds of ``position``."""
        now = self.clock()
        # All workers count, because each has the run's position.
        position.seconds += now - self._last_recorded
        samples = sum(step.samples for step in synced.steps)
        position.samples += samples
        self._last_recorded = now
        if not self._sinks:
            return

        seconds = sum(step.seconds for step in synced.steps)
        samples_per_s = samples / seconds
        self.ranks(synced.busy_s)

        # The position is that after the last of these steps.
        first = position.step - len(synced.steps) + 1
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
                    step_s=seconds / len(synced.steps),
                    data_stall=step.data_s / step.seconds,
                    loss_scale=step.result.factors.loss_scale,
                    tokens_per_s=samples_per_s * self.tokens_per_sample if self.tokens_per_sample else None,
                    mfu=step.mfu,
                    memory=memory,
                    reading=step.reading,
                )
                for number, (step, loss) in enumerate(zip(synced.steps, synced.losses, strict=True))
            )
        )

    def make_epoch(
        self, position: Position, validation: Mapping[str, float], phase_s: Mapping[str, float] = MappingProxyType({})
    ) -> EpochRecord:
        """Return the record of the epoch that ends at ``position``."""
        return EpochRecord(
            epoch=position.epoch,
            step=position.step,
            # NaN, not 0, if all steps of the epoch were left out, or skipped by fp16.
            train_loss=position.loss_sum / position.losses if position.losses else math.nan,
            samples_per_s=position.samples / position.seconds if position.seconds else 0.0,
            phase_s=dict(phase_s),
            **validation,
        )

    def record_epoch(self, record: EpochRecord) -> None:
        """Record and report an epoch whose state is saved."""
        self._append(record)
        self.report(record)

    def _append(self, *records: StepRecord | EpochRecord) -> None:
        for sink in self._sinks:
            sink.append(*records)
