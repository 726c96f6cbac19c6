"""From the recipe to DeepSpeed's configuration."""

import math
from typing import Any

from app.config import Layout, PlanConfig, TrainConfig
from app.errors import RecipeError
from app.models.traits import ModelKind

_BUFFERS, _MIN_BUFFER, _MAX_BUFFER = 64, 2**20, 5 * 10**8
"""A buffer holds a 64th of the model; minimum and maximum number of its elements."""
MIN_LOSS_SCALE = 1
"""fp16: a gradient that overflows without a factor is not finite."""

_OWNED = {
    "train.deepspeed.optimizer": "train.optimizer",
    "train.deepspeed.scheduler": "train.schedule",
    "train.deepspeed.bfloat16": "train.precision",
    "train.deepspeed.torch_autocast": "train.precision",
    "train.deepspeed.elasticity": "train.workers",
    "train.deepspeed.zero_optimization.offload_optimizer": "train.plan.offload",
    "train.deepspeed.zero_optimization.offload_param": "train.plan.offload_param",
    "train.deepspeed.zero_optimization.cpu_offload": "train.plan.offload",
    "train.deepspeed.zero_optimization.cpu_offload_param": "train.plan.offload_param",
}
"""What DeepSpeed would ignore or do behind the recipe's back, and the recipe's key for it."""


def deepspeed_config(config: TrainConfig, layout: Layout, kind: ModelKind) -> dict[str, Any]:
    """DeepSpeed's configuration for one layout, with every default that moved lately written out.

    The matrices of a staged model are split by us, those of any other by DeepSpeed itself.
    Source of the keys: https://www.deepspeed.ai/docs/config-json

    Raises:
        RecipeError: ``train.deepspeed`` sets a key that follows from the recipe to something else, or one that the
            recipe has a key for.
    """
    autotp_size = layout.tensor if layout.tensor > 1 and kind is not ModelKind.STAGED else 0
    ours: dict[str, Any] = {
        # The product that DeepSpeed checks. It exceeds the global batch if micro-batches are uneven.
        "train_batch_size": layout.micro_batch * layout.gradient_accumulation * layout.data,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.gradient_accumulation,
        "gradient_clipping": _clipping(config),
        "prescale_gradients": False,
        "communication_data_type": config.plan.communication_data_type,
        "zero_optimization": _zero(config.plan, config.device == "gpu"),
        "zero_allow_untested_optimizer": True,  # SGD: DeepSpeed lists only the Adam family as tested
        "bf16": {
            "enabled": config.precision == "bf16",
            "check_grad_overflow": True,
            "immediate_grad_update": True,  # frees the bf16 gradients that stage 1 has added to its float32 sums
        },
        "fp16": {
            "enabled": config.precision == "fp16",
            "loss_scale": 0,  # dynamic
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": MIN_LOSS_SCALE,
        },
        "data_types": {"grad_accum_dtype": _accumulation_dtype(config, layout)},
        "pipeline": {
            "activation_checkpoint_interval": int(config.plan.activation_checkpointing and layout.pipeline > 1),
            "use_reentrant": False,
        },
        "tensor_parallel": {"autotp_size": autotp_size},
        "wall_clock_breakdown": False,
        "steps_per_print": 2**31,  # progress is ours to print
    }
    merged = _merge(ours, config.deepspeed, "train.deepspeed")
    if autotp_size:
        del merged["train_batch_size"]  # it would be checked before the workers are known to split matrices
    return merged


def with_bounded_buffers(deepspeed: dict[str, Any], num_parameters: int) -> dict[str, Any]:
    """Return ``deepspeed`` with buffer sizes proportional to the model, unless the recipe sets them.

    DeepSpeed's defaults are 5e8 to 1e9 elements, more than a small model has.
    """
    size = max(num_parameters // _BUFFERS, _MIN_BUFFER)
    sizes = {"reduce_bucket_size": size, "allgather_bucket_size": size}
    if deepspeed["zero_optimization"]["stage"] == 3:
        sizes |= {"stage3_prefetch_bucket_size": size, "stage3_max_live_parameters": size}
        sizes |= {"stage3_max_reuse_distance": size}
        if "offload_optimizer" not in deepspeed["zero_optimization"]:  # with offload whole groups pass through memory
            sizes["sub_group_size"] = size
    bounded = {name: min(number, _MAX_BUFFER) for name, number in sizes.items()}
    return deepspeed | {"zero_optimization": bounded | deepspeed["zero_optimization"]}


def _zero(plan: PlanConfig, on_gpu: bool) -> dict[str, Any]:
    plus = plan.zero_plus_plus
    zero: dict[str, Any] = {
        "stage": plan.zero_stage,
        "overlap_comm": plan.overlap_comm and plan.pipeline == 1,  # a pipeline reduces by its own schedule
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "round_robin_gradients": False,
        "compute_grad_norm": True,  # by which a gradient that is not finite is seen
        "zero_hpz_partition_size": plus.hpz_partition_size,
        "zero_quantized_weights": plus.quantized_weights,
        "zero_quantized_gradients": plus.quantized_gradients,
    }
    for key, device in (("offload_optimizer", plan.offload), ("offload_param", plan.offload_param)):
        if device != "none":
            zero[key] = {"device": device, "pin_memory": on_gpu}
        if device == "nvme":
            zero[key]["nvme_path"] = plan.nvme_path
    return zero


def _clipping(config: TrainConfig) -> float:
    """Without ZeRO, in float32, the norm is taken only where gradients are clipped: then by infinity."""
    plain = config.plan.zero_stage == 0 and config.precision == "fp32"
    return config.gradient_clipping or (math.inf if plain else 0.0)


def _accumulation_dtype(config: TrainConfig, layout: Layout) -> str | None:
    """Return fp32 where ZeRO accumulates gradients of a lower precision; None means the model's own dtype.

    DeepSpeed rejects fp32 without ZeRO; there ``DataParallelEngine`` accumulates in float32.
    """
    adds_up = layout.gradient_accumulation > 1 or layout.pipeline > 1
    return "fp32" if config.precision != "fp32" and config.plan.zero_stage and adds_up else None


def _merge(ours: dict[str, Any], given: dict[str, Any], path: str) -> dict[str, Any]:
    """Both trees; a leaf that both set must agree."""
    merged = dict(ours)
    for key, value in given.items():
        if isinstance(value, dict) and isinstance(ours.get(key), dict):
            merged[key] = _merge(ours[key], value, f"{path}.{key}")
        elif key in ours and ours[key] != value:
            raise RecipeError(
                f"{path}.{key} is {value!r}, and the recipe's own keys make it {ours[key]!r}: "
                "remove it here, and set what it follows from"
            )
        elif key not in ours and (own := _OWNED.get(f"{path}.{key}")):
            raise RecipeError(f"{path}.{key} is for the recipe to say: remove it here, and set {own}")
        else:
            merged[key] = value
    return merged
