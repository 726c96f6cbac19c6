"""The newest figures of a training run, as metrics."""

import time
from collections.abc import Callable, Sequence

from app.best_effort import BestEffort
from app.config import Recipe
from app.config.alert_rules import MetricRule
from app.telemetry import catalog
from app.telemetry.metrics import Metric, Publish, Sample
from app.telemetry.step_time import StepTime
from app.training.checkpoints.writer import Commit
from app.training.records import EpochRecord, StepRecord


class RunMetrics:
    """Keeps the last value of each metric, and publishes all of them with each record."""

    def __init__(
        self,
        publish: Publish,
        run_id: str,
        recipe: Recipe,
        total_steps: int,
        last_commit: Callable[[], Commit | None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``last_commit`` returns the newest checkpoint that was stored, and ``clock`` the seconds since 1970."""
        self._publish, self._last_commit, self._clock = publish, last_commit, clock
        self._labels = run_id, recipe.name
        self._samples: dict[tuple[Metric, str], Sample] = {}
        self._publishing = BestEffort("metrics cannot be published")
        self._set(catalog.TRAIN_STEPS_PLANNED, total_steps)
        # The rules of Prometheus leave these to the run. Otherwise receivers would be told twice.
        for alert in recipe.alerts:
            about = alert.rule.metric if isinstance(alert.rule, MetricRule) else "silence"
            self._set(catalog.TRAIN_OWN_ALERTS, 1.0, about)

    def append(self, *records: StepRecord | EpochRecord) -> None:
        """Publish the last of some records."""
        match records:
            case (*_, StepRecord() as step):
                self._note_step(step)
            case (*_, EpochRecord() as epoch):
                self._set(catalog.TRAIN_VAL_LOSS, epoch.val_loss)
                self._set(catalog.TRAIN_VAL_ACCURACY_RATIO, epoch.val_accuracy)
                for name, value in epoch.metrics.items():
                    if name not in ("val_loss", "val_accuracy"):
                        self._set(catalog.TRAIN_VAL_METRIC, value, name)
        self._set(catalog.TRAIN_REPORT_TIMESTAMP_SECONDS, self._clock())
        if commit := self._last_commit():
            self._set(catalog.TRAIN_CHECKPOINT_TIMESTAMP_SECONDS, commit.time_s)
            self._set(catalog.TRAIN_CHECKPOINT_SECONDS, commit.seconds)
        self._publishing(lambda: self._publish(self._samples.values()))

    def ranks(self, busy_s: Sequence[float]) -> None:
        """Note how long each rank worked itself in a step. The next record publishes it."""
        for rank, seconds in enumerate(busy_s):
            self._set(catalog.TRAIN_RANK_BUSY_SECONDS, seconds, str(rank))

    def profiled(self, summary: StepTime) -> None:
        """Note what a profile says. The next record publishes it."""
        self._set(catalog.TRAIN_COMMUNICATION_RATIO, summary.communication)

    def _note_step(self, record: StepRecord) -> None:
        self._set(catalog.TRAIN_STEP, record.step)
        self._set(catalog.TRAIN_EPOCH, record.epoch)
        self._set(catalog.TRAIN_LOSS, record.loss)
        self._set(catalog.TRAIN_LEARNING_RATE, record.lr)
        self._set(catalog.TRAIN_GRADIENT_NORM, record.grad_norm)
        self._set(catalog.TRAIN_SAMPLES_PER_SECOND, record.samples_per_s)
        self._set(catalog.TRAIN_TOKENS_PER_SECOND, record.tokens_per_s)
        self._set(catalog.TRAIN_MFU_RATIO, record.mfu)
        self._set(catalog.TRAIN_DATA_STALL_RATIO, record.data_stall)
        self._set(catalog.TRAIN_STEP_SECONDS, record.step_s)
        self._set(catalog.TRAIN_MEMORY_PEAK_BYTES, record.memory.peak_bytes)
        self._set(catalog.TRAIN_MEMORY_FRAGMENTATION_RATIO, record.memory.fragmentation)

    def _set(self, metric: Metric, value: float | None, *more: str) -> None:
        if value is not None:
            # All values are published each time, so the last of each is kept.
            self._samples[metric, "".join(more)] = metric.of(value, *self._labels, *more)
