"""DeepSpeed's engine of one worker, the same to the loop however the model is cut."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor

from app.config import Layout, TrainConfig
from app.models.blueprint import Blueprint, return_freed_memory
from app.models.traits import ModelKind, kind_of
from app.training.activity import Activity
from app.training.data.micro_batch import MicroBatch
from app.training.engine.activation_checkpointing import recompute_activations
from app.training.engine.batch_norm import synchronize_batch_norm
from app.training.engine.data_parallel import DataParallelEngine
from app.training.engine.objective import Objective
from app.training.engine.pipeline import PipelineEngine
from app.training.engine.placement import make_in_place
from app.training.engine.step import StepResult


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

    def train_step(self, batches: Iterator[MicroBatch], activity: Activity) -> StepResult:
        """One optimizer step on this rank's micro-batches; ``activity`` hears of each phase of it."""
        ...

    def evaluate(self, batches: Iterable[MicroBatch]) -> Tensor:
        """``Objective.sums`` over this rank's batches, float64 of shape (3,).

        Ranks that split the same batches each have the sums of all of them; those that do not see the output, zeros.
        """
        ...


def create_engine(blueprint: Blueprint, config: TrainConfig, layout: Layout, total_steps: int) -> TrainingEngine:
    """Create the engine for the blueprint's model under the recipe's plan. Its tensors are made where they stay."""
    objective = Objective(config.label_smoothing)
    if kind_of(blueprint.model) is ModelKind.STAGED and layout.model_parallel > 1:
        return PipelineEngine.create(blueprint, config, layout, total_steps, objective)
    model = make_in_place(blueprint, config, layout)
    if config.sync_batch_norm:
        model = synchronize_batch_norm(model)
    if config.plan.activation_checkpointing:
        recompute_activations(model)
    engine = DataParallelEngine.create(model, config, layout, total_steps, objective)
    return_freed_memory()
    return engine
