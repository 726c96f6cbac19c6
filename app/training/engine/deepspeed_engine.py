"""DeepSpeed's engine around a model, its configuration from the recipe, and the result of one of its steps."""

import io
import math
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from app.config import Layout, PlanConfig, TrainConfig
from app.errors import RecipeError
from app.models.traits import ModelKind
from app.training.engine.deepspeed_internals import all_parameters_sent, continue_at_min_loss_scale, loss_scale_of
from app.training.engine.nvme import require_aligned_gradients
from app.training.engine.optimizer import create_optimizer, create_scheduler, num_elements
from app.training.worker import import_deepspeed

_BUFFERS_PER_MODEL, _MIN_BUFFER, _MAX_BUFFER = 64, 2**20, 5 * 10**8
"""A buffer holds a 64th of the model's elements, within these limits."""

Keys = dict[str, Any]
"""DeepSpeed's configuration."""
MIN_LOSS_SCALE = 1
"""fp16: a gradient that overflows even at this scale is not finite."""

_RECIPE_KEYS = {
    "train.deepspeed.optimizer": "train.optimizer",
    "train.deepspeed.scheduler": "train.schedule",
    "train.deepspeed.bfloat16": "train.precision",
    "train.deepspeed.torch_autocast": "train.precision",
    "train.deepspeed.elasticity": "train.workers",
    "train.deepspeed.tensor_parallel": "train.plan.tensor",
    "train.deepspeed.zero_optimization.offload_optimizer": "train.plan.offload",
    "train.deepspeed.zero_optimization.offload_param": "train.plan.offload_param",
    "train.deepspeed.zero_optimization.cpu_offload": "train.plan.offload",
    "train.deepspeed.zero_optimization.cpu_offload_param": "train.plan.offload_param",
}
"""Keys that DeepSpeed would ignore, or that would contradict the recipe, and the recipe's key to use instead."""


def deepspeed_config(config: TrainConfig, layout: Layout) -> Keys:
    """Return DeepSpeed's configuration for one layout and any model.

    Defaults that changed in recent versions are set explicitly.
    Source of the keys: https://www.deepspeed.ai/docs/config-json

    Raises:
        RecipeError: ``train.deepspeed`` contradicts the recipe, or sets a key for which the recipe has its own.
    """
    ours: dict[str, Any] = {
        # DeepSpeed checks this product. It exceeds the global batch if micro-batches are uneven.
        "train_batch_size": layout.micro_batch * layout.gradient_accumulation * layout.data,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.gradient_accumulation,
        "gradient_clipping": _clipping(config),
        "prescale_gradients": False,
        "communication_data_type": config.plan.communication_data_type,
        "zero_optimization": _zero(config.plan, config.device == "gpu"),
        # DeepSpeed lists only the Adam family as tested, and the recipe also has SGD.
        "zero_allow_untested_optimizer": True,
        "bf16": {
            "enabled": config.precision == "bf16",
            "check_grad_overflow": True,
            # This frees the bf16 gradients that stage 1 has added to its float32 sums.
            "immediate_grad_update": True,
        },
        "fp16": {
            "enabled": config.precision == "fp16",
            "loss_scale": 0,  # dynamic
            "min_loss_scale": MIN_LOSS_SCALE,
        },
        "data_types": {"grad_accum_dtype": _accumulation_dtype(config, layout)},
        "pipeline": {
            "activation_checkpoint_interval": int(config.plan.activation_checkpointing and layout.model_parallel > 1),
            "use_reentrant": False,
        },
        "wall_clock_breakdown": False,
        "steps_per_print": 2**31,  # progress is ours to print
    }
    return _merge(ours, config.deepspeed, "train.deepspeed")


def for_kind(deepspeed: Keys, layout: Layout, kind: ModelKind) -> Keys:
    """Return ``deepspeed`` for a model of ``kind``. Rayloom splits the matrices of a staged one, DeepSpeed others."""
    if layout.tensor == 1 or kind is ModelKind.STAGED:
        return deepspeed | {"tensor_parallel": {"autotp_size": 0}}
    # DeepSpeed would check the batch before it knows that the workers split matrices.
    whole = {key: value for key, value in deepspeed.items() if key != "train_batch_size"}
    return whole | {"tensor_parallel": {"autotp_size": layout.tensor}}


def with_bounded_buffers(deepspeed: dict[str, Any], num_parameters: int) -> dict[str, Any]:
    """Return ``deepspeed`` with buffer sizes proportional to the model, unless the recipe sets them.

    DeepSpeed's defaults are 5e8 to 1e9 elements, more than a small model has.
    """
    size = max(num_parameters // _BUFFERS_PER_MODEL, _MIN_BUFFER)
    sizes = {"reduce_bucket_size": size, "allgather_bucket_size": size}
    if deepspeed["zero_optimization"]["stage"] == 3:
        sizes |= {"stage3_prefetch_bucket_size": size, "stage3_max_live_parameters": size}
        sizes |= {"stage3_max_reuse_distance": size}
        if "offload_optimizer" not in deepspeed["zero_optimization"]:
            # With offload, whole groups pass through memory.
            sizes["sub_group_size"] = size
    bounded = {name: min(number, _MAX_BUFFER) for name, number in sizes.items()}
    return deepspeed | {"zero_optimization": bounded | deepspeed["zero_optimization"]}


def _zero(plan: PlanConfig, on_gpu: bool) -> dict[str, Any]:
    """Return the section ``zero_optimization``."""
    plus = plan.zero_plus_plus
    zero: dict[str, Any] = {
        "stage": plan.zero_stage,
        # A pipeline reduces by its own schedule.
        "overlap_comm": plan.overlap_comm and plan.pipeline == 1,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "round_robin_gradients": False,
        "compute_grad_norm": True,  # it shows whether a gradient is finite
        "zero_hpz_partition_size": plus.hpz_partition_size,
        "zero_quantized_weights": plus.quantized_weights,
        "zero_quantized_gradients": plus.quantized_gradients,
    }
    for key, device in (("offload_optimizer", plan.offload), ("offload_param", plan.offload_param)):
        if device != "none":
            zero[key] = {"device": device, "pin_memory": on_gpu}
        if device == "nvme":
            zero[key]["nvme_path"] = plan.nvme_path
    if plan.offload_param == "nvme":
        # By default the first 1e9 elements would stay in memory.
        zero["offload_param"]["max_in_cpu"] = 0
    return zero


def _clipping(config: TrainConfig) -> float:
    """Return the maximum norm. 0 does not clip.

    Without ZeRO, in float32, DeepSpeed computes the norm only if it clips. Then the maximum is infinity.
    """
    plain = config.plan.zero_stage == 0 and config.precision == "fp32"
    return config.gradient_clipping or (math.inf if plain else 0.0)


def _accumulation_dtype(config: TrainConfig, layout: Layout) -> str | None:
    """Return fp32 where ZeRO accumulates gradients of a lower precision; None means the model's own dtype.

    DeepSpeed rejects fp32 without ZeRO; there ``DataParallelEngine`` accumulates in float32.
    """
    adds_up = layout.gradient_accumulation > 1 or layout.pipeline > 1
    return "fp32" if config.precision != "fp32" and config.plan.zero_stage and adds_up else None


def _merge(ours: dict[str, Any], given: dict[str, Any], path: str) -> dict[str, Any]:
    """Return both trees merged. Leaves that both set must agree."""
    merged = dict(ours)
    for key, value in given.items():
        if isinstance(value, dict) and isinstance(ours.get(key), dict):
            merged[key] = _merge(ours[key], value, f"{path}.{key}")
        elif key in ours and ours[key] != value:
            raise RecipeError(
                f"{path}.{key} is {value!r}, and the recipe's own keys make it {ours[key]!r}: "
                "remove it here, and set what it follows from"
            ).of("deepspeed.own_key", "train.deepspeed")
        elif key not in ours and (own := _RECIPE_KEYS.get(f"{path}.{key}")):
            raise RecipeError(f"{path}.{key} is for the recipe to say: remove it here, and set {own}").of(
                "deepspeed.own_key", "train.deepspeed"
            )
        else:
            merged[key] = value
    return merged


def initialize(model: Any, config: TrainConfig, deepspeed: Keys, total_steps: int) -> Any:
    """Return the ``DeepSpeedEngine`` of ``model``, with the configuration ``deepspeed``."""
    optimizer = create_optimizer(model, config)
    num_parameters = sum(map(num_elements, model.parameters()))
    hook = optimizer.register_step_pre_hook(_drop_gradients) if config.plan.zero_stage == 0 else None
    # Some of DeepSpeed's optimizers print how much memory they take.
    with redirect_stdout(io.StringIO()), all_parameters_sent():
        engine, *_ = import_deepspeed().initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=create_scheduler(optimizer, config, total_steps),
            config=with_bounded_buffers(deepspeed, num_parameters),
        )
    # Only the step that DeepSpeed takes on its own is a no-op.
    if hook:
        hook.remove()
    continue_at_min_loss_scale(engine)
    if config.plan.offload == "nvme":
        require_aligned_gradients(engine)
    return engine


def _drop_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Clear the gradients, so that a step of ``optimizer`` does nothing.

    Without ZeRO, in bf16 or fp16, DeepSpeed creates the optimizer state with a step on gradients of zeros. AdamW would
    count that step and decay the weights. The gradients would also take 4 bytes per parameter.
    """
    optimizer.zero_grad(set_to_none=True)


def names_of(model: nn.Module) -> dict[int, str]:
    """Return the names of a whole model's parameters and modules, by ``id``. Of several names it is the first.

    Checkpoints use them, because a plan that splits the model gives its parts other names.
    """
    named = [*model.named_modules(remove_duplicate=True), *model.named_parameters(remove_duplicate=True)]
    return {id(item): name for name, item in named}


@dataclass(frozen=True)
class Factors:
    """The factors of one step."""

    lr: float
    """Learning rate."""
    loss_scale: float | None
    """fp16: the factor of its losses."""

    @classmethod
    def of(cls, engine: Any) -> Self:
        """Return the factors of the next step of ``engine``, a ``DeepSpeedEngine``."""
        scale = loss_scale_of(engine)
        return cls(lr=float(engine.get_lr()[0]), loss_scale=scale.scale if scale else None)


@dataclass(frozen=True)
class StepResult:
    """One optimizer step of one worker."""

    loss: Tensor
    """Mean loss of its micro-batches, float32 of shape ()."""
    factors: Factors
    grad_norm: float | None
    """Global norm of the gradient before clipping. None if DeepSpeed computes none."""
    is_applied: bool
    """False if the optimizer skipped the step, because a gradient was not finite."""

    @classmethod
    def of(cls, engine: Any, factors: Factors, loss: Tensor) -> Self:
        """Return the result of the last step of ``engine``, a ``DeepSpeedEngine``."""
        norm = engine.get_global_grad_norm()
        return cls(
            loss=loss,
            factors=factors,
            grad_norm=None if norm is None else float(norm),
            is_applied=engine.was_step_applied(),
        )

    @property
    def is_broken(self) -> bool:
        """Whether its gradient is not finite.

        fp16 finds its loss scale by overflows, so there an overflow counts only at the minimum scale.
        """
        scale = self.factors.loss_scale
        if scale is not None and scale > MIN_LOSS_SCALE:
            return False
        return not self.is_applied or (self.grad_norm is not None and not math.isfinite(self.grad_norm))
