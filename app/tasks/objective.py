"""What training minimizes, and how a validation adds up: losses and metrics as sums over batches and ranks."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from app.config import PlanConfig, TeacherConfig, TrainConfig
from app.data.labelled import CollatingTargets, LabelledData, LabelledDataset
from app.data.prepared import IGNORED, PreparedData
from app.data.targets import HasTargets
from app.errors import RecipeError
from app.models.factory import logits_of
from app.tasks.base import Loss, Task
from app.tasks.metrics import Metric, SklearnMetric

if TYPE_CHECKING:
    from app.tasks.metrics import Predicted


_ROWS_TRIED = 1000
"""Rows of the validation split on which a metric that needs all rows is tried."""


class MeanLoss:
    """A loss that is a mean over targets. Its sums are those of the losses and the number of targets."""

    num_sums = 2

    def value(self, sums: Tensor) -> float:
        """Return the mean loss; NaN if no target counts."""
        total, count = sums.tolist()
        return float(total / count) if count else math.nan


class Totals(NamedTuple):
    """Totals over the batches of a validation."""

    sums: Tensor
    """``Objective.sums``, float64 of shape (``num_sums``,)."""
    rows: list[list["Predicted"]]
    """``Objective.rows`` of each batch."""


@dataclass(frozen=True)
class Objective:
    """A loss with the metrics that a validation also measures."""

    loss: Loss
    metrics: tuple[Metric, ...] = ()

    @property
    def num_sums(self) -> int:
        """The length of ``sums``."""
        return sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        return [self.loss.num_sums, *(0 if metric.of_loss else metric.size for metric in self.metrics)]

    def mean(self, output: object, targets: Tensor, taught: Tensor | None = None) -> Tensor:
        """Return the mean loss per target, float32 of shape ()."""
        return self.loss.mean(output, targets, taught)

    def counted_share(self, targets: Tensor) -> Tensor | float:
        """Return the share of a micro-batch's targets that ``mean`` divides by.

        A step weighs means by it, so that its loss does not depend on how targets that do not count are shared out.
        """
        return (targets != IGNORED).float().mean() if isinstance(self.loss, CrossEntropy) else 1.0

    def sums(self, output: object, targets: Tensor) -> Tensor:
        """Return the sums of the loss, then of each metric, float64 of shape (``num_sums``,)."""
        # Converted once, because the float32 logits of a language model take gigabytes.
        logits = logits_of(output).float()
        # Another loss may read more of the output.
        of_loss = self.loss.sums(logits if isinstance(self.loss, CrossEntropy | RowLoss) else output, targets)
        outputs, counted = select_counted(logits, targets)
        parts = [metric.sums(outputs, counted).double() for metric in self.metrics if not metric.of_loss]
        return torch.cat([of_loss, *parts])

    @property
    def row_metrics(self) -> list[SklearnMetric]:
        """The metrics that need all rows at once."""
        return [metric for metric in self.metrics if isinstance(metric, SklearnMetric)]

    def rows(self, output: object, targets: Tensor) -> list["Predicted"]:
        """Return the rows of a batch for each of ``row_metrics``."""
        rows = select_counted(logits_of(output).float(), targets)
        return [metric.rows(*rows) for metric in self.row_metrics]

    def total(self, batches: Iterable[tuple[object, Tensor]], device: torch.device) -> Totals:
        """Add up batches of outputs and targets."""
        totals = Totals(torch.zeros(self.num_sums, dtype=torch.float64, device=device), [])
        for output, targets in batches:
            totals.sums.add_(self.sums(output, targets))
            if self.row_metrics:
                totals.rows.append(self.rows(output, targets))
        return totals

    def values(self, sums: Tensor, rows: Sequence[list["Predicted"]] = ()) -> dict[str, float]:
        """Return ``val_loss``, and ``val_NAME`` of each metric, from the ``Totals`` of all batches and ranks.

        Raises:
            RecipeError: a metric that needs all rows fails.
        """
        of_loss, *parts = torch.split(sums, self._sizes)
        values = {"val_loss": self.loss.value(of_loss)}
        for metric, part in zip(self.metrics, parts, strict=True):
            values[f"val_{metric.name}"] = metric.value(of_loss if metric.of_loss else part)
        for metric, batches in zip(self.row_metrics, zip(*rows, strict=True), strict=False):
            values[f"val_{metric.name}"] = metric.value_of(batches)
        return values


def objective_of(task: Task, config: TrainConfig, data: PreparedData) -> Objective:
    """Return what a training of the task minimizes, with the task's metrics."""
    if task.learns_classes:
        weights = class_weights(config.class_weights, data) if config.class_weights else None
        loss: Loss = CrossEntropy(config.label_smoothing, config.teacher, weights)
    else:
        loss = task.batch_loss(config, data) or RowLoss(task.loss)
    # Data without labels, such as documents, have no targets to bind to.
    metrics = [metric.bind(data.targets) if isinstance(data, HasTargets) else metric for metric in task.metrics]
    objective = Objective(loss, tuple(metrics))
    if objective.row_metrics:
        _require_values(objective, config, data)
    return objective


def _require_values(objective: Objective, config: TrainConfig, data: PreparedData) -> None:
    """Run the metrics that need all rows on random outputs, so that none fails after an epoch.

    Raises:
        RecipeError: one of them fails, or the plan is a pipeline, whose stages return only sums.
    """
    names = ", ".join(metric.name for metric in objective.row_metrics)
    if isinstance(config.plan, PlanConfig) and config.plan.pipeline > 1:
        raise RecipeError(f"the metric {names} takes all rows at once: set train.plan.pipeline to 1, or use sums").of(
            "pipeline.metric", "train.plan.pipeline"
        )
    split = data.validation
    if isinstance(split, LabelledDataset) and not isinstance(split.targets, CollatingTargets):
        _, values = split.split.take(range(min(len(split), _ROWS_TRIED)))
        targets = torch.from_numpy(split.targets.batch(values))
        generator = torch.Generator().manual_seed(0)
        outputs = torch.randn(len(targets), split.targets.num_outputs, generator=generator)
        for metric in objective.row_metrics:
            metric.value_of([metric.rows(*select_counted(outputs, targets))])


def class_weights(given: Literal["balanced"] | Mapping[str, float], data: PreparedData) -> tuple[float, ...]:
    """Return the weight of each class, with a mean of 1 over the training rows.

    Raises:
        RecipeError: ``given`` names other labels than the data have.
    """
    assert isinstance(data, LabelledData)  # recipes of other tasks are refused
    counts = data.train.split.class_counts(len(data.labels))
    if given == "balanced":
        weights = 1.0 / np.maximum(counts, 1)
    else:
        if sorted(given) != sorted(data.labels):
            raise RecipeError(
                f"train.class_weights has the labels {', '.join(given)}: expected {', '.join(data.labels)}, each with "
                "a weight"
            ).of("labels.unknown", "train.class_weights")
        weights = np.array([given[label] for label in data.labels])
    scaled: list[float] = (weights * counts.sum() / (weights * counts).sum()).tolist()
    return tuple(scaled)


@dataclass(frozen=True)
class CrossEntropy(MeanLoss):
    """Cross-entropy between logits (batch, …, classes) and targets, int64 (batch, …). ``IGNORED`` does not count.

    In training, targets of mixed samples are shares of the classes instead, float32 (batch, classes).

    With a teacher, its share of the training loss is the divergence from the teacher's distribution.
    """

    label_smoothing: float = 0.0
    teacher: TeacherConfig | None = None
    weights: tuple[float, ...] | None = None
    """The weight of each class in training, with a mean of 1 over the rows. None: all 1."""

    def mean(self, output: object, targets: Tensor, taught: Tensor | None = None) -> Tensor:
        """Return the mean loss per target that counts, float32 of shape (); 0 if none does.

        Args:
            taught: the teacher's logits, float32 of shape (batch, classes).
        """
        logits, flat = _flatten(output, targets)
        loss = self._labelled(logits, flat)
        if taught is None or self.teacher is None:
            return loss
        return (1.0 - self.teacher.weight) * loss + self.teacher.weight * self._divergence(logits, taught)

    def _labelled(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy with the labels, each row weighted by its class.

        torch would divide by the weights of the micro-batch, so that a row would count differently on each rank. It
        would also weight the smoothed part of a target, so most of that part would go to the rarest class
        (github.com/pytorch/pytorch/issues/104776).
        """
        smoothing = self.label_smoothing
        if self.weights is not None:
            row_weights, targets = _weigh_rows(logits.new_tensor(self.weights), targets)
            losses = functional.cross_entropy(
                logits, targets, ignore_index=IGNORED, label_smoothing=smoothing, reduction="none"
            )
            return (losses * row_weights).sum() / (row_weights > 0).sum().clamp(min=1)
        if targets.is_floating_point():
            return functional.cross_entropy(logits, targets, label_smoothing=smoothing)
        mean = functional.cross_entropy(logits, targets, ignore_index=IGNORED, label_smoothing=smoothing)
        return torch.where((targets != IGNORED).any(), mean, torch.zeros_like(mean))

    def _divergence(self, logits: Tensor, taught: Tensor) -> Tensor:
        """Return KL(teacher || student) at the temperature, times its square: so gradients keep their size."""
        assert self.teacher is not None
        temperature = self.teacher.temperature
        ours, theirs = (functional.log_softmax(values / temperature, dim=-1) for values in (logits, taught))
        divergence = functional.kl_div(ours, theirs, reduction="batchmean", log_target=True)
        return divergence * temperature**2

    def sums(self, output: object, targets: Tensor) -> Tensor:
        """Return the sum of losses without smoothing, and the number of targets, float64 of shape (2,)."""
        logits, flat = _flatten(output, targets)
        loss = functional.cross_entropy(logits, flat, ignore_index=IGNORED, reduction="sum").double()
        return torch.stack([loss, (flat != IGNORED).sum().double()])


@dataclass(frozen=True)
class RowLoss(MeanLoss):
    """A function from outputs and targets to the loss of each row, whose mean is minimized."""

    loss: Callable[[Tensor, Tensor], Tensor]

    def mean(self, output: object, targets: Tensor, taught: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Return the sum of the losses divided by all rows: those that do not count have a loss of 0."""
        return self._losses(output, targets).sum() / max(1, len(targets))

    def sums(self, output: object, targets: Tensor) -> Tensor:
        """Return the sum of losses and the number of rows, float64 of shape (2,)."""
        losses = self._losses(output, targets).double()
        return torch.stack([losses.sum(), losses.new_tensor(len(losses))])

    def _losses(self, output: object, targets: Tensor) -> Tensor:
        return self.loss(*select_counted(logits_of(output).float(), targets))


def select_counted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that count: those with a target that is neither ``IGNORED`` nor NaN."""
    is_target = ~targets.isnan() if targets.is_floating_point() else targets != IGNORED
    counted = is_target.reshape(len(targets), -1).any(dim=1)
    return (outputs, targets) if counted.all() else (outputs[counted], targets[counted])


def _weigh_rows(weights: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight of each row, 0 if it does not count, and its targets.

    The loss of a mixed row is the sum of its classes' weighted losses, each by its share.
    """
    if not targets.is_floating_point():
        return torch.where(targets == IGNORED, 0.0, weights[targets.clamp(min=0)]), targets
    shares = targets * weights
    row_weights = shares.sum(-1)
    return row_weights, shares / row_weights.unsqueeze(-1)


def _flatten(output: object, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 logits of shape (targets, classes), and targets of shape (targets,), or shares of classes."""
    logits = logits_of(output).float()
    return logits.reshape(-1, logits.shape[-1]), targets if targets.is_floating_point() else targets.reshape(-1)
