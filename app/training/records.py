"""The records of a training run: steps, epochs, its end, and the choice of the best epoch and of the last one."""

import math
from collections.abc import Sequence
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from app.config import EarlyStoppingConfig, PlanConfig, TrainConfig
from app.config.metrics import Selection, cost_of
from app.errors import NonFiniteLossError
from app.planner.prediction import Prediction
from app.telemetry.judgement import Judgement
from app.telemetry.record import MemoryRecord, ReadingRecord, Record
from app.training.stop_request import StopRequest


class StepRecord(Record):
    """One optimizer step. Its values are over the whole global batch."""

    kind = "step"
    loss: float
    lr: float
    grad_norm: float | None = None
    samples_per_s: float
    """Rate of all steps of the same sync between the workers, about one second."""
    step_s: float
    """Mean seconds of these steps."""
    data_stall: float
    """Share of the step's time that the first worker waited for data."""
    loss_scale: float | None = None
    tokens_per_s: float | None = None
    """None unless the task is language modelling."""
    mfu: float | None = None
    """Model FLOPs utilisation of the first worker. None if it is unknown for the model or its device."""
    memory: MemoryRecord
    """Memory of the first worker."""
    reading: ReadingRecord | None = None


class EpochRecord(Record):
    """One epoch: means over its training steps, and the metrics of the task over the whole validation split.

    Metrics that are not among its fields are kept beside them, as ``val_NAME``.
    """

    model_config = ConfigDict(extra="allow")

    __pydantic_extra__: dict[str, float]
    kind = "epoch"
    train_loss: float
    val_loss: float
    val_accuracy: float | None = None
    """Share of the targets, classes or tokens, that are the model's first choice. None for other tasks."""
    val_perplexity: float | None = None
    """exp(``val_loss``). None unless the task is language modelling."""
    samples_per_s: float
    """Mean over its training, including the checkpoints within the epoch."""
    phase_s: dict[str, float] = Field(default={})
    """Seconds of the first worker: data, forward, backward, optimizer, rest_of_step, sync, validation, checkpoint."""

    source_samples: dict[str, int] | None = None
    """Samples of each source that the epoch was trained on. None unless there are several sources."""
    stopped_early: bool = False
    """Whether early stopping ended training after this epoch."""

    @property
    def sources(self) -> set[str]:
        """The sources of the epoch's training and validation samples. Empty without ``data.sources``."""
        return set(self.source_samples or ())

    @property
    def metrics(self) -> dict[str, float]:
        """The loss and the metrics of the validation split, by their names ``val_NAME``."""
        given = {name: getattr(self, name) for name in ("val_loss", "val_perplexity", "val_accuracy")}
        return {name: value for name, value in (given | self.__pydantic_extra__).items() if value is not None}

    def value_of(self, metric: str) -> float:
        """Return a metric, ``train_loss`` or ``samples_per_s``; NaN if the record has none."""
        # Metrics of a task are extra fields.
        value = getattr(self, metric, None)
        return math.nan if value is None else float(value)


class Ending(BaseModel):
    """The end of a run's workers."""

    records: list[EpochRecord]
    stop_request: StopRequest
    """NONE: training is done. Otherwise the request that was obeyed. The state is saved."""
    step: int
    workers: int
    resumed_from_step: int
    """The step at which these workers began. 0 is the start of the run."""
    first_step_s: float | None
    """Seconds from the start of the first worker to the end of its first step. None if no step was left."""


class TrainMetrics(BaseModel):
    """The outcome of a run: its best epoch, and totals over all epochs."""

    model_config = ConfigDict(extra="allow")

    __pydantic_extra__: dict[str, float]
    val_loss: float
    val_accuracy: float | None = None
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
    judgement: Judgement | None = None
    """None: the task has no single score, or the model was not run again."""
    prediction: Prediction | None = None
    """What the planner predicted of a step, beside what was measured; None for small models on CPUs."""

    @classmethod
    def of(
        cls,
        best: EpochRecord,
        ending: Ending,
        config: TrainConfig,
        judgement: Judgement | None = None,
        prediction: Prediction | None = None,
    ) -> Self:
        """Return the outcome of a run with this best epoch and this end."""
        # The metrics are those of the best epoch, and totals count to the last.
        last = ending.records[-1]
        return cls(
            **best.metrics,
            train_loss=best.train_loss,
            best_epoch=best.epoch,
            epochs=last.epoch,
            steps=last.step,
            samples_per_s=last.samples_per_s,
            first_step_s=ending.first_step_s,
            resumed_from_step=ending.resumed_from_step,
            workers=ending.workers,
            plan=config.plan.model_copy(update={"micro_batch": config.layout(ending.workers).micro_batch}),
            judgement=judgement,
            prediction=prediction,
        )


class StoppedTrainMetrics(BaseModel):
    """The progress of a run that was asked to end."""

    steps: int
    epochs: int
    """Completed epochs."""
    paused: bool


def epoch_cost(record: EpochRecord, selection: Selection) -> tuple[float, float]:
    """Return the cost of an epoch, by which less is better: of the metric, then of ``val_loss``."""
    if not is_finite(record, selection):
        return math.inf, math.inf
    return cost_of(record.value_of(selection.metric), selection.mode), cost_of(record.val_loss, "min")


def ranked(records: Sequence[EpochRecord], selection: Selection) -> list[EpochRecord]:
    """Return the epochs from best to worst, and equal ones in their order. Those without finite numbers come last.

    Epochs that were validated on the same sources as the last epoch come before those that were not.
    """
    return sorted(
        records,
        key=lambda record: (
            not is_finite(record, selection),
            record.sources != records[-1].sources,
            epoch_cost(record, selection),
        ),
    )


def best_of(records: Sequence[EpochRecord], selection: Selection) -> EpochRecord:
    """Return the best epoch, the first one of ``ranked``."""
    return ranked(records, selection)[0]


def is_finite(record: EpochRecord, selection: Selection) -> bool:
    """Return whether the validation loss of an epoch is finite, and the metric that chooses the best one."""
    # NaN outputs have an accuracy too: their argmax is the first class.
    return math.isfinite(record.val_loss) and math.isfinite(record.value_of(selection.metric))


def require_finite(best: EpochRecord, selection: Selection) -> None:
    """Raise NonFiniteLossError if not even the best epoch has a finite validation loss and metric."""
    if not is_finite(best, selection):
        found = ", ".join(f"{name} {value:.4g}" for name, value in best.metrics.items())
        required = " and ".join(dict.fromkeys(["val_loss", selection.metric]))
        raise NonFiniteLossError(
            f"no epoch has a finite {required}: epoch {best.epoch} has {found}; check the model's "
            "outputs in evaluation mode, or lower train.optimizer.lr"
        )


def should_stop(records: Sequence[EpochRecord], selection: Selection, config: EarlyStoppingConfig) -> bool:
    """Return whether none of the last ``patience`` epochs is better than the best one before them.

    With k = ``patience``, d = ``min_delta`` and mode ``min``, stop when there are more than k values and

        min(values[-k:]) > min(values[:-k]) - d,  or equal with d = 0;

    mode ``max`` is the same on negated values. So a value must be better, and by at least d. NaN is worse than any
    other value. Only epochs that were validated on the same sources as the last one are compared.
    """
    values = [record.value_of(selection.metric) for record in records if record.sources == records[-1].sources]
    # Lower is better for both modes, and NaN is worst.
    costs = [cost_of(value, selection.mode) for value in values]
    before, recent = costs[: -config.patience], costs[-config.patience :]
    if not before:
        return False
    return min(recent) >= min(before) or min(before) - min(recent) < config.min_delta
