"""DeepSpeed's engine of one worker, the same to the loop however the model is cut."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from app.config import Layout, TrainConfig
from app.models.staged import Staged
from app.training.data.micro_batch import MicroBatch
from app.training.engine.activation_checkpointing import recompute_activations
from app.training.engine.data_parallel import DataParallelEngine
from app.training.engine.objective import Objective
from app.training.engine.pipeline import PipelineEngine
from app.training.engine.step import Beat, StepResult


class TrainingEngine(Protocol):
    """One worker's part of the model, its optimizer, and the steps of training."""

    @property
    def deepspeed(self) -> Any:
        """The ``DeepSpeedEngine``."""
        ...

    @property
    def names(self) -> Mapping[int, str]:
        """The name that each parameter and module has in the whole model, by ``id``."""
        ...

    def train_step(self, batches: Iterator[MicroBatch], beat: Beat) -> StepResult:
        """One optimizer step on this rank's micro-batches; ``beat`` hears of each part of it."""
        ...

    def evaluate(self, batches: Iterable[MicroBatch]) -> Tensor:
        """``Objective.sums`` over this rank's batches, float64 of shape (3,); zeros where another rank counts."""
        ...


def create_engine(model: nn.Module, config: TrainConfig, layout: Layout, total_steps: int) -> TrainingEngine:
    """The engine for ``model`` under the recipe's plan."""
    objective = Objective(config.label_smoothing)
    if isinstance(model, Staged) and layout.model_parallel > 1:
        return PipelineEngine.create(model, config, layout, total_steps, objective)
    if config.plan.activation_checkpointing:
        recompute_activations(model)
    return DataParallelEngine.create(model, config, layout, total_steps, objective)


def learning_rate(engine: TrainingEngine) -> float:
    """The rate of the step to come."""
    return float(engine.deepspeed.get_lr()[0])


def gradient_norm(engine: TrainingEngine) -> float:
    """The global norm of the last step's gradient, before clipping."""
    return float(engine.deepspeed.get_global_grad_norm() or 0.0)


def loss_scale(engine: TrainingEngine) -> float | None:
    """fp16: what losses are multiplied with; otherwise None."""
    return float(engine.deepspeed.loss_scale()) if engine.deepspeed.fp16_enabled() else None
