"""The training engine of one worker. It looks the same to the loop however the plan splits the model."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import all_reduce, get_world_size
from torch.utils.checkpoint import checkpoint

from app.config import Layout, TrainConfig
from app.errors import TrainingError
from app.models.blueprint import Blueprint
from app.models.splitting import layers_of
from app.models.staged import Tied
from app.models.traits import ModelKind, is_hugging_face, kind_of
from app.process_state import return_freed_memory
from app.tasks.objective import CrossEntropy, Objective, Totals
from app.torch_internals import is_persistent_buffer
from app.training.activity import Activity
from app.training.data.feed import MicroBatch
from app.training.engine.batch_norm import synchronize_batch_norm
from app.training.engine.data_parallel import DataParallelEngine
from app.training.engine.deepspeed_engine import Keys, StepResult, deepspeed_config, for_kind
from app.training.engine.nvme import load_asynchronous_io, with_own_folder
from app.training.engine.pipeline import PipelineEngine
from app.training.engine.placement import make_in_place


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

    @property
    def objective(self) -> Objective:
        """The loss and the metrics."""
        ...

    def train_step(self, batches: Iterator[MicroBatch], activity: Activity) -> StepResult:
        """Do one optimizer step on this rank's micro-batches. ``activity`` is told of each phase."""
        ...

    def forget_gradients(self) -> None:
        """Drop what earlier gradients left behind, as in a new process. Checkpoints do not hold it."""
        ...

    def evaluate(self, batches: Iterable[MicroBatch]) -> Totals:
        """Return ``Objective.total`` of this rank's batches.

        Each tensor-parallel rank returns the totals of the batches they share. Stages without outputs return zeros.
        """
        ...


def create_engine(
    blueprint: Blueprint,
    config: TrainConfig,
    layout: Layout,
    total_steps: int,
    objective: Objective | None = None,
    deepspeed: Keys | None = None,
) -> TrainingEngine:
    """Create the engine for the blueprint's model under the recipe's plan. Its tensors are made where they stay.

    The default ``objective`` is cross-entropy without metrics. ``deepspeed`` is what ``deepspeed_config`` has returned,
    or will if it is None.
    """
    objective, kind = objective or Objective(CrossEntropy(config.label_smoothing)), kind_of(blueprint.model)
    deepspeed = for_kind(deepspeed or deepspeed_config(config, layout), layout, kind)
    if kind is ModelKind.STAGED and layout.model_parallel > 1:
        keep_frozen_in_eval(blueprint.model)
        return PipelineEngine.create(blueprint, config, layout, deepspeed, total_steps, objective)
    if config.plan.uses_nvme:
        load_asynchronous_io()
        deepspeed = with_own_folder(deepspeed)
    model = make_in_place(blueprint, config, deepspeed)
    # Before DeepSpeed copies the weights into its masters.
    if config.prune:
        from app.training.engine.pruning import start_pruned  # other runs do not need it

        start_pruned(model, config.prune)
    if config.sync_batch_norm:
        model = synchronize_batch_norm(model)
    keep_frozen_in_eval(model)
    if config.plan.activation_checkpointing:
        _recompute_activations(model)
    engine = DataParallelEngine.create(model, config, layout, deepspeed, total_steps, objective)
    return_freed_memory()
    return engine


def keep_frozen_in_eval(model: nn.Module) -> None:
    """Make ``train`` leave frozen submodules in evaluation mode, if the factory put them into it but not the model.

    Otherwise a frozen batch norm would update its statistics. Whole models still switch to training mode, because
    ``from_pretrained`` returns them in evaluation mode.
    """
    if not model.training:
        return
    for child in model.children():
        parameters = list(child.parameters())
        if child.training:
            keep_frozen_in_eval(child)
        elif parameters and not any(parameter.requires_grad for parameter in parameters):
            # Set on every module, because a pipeline takes layers out of their parents.
            for module in child.modules():
                module.train = partial(_stay, module)  # type: ignore[method-assign]


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:  # noqa: ARG001
    return module


def sums_to_add(sums: Tensor, layout: Layout, rank: int) -> Tensor:
    """Return what a worker adds to the sums of all. Tensor-parallel ranks have the same: the first adds them."""
    return sums if layout.tensor_rank(rank) == 0 else torch.zeros_like(sums)


def _recompute_activations(model: nn.Module) -> None:
    """Keep only what passes between the layers of a staged or Hugging Face model (Chen et al. 2016, arXiv:1604.06174).

    Raises:
        TrainingError: the model is neither.
    """
    # This comes first: a staged one lists its layers, but its forward pass does not call them.
    if is_hugging_face(model):
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    elif kind_of(model) is ModelKind.STAGED:
        for layer in layers_of(model):
            if not isinstance(layer, Tied):
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    else:
        raise TrainingError(
            f"plan.activation_checkpointing: {type(model).__name__} is neither staged nor of Hugging Face: "
            "set it to false"
        ).of("activation_checkpointing.unsupported", "train.plan.activation_checkpointing")


def buffers_of(engine: TrainingEngine) -> dict[str, Tensor]:
    """Return the persistent buffers of this rank, such as running statistics, by their name in the whole model."""
    found = {}
    for module in engine.deepspeed.module.modules():
        for name, buffer in module.named_buffers(recurse=False):
            # Modules that DeepSpeed adds have no name in the whole model.
            if is_persistent_buffer(module, name) and id(module) in engine.names:
                found[f"{engine.names[id(module)]}.{name}".lstrip(".")] = buffer
    return found


@torch.no_grad()
def mean_buffers(engine: TrainingEngine) -> dict[str, Tensor]:
    """Return the buffers averaged over the data-parallel ranks. Integer buffers, such as counts, are this rank's own.

    Collective. Means are computed in float64, so buffers that are equal on all ranks stay equal to the bit.
    """
    means = buffers_of(engine)
    floating = {name: buffer for name, buffer in means.items() if buffer.is_floating_point()}
    if not floating:
        return means
    group = engine.deepspeed.data_parallel_group
    # One all-reduce for all of them.
    flat = torch.cat([buffer.double().flatten() for buffer in floating.values()])
    all_reduce(flat, group=group)
    parts = torch.split(flat / get_world_size(group), [buffer.numel() for buffer in floating.values()])
    for (name, buffer), part in zip(floating.items(), parts, strict=True):
        means[name] = part.view_as(buffer).to(buffer.dtype)
    return means


@torch.no_grad()
def average_buffers(engine: TrainingEngine) -> None:
    """Set the buffers of every data-parallel rank to their mean, so that all ranks validate and save one model."""
    buffers = buffers_of(engine)
    for name, mean in mean_buffers(engine).items():
        buffers[name].copy_(mean)
