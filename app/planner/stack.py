"""What a training framework does, as far as plans differ by it: DeepSpeed 0.19.8, as Rayloom runs it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from app.config.plan import Precision
from app.planner.plan import ParallelPlan
from app.planner.profile import ModelProfile
from app.planner.stages import Stage, held_parameters

CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather", "send"]
Group = Literal["tensor", "data", "pipeline", "tied", "copy"]
"""tied: the first and the last stage, which share an embedding. copy: the ranks of ZeRO++'s second copy."""
_HOOK_S = {0: 30e-6, 1: 20e-6, 2: 40e-6, 3: 40e-6}
"""Seconds of DeepSpeed's Python for a parameter and micro-batch, by ZeRO stage.

Measured on an EPYC processor by ``python -m benchmarks.planning.hooks``, as the next two.
"""
_GATHER_S = 1.1e-3
"""The same for a parameter that ZeRO 3 gathers, forward and backward."""
_PIPELINE_S = 1.3e-3
"""The same for a stage's instructions of a micro-batch."""
_KEPT = 10**5
"""Elements of parameters that ZeRO 3 never splits (``stage3_param_persistence_threshold``)."""
_TENSORS = 8
"""Parameters of a layer, where they are not known."""
_TORCH_BUCKET = 25 * 2**20
"""Bytes of gradients that torch's ``DistributedDataParallel`` reduces at once."""
_POWERSGD_CALLS = 3
"""All-reduces of a bucket: both factors, and the tensors that stay whole."""


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
    """DeepSpeed. ``benchmarks.planning.stacks`` has the frameworks of published runs, which override what they do."""

    splits_gradients: bool = True
    """Each rank of a tensor group sends its part of an activation's gradient (``grad_partitioned``)."""
    gradient_gathers: int = 2
    """Times that a stage gathers its own output: DeepSpeed frees it once it is sent, and needs it backward."""
    hides_model_parallel: bool = False
    """Sums of split matrices and sends run beside computation."""
    waits_for_kernels: bool = False
    """Python waits for each kernel before it launches the next (``CUDA_LAUNCH_BLOCKING=1``)."""
    kernel_factor: float = 1.2
    """Launches beside those of the model's own operations, or fewer where a compiler fuses them."""

    def gradient_size(self, precision: Precision) -> int:
        """Return the bytes of a gradient on its way between stages that share an embedding."""
        return self.accumulated_bytes(precision)

    def accumulated_bytes(self, precision: Precision) -> int:  # noqa: ARG002
        """Return the bytes in which the gradients of micro-batches are added up."""
        return 4

    def data_traffic(self, profile: ModelProfile, plan: ParallelPlan, stage: Stage) -> Iterator[Collective]:
        """Yield what data-parallel ranks reduce and gather (Rajbhandari 2020, arXiv:1910.02054, section 7).

        ZeRO 1 and 2 all-reduce gradients whatever ``reduce_scatter`` says (DeepSpeed #5758, #7059), ZeRO 1 once a step,
        ZeRO 2 and 3 in every micro-batch. Gradients travel as the model computes, also where they are added up in 32
        bits, unless ``communication_data_type`` says otherwise. Counted by ``benchmarks/planning/fake_world.py``.
        """
        elements, number = held_parameters(stage, plan.tensor), profile.element_bytes
        if plan.zero_stage == 3:
            yield from _zero_3_traffic(plan, elements, number, sum(len(layer.tensor_sizes) or 1 for layer in stage))
            return
        if plan.low_rank:
            yield _low_rank_traffic(plan, stage, plan.low_rank)
            return
        reductions = plan.accumulation if plan.zero_stage == 2 else 1
        # A bucket holds a 64th of the model, and a Mi of elements at least (app/training/engine/deepspeed_engine.py).
        buckets = max(1, min(64, round(elements / 2**20)))
        size = elements * (plan.gradient_bytes or number) * reductions
        yield Collective("all_reduce", "data", plan.data, size, buckets * reductions)
        if plan.zero_stage:
            yield Collective("all_gather", "data", plan.data, elements * number, buckets)

    def state_bytes(
        self, profile: ModelProfile, plan: ParallelPlan, elements: float, optimizer_numbers: int = 2
    ) -> tuple[float, float, float]:
        """Return the bytes of parameters, of gradients and of the optimizer with its 32-bit parameters.

        ZeRO (Rajbhandari 2020, arXiv:1910.02054, section 3.1): mixed precision takes 2 + 2 + 12 bytes a parameter with
        Adam, of which stage 1 splits the 12, stage 2 also the gradients' 2, stage 3 all. DeepSpeed copies the
        parameters that an optimizer splits also where they have 32 bits already.
        """
        number, data = profile.element_bytes, plan.data
        is_mixed = number < 4
        parameters, gradients = elements * number, elements * self.gradient_bytes(profile, plan)
        optimizer = elements * 4 * (optimizer_numbers + (is_mixed or plan.zero_stage > 0))
        copy = parameters / plan.hpz if plan.hpz > 1 else 0.0  # ZeRO++ (arXiv:2306.10209, section 4.2)
        return (
            parameters / (data if plan.zero_stage == 3 else 1) + copy,
            gradients / (data if plan.zero_stage >= 2 else 1),
            optimizer / (data if plan.zero_stage >= 1 else 1),
        )

    def gradient_bytes(self, profile: ModelProfile, plan: ParallelPlan) -> int:
        """Return the bytes in which a gradient is kept: 4 where micro-batches are added up in 32 bits."""
        adds_up = plan.accumulation > 1 or plan.pipeline > 1 or plan.zero_stage == 0
        return 4 if adds_up else profile.element_bytes

    def step_bytes(self, profile: ModelProfile, plan: ParallelPlan, elements: float) -> float:
        """Return the bytes of gradients during the optimizer step, when activations and other ranks' parts are freed.

        DeepSpeed's ZeRO 1 and 2 flatten the rank's part, copy it to 32 bits if it has 16, and free the original last
        (``deepspeed/runtime/zero/stage_1_and_2.py``, ``step``). 16-bit gradients that are summed in 32 bits are flat
        already. torch's profiler counts the same allocations on a CPU.
        """
        kept = self.gradient_bytes(profile, plan)
        if plan.zero_stage not in (1, 2) or kept != profile.element_bytes:
            return 0.0
        return elements / plan.data * (2 * kept + (4 if kept < 4 else 0))

    def loss_bytes(self, profile: ModelProfile, plan: ParallelPlan) -> float:
        """Return the bytes of one sample's logits that are alive while the loss goes back, beside autograd's.

        torch's cross-entropy makes the gradient of the log-probabilities, and from it that of the logits, both in 32
        bits. The pipeline, which runs Rayloom's tensor plans too, keeps the logits of its last two micro-batches
        (``num_pipe_buffers``).
        """
        kept = min(2, plan.accumulation) if plan.tensor * plan.pipeline > 1 else 0
        return profile.output_bytes * (2 * 4 / profile.element_bytes + kept)

    def buffers(self, profile: ModelProfile, plan: ParallelPlan, stage: Stage, elements: float) -> float:
        """Return the bytes of buckets and of gathered parameters."""
        number = profile.element_bytes
        bucket = elements / 64 * number  # app/training/engine/deepspeed_engine.py
        largest = max(layer.parameters_of(plan.tensor) for layer in stage)
        return 3 * bucket + (2 * largest * number if plan.zero_stage == 3 else 0.0) + added_bytes(profile, plan, stage)

    def framework_s(self, plan: ParallelPlan, stage: Stage) -> float:
        """Return the seconds that the framework's own Python takes for a micro-batch."""
        sizes = [size for layer in stage for size in layer.tensor_sizes or (layer.parameters // _TENSORS,) * _TENSORS]
        gathered = sum(size > _KEPT for size in sizes) if plan.zero_stage == 3 else 0
        instructions_s = _PIPELINE_S if plan.pipeline > 1 else 0.0
        return len(sizes) * _HOOK_S[plan.zero_stage] + gathered * _GATHER_S + instructions_s


RAYLOOM = Stack()


def added_bytes(profile: ModelProfile, plan: ParallelPlan, stage: Stage) -> float:
    """Return the bytes of a gradient that is about to be added to those of earlier micro-batches."""
    largest = max(layer.largest_parameter(plan.tensor) for layer in stage)
    return largest * profile.element_bytes if plan.accumulation > 1 else 0.0


def _low_rank_traffic(plan: ParallelPlan, stage: Stage, rank: int) -> Collective:
    """Return PowerSGD's all-reduces, in 32 bits (Vogels 2019, arXiv:1905.13727).

    For an n x m matrix it reduces (n + m) x rank elements if they are less than half of the matrix, as in torch. Layers
    without known shapes count whole, and a tied parameter counts once.
    """
    layers = {layer.tied or number: layer for number, layer in enumerate(stage)}
    shapes = [shape for layer in layers.values() for shape in layer.tensor_shapes or ((layer.parameters,),)]
    elements = sum(_low_rank_elements(shape, rank) for shape in shapes)
    buckets = max(1, round(4 * sum(map(prod, shapes)) / _TORCH_BUCKET))
    return Collective("all_reduce", "data", plan.data, elements * 4, buckets * _POWERSGD_CALLS)


def _low_rank_elements(shape: tuple[int, ...], rank: int) -> int:
    whole = prod(shape)
    low = (shape[0] + whole // shape[0]) * rank if len(shape) > 1 else whole
    return low if 2 * low < whole else whole


def _zero_3_traffic(plan: ParallelPlan, elements: float, number: int, tensors: int) -> Iterator[Collective]:
    """Yield ZeRO 3's: parameters gathered forward and backward, gradients scattered (arXiv:1910.02054, section 7.2.2).

    ZeRO++ (Wang 2023, arXiv:2306.10209, section 4) gathers parameters of 8 bits, the second time from the copy that
    ``hpz`` ranks hold. It scatters gradients of 4 bits. The scales of the quantized blocks are left out.
    """
    micro_batches, gathers = plan.accumulation, tensors * plan.accumulation
    weights = elements * micro_batches * (1 if plan.quantized_weights else number)
    gradients = elements * micro_batches * (0.5 if plan.quantized_gradients else plan.gradient_bytes or number)
    forward = Collective("all_gather", "data", plan.data, weights, gathers)
    yield forward
    yield replace(forward, group="copy", ranks=plan.hpz) if plan.hpz > 1 else forward
    yield Collective("reduce_scatter", "data", plan.data, gradients, gathers)
