"""Training on a grid of pipeline stages, data-parallel ranks and split matrices, by DeepSpeed's pipeline engine."""

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
from app.models.staged import Layer, Tied, cuts_of, layers_of
from app.models.traits import ModelKind
from app.storage import no_op
from app.telemetry.phases import Phase, phase
from app.training.activity import Activity
from app.training.data.micro_batch import MicroBatch
from app.training.engine.initialize import initialize
from app.training.engine.names import names_of
from app.training.engine.objective import Objective
from app.training.engine.placement import in_precision
from app.training.engine.step import Factors, StepResult
from app.training.engine.tensor_parallel import LinearSplitter

_Micro = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class PipelineEngine:
    """DeepSpeed's ``PipelineEngine``; of three-dimensional parallelism with ZeRO 1 (arXiv:1910.02054, section 7.1)."""

    deepspeed: Any
    names: Mapping[int, str]

    @classmethod
    def create(
        cls, blueprint: Blueprint, config: TrainConfig, layout: Layout, total_steps: int, objective: Objective
    ) -> Self:
        """Create the engine for this worker's stage of the model, with its part of the split matrices.

        No other tensors of the model are kept in memory.
        """
        module = _cut(blueprint, config, layout, objective)
        names = names_of(blueprint.model)
        engine = initialize(module, config, layout, total_steps, ModelKind.STAGED)
        if config.torch_compile:
            engine.module.compile()
        engine._INSTRUCTION_MAP = _with_phases(engine._INSTRUCTION_MAP)
        return cls(engine, names)

    def train_step(self, batches: Iterator[MicroBatch], activity: Activity) -> StepResult:
        """One optimizer step on this rank's micro-batches; the loss is the mean of all ranks."""
        factors = Factors.of(self.deepspeed)
        with activity.whole("the pipeline's step"):
            loss: Tensor = self.deepspeed.train_batch(_pairs(batches))
        return StepResult.of(self.deepspeed, factors, loss.float())

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> Tensor:
        """``Objective.sums`` over this rank's batches, float64 of shape (3,); zeros but in the last stage."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.deepspeed.device)
        for batch in batches:
            self.deepspeed.reset_activation_shape()  # the last batch may be a shorter one
            self.deepspeed.total_loss = None  # it would add these sums to the loss of the last step
            outputs = self.deepspeed.eval_batch(
                _pairs(iter([batch])), reduce_output=None, bcast_loss=False, num_micro_batches=1
            )
            if outputs is not None:
                sums += torch.stack(outputs).sum(0)
        self.deepspeed.reset_activation_shape()
        return sums


def _with_phases(instructions: Mapping[Any, Callable[..., None]]) -> dict[Any, Callable[..., None]]:
    """DeepSpeed's instructions, those that compute marked for the profiler."""
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, OptimizerStep

    phases = {ForwardPass: Phase.FORWARD, BackwardPass: Phase.BACKWARD, OptimizerStep: Phase.OPTIMIZER}

    def marked(run: Callable[..., None], name: Phase) -> Callable[..., None]:
        def run_marked(engine: Any, **arguments: Any) -> None:
            with phase(name):
                run(engine, **arguments)

        return run_marked

    return {key: marked(run, phases[key]) if key in phases else run for key, run in instructions.items()}


def _pairs(batches: Iterator[MicroBatch]) -> Iterator[_Micro]:
    """Batches as the first stage (input) and the last (targets) read them."""
    for batch in batches:
        (tensor,) = batch.inputs.values()
        yield tensor, batch.targets


def _cut(blueprint: Blueprint, config: TrainConfig, layout: Layout, objective: Objective) -> Any:
    """Return this worker's stage, with its part of the split matrices. DeepSpeed balances stages by parameters."""
    from deepspeed.runtime.pipe.module import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    def answer(output: Tensor, targets: Tensor) -> Tensor:
        training = torch.is_grad_enabled()
        return objective.loss(output, targets) if training else objective.sums(output, targets)

    class Stage(PipelineModule):  # type: ignore[misc]
        """Calls ``make`` to create its tensors, once it knows its layers and before it moves to a device."""

        def __init__(self, make: Callable[[nn.Module], None], *arguments: Any, **options: Any) -> None:
            self._make: Callable[[nn.Module], None] | None = make
            super().__init__(*arguments, **options)

        def to(self, *arguments: Any, **options: Any) -> Any:
            make, self._make = self._make, None  # otherwise every stage would keep the whole blueprint
            if make is not None:
                make(self)
            return super().to(*arguments, **options)

    with torch.no_grad(), redirect_stdout(io.StringIO()):  # it broadcasts tied weights, and prints its partition
        stage = Stage(
            partial(_make, blueprint, config, layout),
            _specs(layers_of(blueprint.model)),
            topology=PipeModelDataParallelTopology(layout.pipeline, layout.tensor, layout.data),
            loss_fn=answer,
            partition_method="parameters",
        )
    stage._layer_specs.clear()  # otherwise every stage would keep all modules of the model
    return stage


def _make(blueprint: Blueprint, config: TrainConfig, layout: Layout, stage: Any) -> None:
    """Make the tensors of ``stage``. Keep only this worker's part of split matrices."""
    split: Place = no_op
    if layout.tensor > 1:
        group = stage.mpu().get_slice_parallel_group()
        split = LinearSplitter(stage, names_of(blueprint.model), cuts_of(blueprint.model), group)
    blueprint.make(in_precision(config), split, part=stage)


def _specs(layers: list[Layer]) -> list[Any]:
    """Layers for DeepSpeed; a tied module sums its gradients over the stages that use it."""
    from deepspeed.runtime.pipe.module import TiedLayerSpec

    class BuiltTiedLayer(TiedLayerSpec):  # type: ignore[misc]
        """A tied layer whose module is there already."""

        def __init__(self, key: str, tied: Tied) -> None:
            super().__init__(key, type(tied.module), forward_fn=tied.forward)
            self.module = tied.module

        def build(self, log: bool = False) -> nn.Module:  # noqa: ARG002
            return self.module

    modules = [layer.module for layer in layers if isinstance(layer, Tied)]
    return [
        BuiltTiedLayer(f"tied_{modules.index(layer.module)}", layer) if isinstance(layer, Tied) else layer
        for layer in layers
    ]
