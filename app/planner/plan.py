"""A parallel plan as the planner computes with it: the recipe's plan laid over workers, or another framework's."""

from dataclasses import dataclass
from typing import Literal

from app.config.layout import Layout
from app.config.plan import PlanConfig
from app.planner.profile import PRECISION_BYTES

Recompute = Literal["none", "selective", "selective_op", "full"]
"""Activations computed again in the backward pass.

selective: attention's scores (Korthikanti 2022, arXiv:2205.05198, section 5). selective_op: every other matrix product
and all that memory bounds, as torchtitan does. full: whole layers.
"""


@dataclass(frozen=True)
class ParallelPlan:
    """How one step of training is laid over workers. Each degree counts workers; 1 is off."""

    tensor: int
    pipeline: int
    data: int
    micro_batch: int
    """Samples of a micro-batch."""
    accumulation: int
    """Micro-batches of a data-parallel rank in a step."""
    zero_stage: int = 1
    offload: Literal["none", "cpu", "nvme"] = "none"
    offload_param: Literal["none", "cpu", "nvme"] = "none"
    hpz: int = 1
    """Ranks that hold a second copy of ZeRO 3's parameters, to gather it from for the backward pass (ZeRO++)."""
    quantized_weights: bool = False
    """Parameters are gathered in 8 bits (ZeRO++)."""
    quantized_gradients: bool = False
    """Gradients are scattered in 4 bits (ZeRO++)."""
    gradient_bytes: int | None = None
    """Bytes in which an element of a gradient travels; None: those of the model's precision."""
    low_rank: int | None = None
    """Rank of PowerSGD's approximation of gradients; None: they are reduced in full."""
    recompute: Recompute = "none"
    overlap: bool = True
    """Gradients are reduced, and parameters gathered, while others are computed."""
    interleave: int = 1
    """Parts of the model that each pipeline stage holds (Narayanan 2021, arXiv:2104.04473). 1: one after the other."""
    sequence_parallel: bool = False
    """Norms and dropout are split over the tensor group by tokens (Korthikanti 2022)."""

    @property
    def workers(self) -> int:
        """All processes."""
        return self.tensor * self.pipeline * self.data

    @property
    def share(self) -> int:
        """Samples of a data-parallel rank in a step."""
        return self.micro_batch * self.accumulation

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.share * self.data


def parallel_plan(config: PlanConfig, layout: Layout) -> ParallelPlan:
    """Return the recipe's plan laid over workers."""
    return ParallelPlan(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        data=layout.data,
        micro_batch=layout.micro_batch,
        accumulation=layout.gradient_accumulation,
        zero_stage=config.zero_stage,
        offload=config.offload,
        offload_param=config.offload_param,
        hpz=config.zero_plus_plus.hpz_partition_size,
        quantized_weights=config.zero_plus_plus.quantized_weights,
        quantized_gradients=config.zero_plus_plus.quantized_gradients,
        gradient_bytes=PRECISION_BYTES[config.communication_data_type] if config.communication_data_type else None,
        low_rank=config.powersgd.rank if config.powersgd else None,
        recompute="full" if config.activation_checkpointing else "none",
        overlap=config.overlap_comm and layout.pipeline == 1,
    )
