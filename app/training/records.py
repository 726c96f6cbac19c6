"""What a training run reports."""

import math
from collections.abc import Iterable
from typing import Self

from pydantic import BaseModel

from app.config import PlanConfig, TrainConfig
from app.telemetry.alerts import Action
from app.telemetry.memory import MemoryRecord
from app.telemetry.record import Record


class StepRecord(Record):
    """One optimizer step, its values over the whole global batch."""

    kind = "step"
    loss: float
    lr: float
    grad_norm: float | None = None
    samples_per_s: float
    """Of the steps that the workers told each other of at once, about a second's."""
    data_stall: float
    """Share of the step's time that the first worker waited for data."""
    loss_scale: float | None = None
    tokens_per_s: float | None = None
    """Of language modelling."""
    mfu: float | None = None
    """Model FLOPs utilisation of the first worker; None if the model or its device cannot be counted."""
    memory: MemoryRecord
    """Of the first worker."""


class EpochRecord(Record):
    """One epoch: means over the training steps and over the whole validation split."""

    kind = "epoch"
    train_loss: float
    val_loss: float
    val_accuracy: float
    """Share of the targets, classes or tokens, that are the model's first choice."""
    val_perplexity: float | None = None
    """exp(``val_loss``), of language modelling alone."""
    samples_per_s: float
    """The mean over its training, with the checkpoints in it."""


class Ending(BaseModel):
    """How a run's workers ended."""

    records: list[EpochRecord]
    request: Action
    """CONTINUE: training is done; otherwise what was asked, with the state kept."""
    step: int
    workers: int
    resumed_from_step: int
    """Where these workers began; 0 is the start of the run."""
    first_step_s: float | None
    """Seconds from the start of the first worker to the end of its first step; None if there was nothing left to do."""


class TrainMetrics(BaseModel):
    """The outcome of a run: its best epoch, and totals over all of them."""

    val_loss: float
    val_accuracy: float
    val_perplexity: float | None = None
    train_loss: float
    best_epoch: int
    epochs: int
    steps: int
    samples_per_s: float
    first_step_s: float | None
    resumed_from_step: int
    workers: int
    plan: PlanConfig
    baseline_accuracy: float | None = None

    @classmethod
    def of(
        cls,
        best: EpochRecord,
        ending: Ending,
        config: TrainConfig,
        baseline_accuracy: float | None = None,
    ) -> Self:
        """The outcome, from the best epoch and how training ended."""
        last = ending.records[-1]
        return cls(
            val_loss=best.val_loss,
            val_accuracy=best.val_accuracy,
            val_perplexity=best.val_perplexity,
            train_loss=best.train_loss,
            best_epoch=best.epoch,
            epochs=last.epoch,
            steps=last.step,
            samples_per_s=last.samples_per_s,
            first_step_s=ending.first_step_s,
            resumed_from_step=ending.resumed_from_step,
            workers=ending.workers,
            plan=config.plan.model_copy(update={"micro_batch": config.layout(ending.workers).micro_batch}),
            baseline_accuracy=baseline_accuracy,
        )


class StoppedMetrics(BaseModel):
    """How far a run came that was asked to end."""

    steps: int
    epochs: int
    """Whole ones."""
    paused: bool


def perplexity(loss: float) -> float:
    """exp of a mean loss in nats; infinite where that is too large a number."""
    return math.exp(loss) if loss < 700.0 else math.inf


def best_of(records: Iterable[EpochRecord], config: TrainConfig) -> EpochRecord:
    """The best epoch, the earliest of equals."""
    selection = config.selection
    return min(records, key=lambda record: selection.cost(getattr(record, selection.metric)))
