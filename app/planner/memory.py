"""Bytes of memory that a rank needs at most."""

from dataclasses import dataclass

from app.planner.plan import ParallelPlan
from app.planner.profile import ModelProfile
from app.planner.stages import Stage
from app.planner.traffic import Stack, held_parameters

_GIB = 2**30
CONTEXT_BYTES = 1.5 * _GIB
"""CUDA's context, its libraries' workspaces and NCCL's buffers, which no tensor shows."""
FRAGMENTATION = 0.06
"""Share of the activations that the allocator holds beside them."""
OPTIMIZER_NUMBERS = {"adamw": 2, "sgd": 1}
"""Numbers of 4 bytes that an optimizer keeps for each parameter. SGD without momentum keeps none."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank, by what holds them."""

    parameters: float
    gradients: float
    optimizer: float
    """The optimizer's numbers and the 32-bit copy of the parameters."""
    activations: float
    buffers: float
    """Buckets of collectives, gathered parameters, and what passes through memory with offload."""
    context: float
    host: float = 0.0
    """Bytes in the node's memory that offload takes for this rank; not part of ``total``."""

    @property
    def states(self) -> float:
        """Parameters, gradients and the optimizer's numbers."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Peak bytes on the device."""
        return self.states + self.activations + self.buffers + self.context


def memory(
    profile: ModelProfile,
    plan: ParallelPlan,
    stack: Stack,
    stages: tuple[Stage, ...],
    position: int = 0,
    optimizer_numbers: int = 2,
    context: float = CONTEXT_BYTES,
) -> MemoryEstimate:
    """Return the memory of a rank of stage ``position``."""
    stage = stages[position]
    elements = held_parameters(stage, plan.tensor)
    parameters, gradients, optimizer = state_bytes(profile, plan, stack, elements, optimizer_numbers)
    activations = _activations(profile, plan, stack, stage, position) * (1 + FRAGMENTATION)
    host = 0.0
    if plan.offload != "none":
        host, optimizer = optimizer, 0.0
    if plan.offload_param != "none":
        host, parameters = host + parameters, 0.0
    return MemoryEstimate(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        buffers=_buffers(profile, plan, stack, stage, elements),
        context=context,
        host=host if plan.offload == "cpu" or plan.offload_param == "cpu" else 0.0,
    )


def state_bytes(
    profile: ModelProfile, plan: ParallelPlan, stack: Stack, elements: float, optimizer_numbers: int = 2
) -> tuple[float, float, float]:
    """Return the bytes of parameters, of gradients and of the optimizer with its 32-bit parameters.

    ZeRO (Rajbhandari 2020, arXiv:1910.02054, section 3.1): mixed precision takes 2 + 2 + 12 bytes a parameter with
    Adam, of which stage 1 splits the 12, stage 2 also the gradients' 2, stage 3 all. DeepSpeed copies the parameters
    that an optimizer splits also where they have 32 bits already.
    """
    number, data = profile.element_bytes, plan.data
    is_mixed = number < 4
    if stack.family == "fsdp":  # FSDP keeps all of a rank's part in 32 bits
        part = elements / data
        return part * 4, part * 4, part * 4 * optimizer_numbers
    parameters, gradients = elements * number, elements * _gradient_bytes(profile, plan, stack)
    optimizer = elements * 4 * (optimizer_numbers + (is_mixed or plan.zero_stage > 0))
    return (
        parameters / (data if plan.zero_stage == 3 else 1),
        gradients / (data if plan.zero_stage >= 2 else 1),
        optimizer / (data if plan.zero_stage >= 1 else 1),
    )


def _gradient_bytes(profile: ModelProfile, plan: ParallelPlan, stack: Stack) -> int:
    """Return the bytes in which a gradient is kept: 4 where micro-batches are added up in 32 bits."""
    if stack.family == "megatron":
        return 4 if profile.precision == "bf16" else profile.element_bytes
    adds_up = plan.accumulation > 1 or plan.pipeline > 1 or plan.zero_stage == 0
    return 4 if adds_up else profile.element_bytes


def _activations(profile: ModelProfile, plan: ParallelPlan, stack: Stack, stage: Stage, position: int) -> float:
    """Return the bytes of activations at the peak.

    Korthikanti 2022, arXiv:2205.05198, sections 4 and 5. Under 1F1B stage ``i`` of ``p`` keeps those of ``p - i``
    micro-batches (Narayanan 2021, arXiv:2104.04473, section 2.2), interleaved 1 + (p - 1) / (p v) times those of ``p``.
    Full recomputation keeps what enters a layer, and has one layer whole while it goes back.
    """
    in_flight = min(plan.accumulation, plan.pipeline - position)
    if plan.interleave > 1:
        in_flight = int(plan.pipeline * (1 + (plan.pipeline - 1) / (plan.pipeline * plan.interleave)) - position)
    kept = largest = last = 0.0
    for layer in stage:
        saved = _saved_bytes(layer.saved.whole, layer.saved.split, layer.saved.attention, plan)
        if plan.recompute == "full" and layer.boundary_bytes:
            shared = plan.tensor if plan.sequence_parallel else 1
            kept += layer.boundary_bytes / shared
            largest = max(largest, saved)
        elif layer.boundary_bytes:
            kept += saved
        else:
            last = saved  # logits live while their own backward pass runs, once
    working = largest + last
    if stack.family == "fsdp" and plan.recompute == "none":
        working = last
    return plan.micro_batch * (kept * in_flight + working) + plan.micro_batch * profile.sample_bytes


def _saved_bytes(whole: float, split: float, attention: float, plan: ParallelPlan) -> float:
    whole = whole / plan.tensor if plan.sequence_parallel else whole
    split = split / plan.tensor
    if plan.recompute == "selective_op":
        return 0.6 * (whole + split)
    return whole + split + (attention / plan.tensor if plan.recompute != "selective" else 0.0)


def _buffers(profile: ModelProfile, plan: ParallelPlan, stack: Stack, stage: Stage, elements: float) -> float:
    """Return the bytes of buckets and of gathered parameters."""
    number = profile.element_bytes
    if stack.family == "fsdp":  # two layers gathered, and the gradients of one
        largest = max(layer.parameters_of(plan.tensor) for layer in stage)
        return largest * (2 * number + stack.gradient_size(profile.precision))
    if stack.family == "megatron":
        return 4 * elements / 16 if plan.zero_stage else 0.0
    bucket = elements / 64 * number  # app/training/engine/deepspeed_engine.py
    gathered = 2 * max(layer.parameters_of(plan.tensor) for layer in stage) * number if plan.zero_stage == 3 else 0.0
    return 3 * bucket + gathered
