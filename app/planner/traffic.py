"""Bytes that a rank's collectives carry in one optimizer step, by kind and group, in several training stacks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from app.config.plan import Precision
from app.planner.plan import ParallelPlan
from app.planner.profile import PRECISION_BYTES, ModelProfile, count_parameters
from app.planner.stages import Stage

CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather", "send"]
Group = Literal["tensor", "data", "pipeline", "tied", "copy"]
"""tied: the first and the last stage, which share an embedding. copy: the ranks of ZeRO++'s second copy."""


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind in one group, in one step of one rank."""

    kind: CollectiveKind
    group: Group
    ranks: int
    """Ranks of the group."""
    bytes: float
    """Bytes of all of them together, of the whole tensor: an all-gather's output, a reduce-scatter's input."""
    count: float
    """How many there are."""


@dataclass(frozen=True)
class Stack:
    """What a training framework does, as far as plans differ by it."""

    name: str
    family: Literal["rayloom", "megatron", "fsdp"]
    sums_input_gradients_once: bool = True
    """Matrices with one input sum its gradient once, not each by itself."""
    splits_activations: bool = False
    splits_gradients: bool = False
    """Each rank of a tensor group sends its part of an activation, or of its gradient (Narayanan 2021, section 4.1).

    DeepSpeed calls them ``pipe_partitioned`` and ``grad_partitioned``. The second came after Megatron-DeepSpeed's runs.
    """
    gradient_bytes: int | None = None
    """Bytes of a gradient on its way. None: as the model computes."""
    hides_model_parallel: bool = False
    """Sums of split matrices and sends run beside computation (Megatron-LM's README: ``--tp-comm-overlap``)."""
    waits_for_kernels: bool = False
    """Python waits for each kernel before it launches the next (``CUDA_LAUNCH_BLOCKING=1``)."""
    keeps_gradient_sums: bool = False
    """In bf16 the sum of micro-batches' gradients in 32 bits lies beside the 16-bit gradients, as in DeepSpeed's first
    BF16_Optimizer: 4 bytes a parameter more (bigscience, tr11-176B-ml/chronicles-prequel.md, "Rebalancing layers")."""
    cuts_by_parameters: bool = False
    kernel_factor: float = 1.0
    """Launches beside those of the model's own operations, or fewer where a compiler fuses them."""
    attention_factor: float = 1.0
    """Rate of fused attention against that of FlashAttention 2."""
    moved_factor: float = 1.0
    """Bytes of memory-bound operations that are left where a compiler fuses norms, activations and additions."""

    def gradient_size(self, precision: Precision) -> int:
        """Return the bytes of a gradient on its way. Megatron-LM and DeepSpeed's bf16 optimizer add up in 32 bits."""
        return self.gradient_bytes or self.accumulated_bytes(precision)

    def accumulated_bytes(self, precision: Precision) -> int:
        """Return the bytes in which the gradients of micro-batches are added up: 4, or in fp16 Megatron-LM's 2."""
        return PRECISION_BYTES[precision] if self.family == "megatron" and precision == "fp16" else 4


RAYLOOM = Stack(
    "rayloom", "rayloom", splits_activations=True, splits_gradients=True, cuts_by_parameters=True, kernel_factor=1.2
)


def traffic(
    profile: ModelProfile, plan: ParallelPlan, stack: Stack, stage: Stage, position: int = 0
) -> tuple[Collective, ...]:
    """Return the collectives of a rank in a step.

    Args:
        stage: the layers that the rank holds, whole.
        position: number of the stage, from 0.
    """
    return (
        *_tensor_traffic(plan, stack, stage),
        *_pipeline_traffic(profile, plan, stack, stage, position),
        *_data_traffic(profile, plan, stack, stage),
        *_tied_traffic(profile, plan, stack, stage, position),
    )


def _tensor_traffic(plan: ParallelPlan, stack: Stack, stage: Stage) -> Iterator[Collective]:
    """Yield the sums of split matrices: of outputs forward, of input gradients backward (Shoeybi 2019, section 3).

    Four all-reduces a block and micro-batch, b s h numbers each; with full recomputation the forward ones twice.
    Sequence parallelism turns each into an all-gather and a reduce-scatter, of the same bytes (Korthikanti 2022,
    section 4.2.2).
    """
    if plan.tensor == 1:
        return
    forward_passes = 2 if plan.recompute == "full" else 1
    count, size = 0.0, 0.0
    for layer in stage:
        backward = layer.column_inputs if stack.sums_input_gradients_once else layer.column_cuts
        reductions = layer.row_cuts * forward_passes + backward
        count += reductions
        size += reductions * layer.boundary_bytes * plan.micro_batch
    count, size = count * plan.accumulation, size * plan.accumulation
    if plan.sequence_parallel:
        yield Collective("all_gather", "tensor", plan.tensor, size, count)
        yield Collective("reduce_scatter", "tensor", plan.tensor, size, count)
    elif count:
        yield Collective("all_reduce", "tensor", plan.tensor, size, count)


def _pipeline_traffic(
    profile: ModelProfile, plan: ParallelPlan, stack: Stack, stage: Stage, position: int
) -> Iterator[Collective]:
    """Yield what a stage sends: activations to the next, their gradients to the one before (arXiv:2104.04473)."""
    if plan.pipeline == 1:
        return
    sends_forward = position < plan.pipeline - 1 or plan.interleave > 1
    sends_backward = position > 0 or plan.interleave > 1
    number = plan.accumulation * plan.interleave

    activations = stage[-1].boundary_bytes * plan.micro_batch * number if sends_forward else 0.0
    gradients = profile.layers[0].boundary_bytes * plan.micro_batch * number if sends_backward else 0.0
    parts = plan.tensor
    splits_both = plan.sequence_parallel
    sent = activations / (parts if stack.splits_activations or splits_both else 1)
    sent += gradients / (parts if stack.splits_gradients or splits_both else 1)
    yield Collective("send", "pipeline", plan.pipeline, sent, number * (sends_forward + sends_backward))
    if parts > 1 and not plan.sequence_parallel:  # the receivers put the parts together
        if stack.splits_activations and position > 0:
            size = profile.layers[0].boundary_bytes * plan.micro_batch * number
            yield Collective("all_gather", "tensor", parts, size, number)
        if stack.splits_gradients and position < plan.pipeline - 1:
            # DeepSpeed frees its own output once it is sent, and gathers it again for the backward pass
            times = 2 if stack.family == "rayloom" else 1
            size = stage[-1].boundary_bytes * plan.micro_batch * number * times
            yield Collective("all_gather", "tensor", parts, size, number * times)


def _data_traffic(profile: ModelProfile, plan: ParallelPlan, stack: Stack, stage: Stage) -> Iterator[Collective]:
    """Yield what data-parallel ranks reduce and gather (Rajbhandari 2020, arXiv:1910.02054, section 7)."""
    if plan.data == 1:
        return
    elements = held_parameters(stage, plan.tensor)
    gradients = elements * stack.gradient_size(profile.precision)
    parameters = elements * profile.element_bytes
    tensors = len(stage)
    if stack.family == "fsdp":
        yield from _sharded_traffic(plan, gradients, parameters, tensors)
    elif stack.family == "megatron":
        yield from _megatron_traffic(plan, stack, gradients, parameters)
    else:
        tensors = sum(len(layer.tensor_sizes) or 1 for layer in stage)
        yield from _deepspeed_traffic(profile, plan, elements, parameters, tensors)


def _sharded_traffic(plan: ParallelPlan, gradients: float, parameters: float, units: int) -> Iterator[Collective]:
    """Yield FSDP's: parameters gathered forward and again backward, gradients scattered, in each micro-batch.

    Zhao 2023, arXiv:2304.11277, section 3. ``zero_stage`` 2 keeps the parameters between the passes.
    """
    gathers = (2 if plan.zero_stage == 3 else 1) * plan.accumulation
    yield Collective("all_gather", "data", plan.data, parameters * gathers, units * gathers)
    yield Collective("reduce_scatter", "data", plan.data, gradients * plan.accumulation, units * plan.accumulation)


def _megatron_traffic(plan: ParallelPlan, stack: Stack, gradients: float, parameters: float) -> Iterator[Collective]:
    """Yield Megatron-LM's: gradients reduced once a step; its distributed optimizer scatters and gathers.

    Its documentation, docs/source/api-guide/dist_optimizer.md. ZeRO 1 of Megatron-DeepSpeed all-reduces instead.
    """
    if plan.zero_stage == 0 or stack.name == "megatron-deepspeed":
        yield Collective("all_reduce", "data", plan.data, gradients, 1)
    else:
        yield Collective("reduce_scatter", "data", plan.data, gradients, 1)
    if plan.zero_stage:
        yield Collective("all_gather", "data", plan.data, parameters, 1)


def _deepspeed_traffic(
    profile: ModelProfile, plan: ParallelPlan, elements: float, parameters: float, tensors: int
) -> Iterator[Collective]:
    """Yield DeepSpeed 0.19.8's, as Rayloom configures it.

    ZeRO 1 and 2 all-reduce gradients whatever ``reduce_scatter`` says (DeepSpeed #5758, #7059), ZeRO 1 once a step,
    ZeRO 2 and 3 in every micro-batch. Gradients travel as the model computes, also where they are added up in 32 bits.
    Counted by ``benchmarks/planning/fake_world.py``.
    """
    if plan.zero_stage == 3:
        yield from _zero_3_traffic(plan, elements, profile.element_bytes, tensors)
        return
    gradients = elements * profile.element_bytes
    reductions = plan.accumulation if plan.zero_stage == 2 else 1
    # A bucket holds a 64th of the model, and a Mi of elements at least (app/training/engine/deepspeed_engine.py).
    buckets = max(1, min(64, round(elements / 2**20)))
    yield Collective("all_reduce", "data", plan.data, gradients * reductions, buckets * reductions)
    if plan.zero_stage:
        yield Collective("all_gather", "data", plan.data, parameters, buckets)


def _zero_3_traffic(plan: ParallelPlan, elements: float, number: int, tensors: int) -> Iterator[Collective]:
    """Yield ZeRO 3's: parameters gathered forward and backward, gradients scattered (arXiv:1910.02054, section 7.2.2).

    ZeRO++ (Wang 2023, arXiv:2306.10209, section 4) gathers parameters of 8 bits, the second time from the copy that
    ``hpz`` ranks hold. It scatters gradients of 4 bits. The scales of the quantized blocks are left out.
    """
    micro_batches, gathers = plan.accumulation, tensors * plan.accumulation
    weights = elements * micro_batches * (1 if plan.quantized_weights else number)
    gradients = elements * micro_batches * (0.5 if plan.quantized_gradients else number)
    forward = Collective("all_gather", "data", plan.data, weights, gathers)
    yield forward
    yield replace(forward, group="copy", ranks=plan.hpz) if plan.hpz > 1 else forward
    yield Collective("reduce_scatter", "data", plan.data, gradients, gathers)


def _tied_traffic(
    profile: ModelProfile, plan: ParallelPlan, stack: Stack, stage: Stage, position: int
) -> Iterator[Collective]:
    """Yield the sum of a tied embedding's gradients over the first and the last stage (arXiv:1909.08053)."""
    tied = [layer for layer in stage if layer.tied]
    if plan.pipeline == 1 or not tied or position not in (0, plan.pipeline - 1):
        return
    elements = max(layer.parameters_of(plan.tensor) for layer in tied)
    yield Collective("all_reduce", "tied", 2, elements * stack.gradient_size(profile.precision), 1)


def held_parameters(stage: Stage, tensor: int) -> float:
    """Return the elements that a rank holds of a stage, before data-parallel ranks split them."""
    whole = count_parameters(stage)
    split = sum({layer.tied or number: layer.split_parameters for number, layer in enumerate(stage)}.values())
    return whole - split * (1 - 1 / tensor)
