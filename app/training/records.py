"""What a training run reports."""

from collections.abc import Iterable
from typing import Self

from pydantic import BaseModel

from app.config import PlanConfig, TrainConfig


class StepRecord(BaseModel):
    """One optimizer step, its values over the whole global batch."""

    step: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float
    samples_per_s: float


class EpochRecord(BaseModel):
    """One epoch: means over the training steps and over the whole validation split."""

    epoch: int
    step: int
    train_loss: float
    val_loss: float
    val_accuracy: float
    samples_per_s: float
    first_step_s: float
    resumed_from_step: int


class TrainMetrics(BaseModel):
    """The outcome of a run: its best epoch, and totals over all of them."""

    val_loss: float
    val_accuracy: float
    train_loss: float
    best_epoch: int
    epochs: int
    steps: int
    samples_per_s: float
    first_step_s: float
    resumed_from_step: int
    plan: PlanConfig
    baseline_accuracy: float | None = None

    @classmethod
    def of(
        cls, best: EpochRecord, last: EpochRecord, config: TrainConfig, baseline_accuracy: float | None = None
    ) -> Self:
        """The outcome, from the best and the last epoch."""
        return cls(
            val_loss=best.val_loss,
            val_accuracy=best.val_accuracy,
            train_loss=best.train_loss,
            best_epoch=best.epoch,
            epochs=last.epoch,
            steps=last.step,
            samples_per_s=last.samples_per_s,
            first_step_s=last.first_step_s,
            resumed_from_step=last.resumed_from_step,
            plan=config.plan.model_copy(update={"micro_batch": config.micro_batch}),
            baseline_accuracy=baseline_accuracy,
        )


def best_of(records: Iterable[EpochRecord], config: TrainConfig) -> EpochRecord:
    """The best epoch, the earliest of equals."""
    choose = min if config.selection.mode == "min" else max
    return choose(records, key=lambda record: float(getattr(record, config.selection.metric)))
