"""The engine for a grid of pipeline stages, data-parallel ranks and tensor-parallel ranks."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from app.config import Layout, TrainConfig
from app.models.blueprint import Blueprint, Place
from app.models.splitting import cuts_of, layers_of
from app.models.staged import Layer, Tied
from app.storage import no_op
from app.tasks.objective import Objective, Totals
from app.telemetry.step_time import Phase, phase
from app.training.activity import Activity
from app.training.data.feed import MicroBatch
from app.training.engine.data_parallel import loss_weight
from app.training.engine.deepspeed_engine import Factors, Keys, StepResult, initialize, names_of
from app.training.engine.deepspeed_internals import forget_last_loss, forget_layer_specs, wrap_instructions
from app.training.engine.placement import in_precision
from app.training.engine.tensor_parallel import LinearSplitter

_Micro = tuple[Tensor, tuple[Tensor, Tensor]]
"""Input, targets, and the weight of the mean loss."""


@dataclass(frozen=True)
class PipelineEngine:
    """Runs DeepSpeed's ``PipelineEngine``, with ZeRO 1: 3D parallelism (arXiv:1910.02054, section 7.1)."""

    deepspeed: Any
    names: Mapping[int, str]
    layout: Layout
    objective: Objective

    @classmethod
    def create(
        cls, blueprint: Blueprint, config: TrainConfig, layout: Layout, keys: Keys, steps: int, objective: Objective
    ) -> Self:
        """Create the engine for this worker's stage of the model, with its part of the split matrices.

        No other tensors of the model are kept in memory.
        """
        module = _make_stage(blueprint, config, layout, objective)
        names = names_of(blueprint.model)
        engine = initialize(module, config, keys, steps)
        if config.torch_compile:
            engine.module.compile()
        wrap_instructions(engine, _phase_marker())
        return cls(engine, names, layout, objective)

    def train_step(self, batches: Iterator[MicroBatch], activity: Activity) -> StepResult:
        """Do one optimizer step on this rank's micro-batches. The loss is the mean of all ranks."""
        factors = Factors.of(self.deepspeed)
        with activity.undivided("the pipeline's step"):
            loss: Tensor = self.deepspeed.train_batch(self._pairs(batches))
        return StepResult.of(self.deepspeed, factors, loss.float())

    def forget_gradients(self) -> None:
        """Do nothing: no part of an earlier gradient is left."""

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> Totals:
        """Return the sums of this rank's batches. Only the last stage computes any."""
        sums = torch.zeros(self.objective.num_sums, dtype=torch.float64, device=self.deepspeed.device)
        for batch in batches:
            self.deepspeed.reset_activation_shape()  # the last batch may be shorter
            forget_last_loss(self.deepspeed)
            outputs = self.deepspeed.eval_batch(
                self._pairs(iter([batch])), reduce_output=None, bcast_loss=False, num_micro_batches=1
            )
            if outputs is not None:
                sums += torch.stack(outputs).sum(0)
        # Training's batches have another size than those of validation.
        self.deepspeed.reset_activation_shape()
        return Totals(sums, [])

    def _pairs(self, batches: Iterator[MicroBatch]) -> Iterator[_Micro]:
        """Yield what the first stage reads of each batch, and what the last one reads."""
        for batch in batches:
            (tensor,) = batch.inputs.values()
            weight = loss_weight(batch, self.layout, self.objective)
            yield tensor, (batch.targets, torch.as_tensor(weight, device=tensor.device))


def _phase_marker() -> Callable[[Any, Callable[..., None]], Callable[..., None]]:
    """Return a function that marks the phase of an instruction of DeepSpeed's schedule for the profiler."""
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, OptimizerStep

    phases = {ForwardPass: Phase.FORWARD, BackwardPass: Phase.BACKWARD, OptimizerStep: Phase.OPTIMIZER}

    def mark(instruction: Any, run: Callable[..., None]) -> Callable[..., None]:
        if instruction not in phases:
            return run

        def run_marked(engine: Any, **arguments: Any) -> None:
            with phase(phases[instruction]):
                run(engine, **arguments)

        return run_marked

    return mark


def _make_stage(blueprint: Blueprint, config: TrainConfig, layout: Layout, objective: Objective) -> Any:
    """Return this worker's stage, with its part of the split matrices. DeepSpeed balances stages by parameters."""
    from deepspeed.runtime.pipe.module import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    def loss_or_sums(output: Tensor, read: tuple[Tensor, Tensor]) -> Tensor:
        # DeepSpeed has one loss function, and calls it in validation, too.
        targets, weight = read
        is_training = torch.is_grad_enabled()
        return objective.mean(output, targets) * weight if is_training else objective.sums(output, targets)

    class Stage(PipelineModule):  # type: ignore[misc]
        """A stage that calls ``make`` to create its tensors when it has its layers, before it moves to a device."""

        def __init__(self, make: Callable[[nn.Module], None], *arguments: Any, **options: Any) -> None:
            self._make: Callable[[nn.Module], None] | None = make
            super().__init__(*arguments, **options)

        def to(self, *arguments: Any, **options: Any) -> Any:
            # Otherwise every stage would keep the whole blueprint.
            make, self._make = self._make, None
            if make is not None:
                make(self)
            return super().to(*arguments, **options)

    # DeepSpeed broadcasts tied weights, and prints the stages.
    with torch.no_grad(), redirect_stdout(io.StringIO()):
        stage = Stage(
            partial(_make_tensors, blueprint, config, layout),
            _specs(layers_of(blueprint.model)),
            topology=PipeModelDataParallelTopology(layout.pipeline, layout.tensor, layout.data),
            loss_fn=loss_or_sums,
            partition_method="parameters",
        )
    forget_layer_specs(stage)
    return stage


def _make_tensors(blueprint: Blueprint, config: TrainConfig, layout: Layout, stage: Any) -> None:
    """Make the tensors of ``stage``. Keep only this worker's part of split matrices."""
    split: Place = no_op
    if layout.tensor > 1:
        group = stage.mpu().get_slice_parallel_group()
        split = LinearSplitter(stage, names_of(blueprint.model), cuts_of(blueprint.model), group)
    blueprint.make(in_precision(config), split, part=stage)


def _specs(layers: list[Layer]) -> list[Any]:
    """Return the layers as DeepSpeed takes them. It sums a tied module's gradients over the stages that use it."""
    from deepspeed.runtime.pipe.module import TiedLayerSpec

    class BuiltTiedLayer(TiedLayerSpec):  # type: ignore[misc]
        """A tied layer whose module already exists."""

        def __init__(self, key: str, tied: Tied) -> None:
            super().__init__(key, type(tied.module), forward_fn=tied.forward)
            self.module = tied.module

        def build(self, log: bool = False) -> nn.Module:  # noqa: ARG002
            return self.module

    # Layers that share a module get one key.
    modules = [layer.module for layer in layers if isinstance(layer, Tied)]
    return [
        BuiltTiedLayer(f"tied_{modules.index(layer.module)}", layer) if isinstance(layer, Tied) else layer
        for layer in layers
    ]
