"""One optimizer step: its loss, its factors and its result."""

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from app.config import TeacherConfig
from app.data.prepared import IGNORED
from app.models.factory import logits_of
from app.training.engine.deepspeed_engine import MIN_LOSS_SCALE
from app.training.engine.deepspeed_internals import loss_scale_of


@dataclass(frozen=True)
class LossTotals:
    """Sums over targets."""

    loss: float
    correct: float
    count: float

    @classmethod
    def of(cls, sums: Tensor) -> Self:
        """Return the totals in ``CrossEntropy.sums``, which may be added up over batches and ranks."""
        return cls(*sums.tolist())

    @property
    def mean_loss(self) -> float:
        """Mean loss per target, in nats."""
        return self.loss / self.count

    @property
    def accuracy(self) -> float:
        """Share of the targets that are the model's first choice."""
        return self.correct / self.count


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy between logits (batch, …, classes) and targets, int64 (batch, …). ``IGNORED`` does not count.

    With a teacher, its share of the training loss is the divergence from the teacher's distribution.
    """

    label_smoothing: float = 0.0
    teacher: TeacherConfig | None = None

    def mean(self, output: object, targets: Tensor, taught: Tensor | None = None) -> Tensor:
        """Return the mean loss per target, float32 of shape ().

        Args:
            taught: the teacher's logits, float32 of shape (batch, classes).
        """
        logits, flat = _flatten(output, targets)
        loss = functional.cross_entropy(logits, flat, ignore_index=IGNORED, label_smoothing=self.label_smoothing)
        if taught is None or self.teacher is None:
            return loss
        return (1.0 - self.teacher.weight) * loss + self.teacher.weight * self._divergence(logits, taught)

    def _divergence(self, logits: Tensor, taught: Tensor) -> Tensor:
        """Return KL(teacher || student) at the temperature, times its square: so gradients keep their size."""
        assert self.teacher is not None
        temperature = self.teacher.temperature
        ours, theirs = (functional.log_softmax(values / temperature, dim=-1) for values in (logits, taught))
        divergence = functional.kl_div(ours, theirs, reduction="batchmean", log_target=True)
        return divergence * temperature**2

    def sums(self, output: object, targets: Tensor) -> Tensor:
        """Return the sum of losses without smoothing, and the numbers of correct and of all targets, float64 (3,)."""
        logits, flat = _flatten(output, targets)
        loss = functional.cross_entropy(logits, flat, ignore_index=IGNORED, reduction="sum").double()
        correct = (logits.argmax(-1) == flat).sum()
        return torch.stack([loss, correct.double(), (flat != IGNORED).sum().double()])


def _flatten(output: object, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 logits of shape (targets, classes), and targets of shape (targets,)."""
    logits = logits_of(output).float()
    return logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)


@dataclass(frozen=True)
class Factors:
    """The factors of one step."""

    lr: float
    """Learning rate."""
    loss_scale: float | None
    """fp16: the factor of its losses."""

    @classmethod
    def of(cls, engine: Any) -> Self:
        """Return the factors of the next step of ``engine``, a ``DeepSpeedEngine``."""
        scale = loss_scale_of(engine)
        return cls(lr=float(engine.get_lr()[0]), loss_scale=scale.scale if scale else None)


@dataclass(frozen=True)
class StepResult:
    """One optimizer step of one worker."""

    loss: Tensor
    """Mean loss of its micro-batches, float32 of shape ()."""
    factors: Factors
    grad_norm: float | None
    """Global norm of the gradient before clipping. None if DeepSpeed computes none."""
    is_applied: bool
    """False if the optimizer skipped the step, because a gradient was not finite."""

    @classmethod
    def of(cls, engine: Any, factors: Factors, loss: Tensor) -> Self:
        """Return the result of the last step of ``engine``, a ``DeepSpeedEngine``."""
        norm = engine.get_global_grad_norm()
        return cls(
            loss=loss,
            factors=factors,
            grad_norm=None if norm is None else float(norm),
            is_applied=engine.was_step_applied(),
        )

    @property
    def is_broken(self) -> bool:
        """Whether its gradient is not finite.

        fp16 finds its loss scale by overflows, so there an overflow counts only at the minimum scale.
        """
        scale = self.factors.loss_scale
        if scale is not None and scale > MIN_LOSS_SCALE:
            return False
        return not self.is_applied or (self.grad_norm is not None and not math.isfinite(self.grad_norm))
