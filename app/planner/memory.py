"""Bytes of memory that a rank needs at most."""

import math
from dataclasses import dataclass

from app.planner.plan import ParallelPlan
from app.planner.profile import ModelProfile, SavedActivations
from app.planner.stack import Stack
from app.planner.stages import Stage, held_parameters

OPTIMIZER_NUMBERS = {"adamw": 2, "sgd": 1}
"""Numbers of 4 bytes that an optimizer keeps for each parameter. SGD without momentum keeps none."""


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of a rank that no tensor of the model accounts for."""

    context: float = 1573 * 2**20
    """CUDA's context and kernels, as measured on an A100 (bigscience, tr11-176B-ml/chronicles-prequel.md)."""
    group: float = 1.56e9
    """NCCL's channels and buffers of a process group. Fitted (``benchmarks/planning/fit.py``)."""
    compiler: float = 0.0
    """Code of torch's compiler, which checkpointing and DeepSpeed's pipeline import. It is in no GPU's memory."""
    fragmentation: float = 0.05
    """Share of the activations that the allocator holds beside them. Fitted as well."""


GPU_PROCESS = ProcessMemory()


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank, by what holds them."""

    parameters: float
    gradients: float
    optimizer: float
    """The optimizer's numbers and the 32-bit copy of the parameters."""
    activations: float
    buffers: float
    """Buckets of collectives, gathered parameters, copies of gradients, and what passes through memory with offload."""
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
    process: ProcessMemory = GPU_PROCESS,
) -> MemoryEstimate:
    """Return the memory of a rank of stage ``position``."""
    stage = stages[position]
    elements = held_parameters(stage, plan.tensor)
    padded = elements * _padding(plan, stage)
    parameters, gradients, optimizer = stack.state_bytes(profile, plan, padded, optimizer_numbers)
    if plan.zero_stage == 2 and profile.precision == "fp32":
        # DeepSpeed keeps the whole gradient of each parameter of which the rank holds a part.
        gradients = max(gradients, 4 * max(layer.largest_parameter(plan.tensor) for layer in stage))
    activations = _activations(profile, plan, stack, stage, position) * (1 + process.fragmentation)
    host = 0.0
    if plan.offload != "none":
        host, optimizer = optimizer if plan.offload == "cpu" else 0.0, 0.0
    # Gradients leave as they are made (arXiv:2101.06840, section 4).
    if plan.offload != "none" and plan.zero_stage >= 2:
        host, gradients = host + gradients, 0.0
    if plan.offload_param != "none":
        host += parameters if plan.offload_param == "cpu" else _parts_in_use(profile, plan, stage)
        parameters = 0.0
    stepping = 0.0 if plan.offload != "none" else stack.step_bytes(profile, plan, padded)
    return MemoryEstimate(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        buffers=stack.buffers(profile, plan, stage, elements) + max(0.0, stepping - gradients - activations),
        context=_process_bytes(process, plan),
        host=host,
    )


def _parts_in_use(profile: ModelProfile, plan: ParallelPlan, stage: Stage) -> float:
    """Return the bytes of parameters from NVMe that are in memory at once: the rank's part of two layers.

    ``Stack.buffers`` assumes the same number of gathered layers. Parts of less than 1 MiB, such as biases and norms,
    always stay in memory and are not counted.
    """
    largest = max(layer.parameters_of(plan.tensor) for layer in stage)
    return 2 * largest * profile.element_bytes / plan.data


def _padding(plan: ParallelPlan, stage: Stage) -> float:
    """Return how much larger DeepSpeed's ZeRO 3 makes a model: it pads each parameter to a multiple of the ranks."""
    layers = {layer.tied or number: layer.tensor_sizes for number, layer in enumerate(stage)}
    sizes = [size for tensors in layers.values() for size in tensors]
    if plan.zero_stage != 3 or not sizes:
        return 1.0
    return sum(math.ceil(size / plan.data) for size in sizes) * plan.data / sum(sizes)


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
        saved = _saved_bytes(layer.saved, plan)
        if plan.recompute in ("full", "selective_op") and layer.boundary_bytes:
            shared = plan.tensor if plan.sequence_parallel else 1
            kept += layer.boundary_bytes / shared + (layer.saved.selected if plan.recompute == "selective_op" else 0.0)
            largest = max(largest, saved)
        elif layer.boundary_bytes:
            kept += saved
        else:
            last = saved + stack.loss_bytes(profile, plan)
    # The loss goes back before any block, so only the larger of both is there at once.
    working = max(largest, last)
    return plan.micro_batch * (kept * in_flight + working + profile.sample_bytes)


def _saved_bytes(saved: SavedActivations, plan: ParallelPlan) -> float:
    """Return what autograd keeps of a layer and one sample on a rank of a tensor group."""
    whole = saved.whole / plan.tensor if plan.sequence_parallel else saved.whole
    attention = 0.0 if plan.recompute == "selective" else saved.attention
    return whole + (saved.split + attention) / plan.tensor


def _process_bytes(process: ProcessMemory, plan: ParallelPlan) -> float:
    """Return the bytes of a rank beside its tensors. It is in a group along each degree, and in that of all ranks."""
    degrees = sum(degree > 1 for degree in (plan.tensor, plan.data, plan.pipeline, plan.hpz))
    # With a single degree, its group is that of all ranks.
    groups = degrees + (degrees > 1)
    code = process.compiler if plan.recompute == "full" or plan.tensor * plan.pipeline > 1 else 0.0
    return process.context + groups * process.group + code
