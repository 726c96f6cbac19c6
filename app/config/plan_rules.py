"""The rules that a parallel plan must keep, and the nearest valid plan to one that breaks them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import PurePath
from typing import Literal

from app.config.plan import Device, PlanConfig, Precision, ZeroPlusPlusConfig
from app.config.section import Section


@dataclass(frozen=True)
class ModelTraits:
    """The properties of a model that limit its plans."""

    name: str
    layers: int | None
    """Number of layers between which a pipeline can be split; None if the model is not staged."""
    tensor_divisor: int | None
    """The number that a tensor degree must divide: attention heads, or the common divisor of the matrices' widths.

    None if its matrices cannot be split.
    """
    checkpoints_activations: bool
    has_frozen: bool = False
    """Whether some parameters are frozen, for example beside an adapter."""
    has_scalars: bool = False
    """Whether some parameters are scalars, such as a learned temperature."""


@dataclass(frozen=True)
class Setting:
    """Everything with which a plan must be compatible."""

    workers: tuple[int, int]
    precision: Precision
    device: Device
    optimizer: str
    model: ModelTraits | None = None
    """None if the model is not known yet. Its rules are then skipped."""
    inputs: tuple[str, ...] = ()
    """The names of the batch's tensors for the model; empty if they are not known yet."""
    sync_batch_norm: bool = False
    has_token_batches: bool = False
    """Whether batches are sized in tokens, so that micro-batches differ in shape."""
    unsupported: tuple[Literal["tensor", "pipeline"], ...] = ()
    """The degrees that are 1 because the task does not support others."""


Rule = Callable[[PlanConfig, Setting], str | None]


def refusal(plan: PlanConfig, setting: Setting) -> str | None:
    """Return why the plan cannot run, and the nearest plan that can; None if the plan can run."""
    broken = broken_rule(plan, setting)
    if broken is None:
        return None
    nearest = _nearest_plan(plan, setting)
    return f"{broken.reason}; {nearest}" if nearest else broken.reason


@dataclass(frozen=True)
class BrokenRule:
    """A rule that a plan breaks."""

    name: str
    reason: str
    """The given value, and what the rule expects."""


def broken_rule(plan: PlanConfig, setting: Setting) -> BrokenRule | None:
    """Return the first rule that the plan breaks; None if it can run."""
    for rule in _RULES:
        if reason := rule(plan, setting):
            return BrokenRule(rule.__name__.strip("_").replace("_", " "), reason)
    return None


def _nearest_plan(plan: PlanConfig, setting: Setting) -> str | None:
    """Return the valid plan that differs least from ``plan``, as the keys to set; None if there is none."""
    valid = [other for other in _neighbours(plan, setting) if not broken_rule(other, setting)]
    best = min(valid, key=lambda other: _distance(plan, other), default=None)
    if best is None:
        return None
    values = ", ".join(f"{name}: {_show(getattr(best, name))}" for name in _changed(plan, best))
    return f"the nearest plan that can run has {values}"


def _show(value: object) -> str:
    """Return a value as it is written in a recipe."""
    return "null" if value is None else "{}" if isinstance(value, Section) else str(value).lower()


def _neighbours(plan: PlanConfig, setting: Setting) -> Iterator[PlanConfig]:
    _, max_workers = setting.workers
    degrees = [degree for degree in range(1, max_workers + 1) if max_workers % degree == 0]
    # The given value comes first: of equally near plans, the first one is named.
    choices: dict[str, Iterable[object]] = {
        "tensor": degrees,
        "pipeline": degrees,
        "zero_stage": (0, 1, 2, 3),
        "offload": dict.fromkeys((plan.offload, "none")),
        "offload_param": dict.fromkeys((plan.offload_param, "none")),
        "activation_checkpointing": dict.fromkeys((plan.activation_checkpointing, False)),
        "powersgd": dict.fromkeys((plan.powersgd, None)),
        "communication_data_type": dict.fromkeys((plan.communication_data_type, None)),
        "zero_plus_plus": dict.fromkeys((plan.zero_plus_plus, ZeroPlusPlusConfig())),
    }
    for values in product(*choices.values()):
        yield plan.model_copy(update=dict(zip(choices, values, strict=True)))


def _changed(given: PlanConfig, other: PlanConfig) -> list[str]:
    return [name for name in PlanConfig.model_fields if getattr(given, name) != getattr(other, name)]


def _distance(given: PlanConfig, other: PlanConfig) -> tuple[int, int]:
    """Return the number of differing keys, then the differences of the degrees and the ZeRO stage."""
    degrees = sum(abs(getattr(given, name) - getattr(other, name)) for name in ("tensor", "pipeline", "zero_stage"))
    return len(_changed(given, other)), degrees


def _degrees_divide_workers(plan: PlanConfig, setting: Setting) -> str | None:
    min_workers, max_workers = setting.workers
    if min_workers != max_workers and plan.model_parallel > 1:
        degrees = f"tensor {plan.tensor} x pipeline {plan.pipeline}"
        return f"workers [{min_workers}, {max_workers}] grow and shrink, which {degrees} cannot"
    if max_workers % plan.model_parallel:
        return f"tensor {plan.tensor} x pipeline {plan.pipeline} does not divide the {max_workers} workers"
    return None


def _pipeline_takes_zero_1(plan: PlanConfig, _: Setting) -> str | None:
    if plan.pipeline > 1 and plan.zero_stage > 1:
        return f"pipeline {plan.pipeline} keeps gradients and parameters whole: zero_stage 1, got {plan.zero_stage}"
    if plan.pipeline > 1 and plan.zero_stage == 0:
        return "with zero_stage 0 each stage of a pipeline would be clipped by a norm of its own: zero_stage 1, got 0"
    return None


def _tensor_takes_zero_1(plan: PlanConfig, _: Setting) -> str | None:
    if plan.tensor > 1 and plan.zero_stage > 1:
        return f"tensor {plan.tensor} splits the matrices already: zero_stage 0 or 1 with it, got {plan.zero_stage}"
    return None


def _nvme_takes_a_path(plan: PlanConfig, setting: Setting) -> str | None:
    key = next((key for key in ("offload", "offload_param") if getattr(plan, key) == "nvme"), None)
    if key is None:
        return None
    if plan.zero_stage != 3:
        return f"{key} nvme takes zero_stage 3, got {plan.zero_stage}"
    if plan.nvme_path is None or not PurePath(plan.nvme_path).is_absolute():
        return f"{key} nvme takes nvme_path, the absolute path of a folder on a fast local disk, got {plan.nvme_path}"
    min_workers, max_workers = setting.workers
    if min_workers != max_workers:
        return f"{key} nvme takes a fixed number of workers, got [{min_workers}, {max_workers}]"
    return None


def _nvme_takes_trained_parameters(plan: PlanConfig, setting: Setting) -> str | None:
    if plan.offload_param != "nvme":
        return None
    if setting.model and setting.model.has_frozen:
        return (
            f"offload_param nvme moves parameters that are trained, and model {setting.model.name} has frozen ones: "
            "set offload_param to cpu"
        )
    if plan.zero_plus_plus != ZeroPlusPlusConfig():
        return "offload_param nvme moves parameters that no rank holds twice: leave zero_plus_plus out"
    return None


def _staged_tensor_takes_zero_1_in_low_precision(plan: PlanConfig, setting: Setting) -> str | None:
    is_staged = setting.model is not None and setting.model.layers is not None
    if is_staged and plan.tensor > 1 and plan.zero_stage == 0 and setting.precision != "fp32":
        return (
            f"with zero_stage 0, tensor {plan.tensor} would add up the gradients of micro-batches in "
            f"{setting.precision}: zero_stage 1, whose gradients are added up in float32, got 0"
        )
    return None


def _offload_takes_zero(plan: PlanConfig, _: Setting) -> str | None:
    if plan.offload != "none" and plan.zero_stage == 0:
        return "offload moves a split optimizer: zero_stage 1, 2 or 3, got 0"
    if plan.offload != "none" and plan.model_parallel > 1:
        return "offload takes tensor 1 and pipeline 1"
    if plan.offload_param != "none" and plan.zero_stage != 3:
        return f"offload_param {plan.offload_param} moves split parameters: zero_stage 3, got {plan.zero_stage}"
    return None


def _offload_takes_adamw(plan: PlanConfig, setting: Setting) -> str | None:
    if plan.offload != "none" and setting.optimizer != "adamw":
        return f"offload runs DeepSpeed's Adam on the CPU: optimizer adamw, got {setting.optimizer}"
    return None


def _fp16_takes_a_gpu(_: PlanConfig, setting: Setting) -> str | None:
    if setting.precision == "fp16" and setting.device == "cpu":
        return "precision fp16 takes device gpu, got cpu, under every plan: set precision to bf16 or fp32"
    return None


def _pipeline_takes_bf16(plan: PlanConfig, setting: Setting) -> str | None:
    if plan.pipeline > 1 and setting.precision == "fp16":
        return (
            f"pipeline {plan.pipeline} would sum the gradients of tied layers in fp16: set precision to bf16, whose "
            "gradients are summed in float32"
        )
    return None


def _zero_plus_plus_takes_gpus(plan: PlanConfig, setting: Setting) -> str | None:
    if plan.zero_plus_plus == ZeroPlusPlusConfig():
        return None
    if setting.device == "cpu" or plan.zero_stage != 3:
        return f"zero_plus_plus takes zero_stage 3 on gpus, got zero_stage {plan.zero_stage} on a {setting.device}"
    if setting.workers[1] % plan.zero_plus_plus.hpz_partition_size:
        return f"hpz_partition_size {plan.zero_plus_plus.hpz_partition_size} does not divide the workers"
    return None


def _powersgd_takes_plain_data_parallel(plan: PlanConfig, setting: Setting) -> str | None:
    if plan.powersgd is None:
        return None
    if plan.zero_stage or plan.model_parallel > 1 or setting.precision != "fp32":
        return "powersgd replaces DeepSpeed's reduction: zero_stage 0, fp32, tensor 1, pipeline 1"
    if plan.communication_data_type is not None:
        return (
            "powersgd replaces DeepSpeed's reduction, so communication_data_type has no effect: leave one of them out, "
            f"got communication_data_type {plan.communication_data_type}"
        )
    if setting.model and setting.model.has_scalars:
        return f"powersgd takes parameters with dimensions, and model {setting.model.name} has scalars"
    return None


def _sync_batch_norm_takes_whole_models(plan: PlanConfig, setting: Setting) -> str | None:
    if setting.sync_batch_norm and plan.model_parallel > 1:
        return (
            "sync_batch_norm needs the whole model on each worker: expected tensor 1 and pipeline 1, got tensor "
            f"{plan.tensor} and pipeline {plan.pipeline}"
        )
    return None


def _token_batches_take_whole_models(plan: PlanConfig, setting: Setting) -> str | None:
    if setting.has_token_batches and plan.model_parallel > 1:
        return (
            "tokens_per_batch makes micro-batches of different sizes, which a split model cannot compute: expected "
            f"tensor 1 and pipeline 1, got tensor {plan.tensor} and pipeline {plan.pipeline}; or set global_batch_size"
        )
    return None


def _model_is_staged(plan: PlanConfig, setting: Setting) -> str | None:
    model = setting.model
    if model is None or plan.pipeline == 1:
        return None
    if model.layers is None:
        return f"model {model.name} is not staged (app.models.staged), so pipeline is 1"
    if plan.pipeline > model.layers:
        return f"pipeline {plan.pipeline} has more stages than model {model.name} has layers ({model.layers})"
    return None


def _cut_model_takes_one_input(plan: PlanConfig, setting: Setting) -> str | None:
    model = setting.model
    if model is None or model.layers is None or plan.model_parallel == 1 or len(setting.inputs) < 2:
        return None
    return (
        f"tensor {plan.tensor} x pipeline {plan.pipeline} takes one input for staged model {model.name}, got "
        f"{', '.join(setting.inputs)} of the task"
    )


def _tensor_divides(plan: PlanConfig, setting: Setting) -> str | None:
    model = setting.model
    if model is None or plan.tensor == 1:
        return None
    if model.tensor_divisor is None:
        return f"model {model.name} has no matrices that can be split (app.models.staged), so tensor is 1"
    if model.tensor_divisor % plan.tensor:
        return (
            f"tensor {plan.tensor} does not divide {model.tensor_divisor}: the heads of model {model.name}, or the "
            "common divisor of its matrices' widths"
        )
    return None


def _task_supports_it(plan: PlanConfig, setting: Setting) -> str | None:
    name = next((name for name in setting.unsupported if getattr(plan, name) > 1), None)
    return f"{name} {getattr(plan, name)} is not supported by the task: {name} is 1" if name else None


def _activations_can_be_recomputed(plan: PlanConfig, setting: Setting) -> str | None:
    if setting.model and plan.activation_checkpointing and not setting.model.checkpoints_activations:
        return f"model {setting.model.name} is neither staged nor of Hugging Face: activation_checkpointing is false"
    return None


_RULES: tuple[Rule, ...] = (
    _task_supports_it,
    _fp16_takes_a_gpu,
    _pipeline_takes_bf16,
    _degrees_divide_workers,
    _pipeline_takes_zero_1,
    _tensor_takes_zero_1,
    _staged_tensor_takes_zero_1_in_low_precision,
    _offload_takes_zero,
    _nvme_takes_a_path,
    _nvme_takes_trained_parameters,
    _offload_takes_adamw,
    _zero_plus_plus_takes_gpus,
    _powersgd_takes_plain_data_parallel,
    _sync_batch_norm_takes_whole_models,
    _token_batches_take_whole_models,
    _model_is_staged,
    _cut_model_takes_one_input,
    _tensor_divides,
    _activations_can_be_recomputed,
)
