"""What the training frameworks of published runs do, as far as plans differ by it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from app.config.plan import Precision
from app.planner.plan import ParallelPlan
from app.planner.profile import PRECISION_BYTES, LayerProfile, ModelProfile
from app.planner.stack import Collective, Stack, added_bytes
from app.planner.stages import Stage, held_parameters

_BUCKET = 5e8
"""Elements that DeepSpeed reduces at once by default (https://www.deepspeed.ai/docs/config-json)."""


@dataclass(frozen=True)
class Framework(Stack):
    """A framework that its makers measured. Its Python is in the rates that were fitted on its runs."""

    gradient_gathers: int = 1
    kernel_factor: float = 1.0
    sent_bytes: int | None = None
    """Bytes of a gradient on its way. None: as gradients are added up."""
    attention_factor: float = 1.0
    """Rate of fused attention against that of FlashAttention 2."""
    moved_factor: float = 1.0
    """Bytes of memory-bound operations that are left where a compiler fuses norms, activations and additions."""

    def compiled(self, layer: LayerProfile) -> LayerProfile:
        """Return what a compiler leaves of the memory-bound work of a layer."""
        if self.moved_factor == 1.0:
            return layer
        whole, split = (
            replace(work, moved_bytes=work.moved_bytes * self.moved_factor)
            for work in (layer.whole_work, layer.split_work)
        )
        return replace(layer, whole_work=whole, split_work=split)

    def gradient_size(self, precision: Precision) -> int:
        return self.sent_bytes or self.accumulated_bytes(precision)

    def framework_s(self, plan: ParallelPlan, stage: Stage) -> float:  # noqa: ARG002
        return 0.0


@dataclass(frozen=True)
class Megatron(Framework):
    """Megatron-LM."""

    is_deepspeed: bool = False
    """Megatron-DeepSpeed: ZeRO 1 all-reduces, in buckets. In bf16 the sum of micro-batches' gradients in 32 bits lies
    beside the 16-bit gradients, as in DeepSpeed's first BF16_Optimizer: 4 bytes a parameter more (bigscience,
    tr11-176B-ml/chronicles-prequel.md, "Rebalancing layers")."""

    def accumulated_bytes(self, precision: Precision) -> int:
        return PRECISION_BYTES[precision] if precision == "fp16" else 4

    def data_traffic(self, profile: ModelProfile, plan: ParallelPlan, stage: Stage) -> Iterator[Collective]:
        """Yield gradients reduced once a step; the distributed optimizer scatters and gathers.

        Its documentation, docs/source/api-guide/dist_optimizer.md.
        """
        elements = held_parameters(stage, plan.tensor)
        sums = plan.zero_stage == 0 or self.is_deepspeed
        gradients = elements * self.gradient_size(profile.precision)
        yield Collective("all_reduce" if sums else "reduce_scatter", "data", plan.data, gradients, 1)
        if plan.zero_stage:
            yield Collective("all_gather", "data", plan.data, elements * profile.element_bytes, 1)

    def gradient_bytes(self, profile: ModelProfile, plan: ParallelPlan) -> int:  # noqa: ARG002
        beside = profile.element_bytes if self.is_deepspeed else 0
        return beside + 4 if profile.precision == "bf16" else profile.element_bytes

    def step_bytes(self, profile: ModelProfile, plan: ParallelPlan, elements: float) -> float:
        return super().step_bytes(profile, plan, elements) if self.is_deepspeed else 0.0

    def loss_bytes(self, profile: ModelProfile, plan: ParallelPlan) -> float:  # noqa: ARG002
        """Return 0: it overwrites its softmax (``core/tensor_parallel/cross_entropy.py``)."""
        return 0.0

    def buffers(self, profile: ModelProfile, plan: ParallelPlan, stage: Stage, elements: float) -> float:
        bucket = min(elements, _BUCKET) * profile.element_bytes if self.is_deepspeed and plan.zero_stage else 0.0
        return bucket + added_bytes(profile, plan, stage)


@dataclass(frozen=True)
class Fsdp(Framework):
    """PyTorch's FSDP (Zhao 2023, arXiv:2304.11277, section 3). ``zero_stage`` 2 keeps the parameters gathered."""

    def data_traffic(self, profile: ModelProfile, plan: ParallelPlan, stage: Stage) -> Iterator[Collective]:
        """Yield parameters gathered forward and again backward, gradients scattered, in each micro-batch."""
        elements, units = held_parameters(stage, plan.tensor), len(stage)
        gathers = (2 if plan.zero_stage == 3 else 1) * plan.accumulation
        parameters = elements * profile.element_bytes * gathers
        gradients = elements * self.gradient_size(profile.precision) * plan.accumulation
        yield Collective("all_gather", "data", plan.data, parameters, units * gathers)
        yield Collective("reduce_scatter", "data", plan.data, gradients, units * plan.accumulation)

    def state_bytes(
        self,
        profile: ModelProfile,  # noqa: ARG002
        plan: ParallelPlan,
        elements: float,
        optimizer_numbers: int = 2,
    ) -> tuple[float, float, float]:
        """Return the bytes of a rank's part, which it keeps in 32 bits."""
        part = elements / plan.data
        return part * 4, part * 4, part * 4 * optimizer_numbers

    def step_bytes(self, profile: ModelProfile, plan: ParallelPlan, elements: float) -> float:  # noqa: ARG002
        return 0.0

    def loss_bytes(self, profile: ModelProfile, plan: ParallelPlan) -> float:  # noqa: ARG002
        return profile.output_bytes * 2 * 4 / profile.element_bytes

    def buffers(self, profile: ModelProfile, plan: ParallelPlan, stage: Stage, elements: float) -> float:  # noqa: ARG002
        """Return the bytes of two gathered layers, and of the gradients of one."""
        largest = max(layer.parameters_of(plan.tensor) for layer in stage)
        return largest * (2 * profile.element_bytes + self.gradient_size(profile.precision))


STACKS: dict[str, Framework] = {
    "megatron": Megatron(),
    # Sending a part of the gradient came after its runs (Narayanan 2021, section 4.1).
    "megatron-deepspeed": Megatron(splits_gradients=False, is_deepspeed=True),
    # With ``--tp-comm-overlap``, and cuDNN's attention on H100 (arXiv:2407.08608, figure 5: heads of 128, 4k).
    "megatron-core": Megatron(hides_model_parallel=True, attention_factor=609 / 368),
    "fsdp": Fsdp(sent_bytes=2),
    "fsdp-eager": Fsdp(sent_bytes=4),
    "fsdp-compile": Fsdp(sent_bytes=4, kernel_factor=0.5, moved_factor=0.5),
}
