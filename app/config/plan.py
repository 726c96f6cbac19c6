"""The parallel plan: how training is distributed over the workers."""

from typing import Annotated, Literal

import yaml
from pydantic import BeforeValidator, Field, PositiveInt, SerializerFunctionWrapHandler, WrapSerializer

from app.config.section import Section
from app.config.yaml_text import parse_yaml
from app.errors import RecipeError

Precision = Literal["fp32", "bf16", "fp16"]
Device = Literal["cpu", "gpu"]


class ZeroPlusPlusConfig(Section):
    """ZeRO++ (Wang et al. 2023, arXiv:2306.10209): less traffic between nodes for ZeRO 3. GPUs only."""

    hpz_partition_size: PositiveInt = Field(
        default=1, description="hpZ: ranks, usually of a node, that hold a second copy of the parameters; 1 is off"
    )
    quantized_weights: bool = Field(default=False, description="qwZ: gather parameters as int8")
    quantized_gradients: bool = Field(default=False, description="qgZ: reduce gradients as int4")


class PowerSgdConfig(Section):
    """PowerSGD (Vogels et al. 2019, arXiv:1905.13727): reduce gradients in low rank. For ZeRO 0 in fp32."""

    rank: PositiveInt = Field(default=4, description="rank of the approximation")


class PlanConfig(Section):
    """How training is distributed over the workers. Each degree counts workers. 1 is off.

    The data-parallel degree follows: workers / (tensor x pipeline).
    """

    tensor: PositiveInt = Field(
        default=1, description="tensor parallelism: workers that each large matrix is split across"
    )
    pipeline: PositiveInt = Field(default=1, description="stages into which the model's layers are split")
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=1, description="what data-parallel ranks split: 1 optimizer, 2 also gradients, 3 also parameters"
    )
    offload: Literal["none", "cpu", "nvme"] = Field(
        default="none", description="where the optimizer's state is kept; its step then runs on the CPU"
    )
    offload_param: Literal["none", "cpu", "nvme"] = Field(
        default="none", description="where the parameters are kept that ZeRO 3 has split"
    )
    nvme_path: str | None = Field(
        default=None, description="folder on a fast local disk, for what is offloaded to nvme"
    )
    micro_batch: PositiveInt | None = Field(
        default=None,
        description="samples that a worker computes at once, or tokens (approximately) with tokens_per_batch; default: "
        "its whole share, at most 64 samples or 16384 tokens",
    )
    activation_checkpointing: bool = Field(
        default=False, description="recompute activations in the backward pass instead of keeping them"
    )
    communication_data_type: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="type in which gradients are reduced; default: their own"
    )
    powersgd: PowerSgdConfig | None = Field(
        default=None, description="reduce gradients in low rank; for ZeRO 0 in fp32; default: reduce them in full"
    )
    overlap_comm: bool = Field(default=True, description="reduce gradients while the backward pass runs")
    zero_plus_plus: ZeroPlusPlusConfig = ZeroPlusPlusConfig()

    @property
    def model_parallel(self) -> int:
        """Workers that hold one copy of the model."""
        return self.tensor * self.pipeline

    @property
    def uses_nvme(self) -> bool:
        """Whether anything is kept in ``nvme_path``."""
        return "nvme" in (self.offload, self.offload_param)

    @property
    def takes_partial_steps(self) -> bool:
        """Whether a step may leave out parts of the model.

        With ZeRO 3 or offload, DeepSpeed would reapply their gradients of an earlier step. With PowerSGD, torch would
        wait for them.
        """
        return self.zero_stage < 3 and self.offload == "none" and self.powersgd is None


class AutoPlan(PlanConfig):
    """``auto``, before the model is known. Until then it counts as ZeRO 1.

    Then ``app.training.planning.auto`` chooses a plan.
    """


def _read_plan(given: object) -> object:
    if given == "auto":
        return AutoPlan()
    if not isinstance(given, str):
        return given
    try:
        keys = parse_yaml(given) if given.startswith("{") else None  # as ``tune.plans`` draws it
    except yaml.YAMLError:
        keys = None
    if not isinstance(keys, dict):
        raise RecipeError(f"expected auto, or keys such as zero_stage, got {given!r}").of("plan.unreadable")
    return keys


def _write_plan(plan: PlanConfig, write: SerializerFunctionWrapHandler) -> object:
    return "auto" if isinstance(plan, AutoPlan) else write(plan)


Plan = Annotated[
    PlanConfig,
    BeforeValidator(_read_plan, json_schema_input_type=Literal["auto"] | PlanConfig),
    WrapSerializer(_write_plan),
]
"""A plan, or ``auto``."""
