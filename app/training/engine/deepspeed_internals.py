"""DeepSpeed's private parts: the one place that uses what DeepSpeed does not document, each with its reason.

Written for deepspeed 0.19; ``pyproject.toml`` bounds the version. In all functions ``engine`` is a ``DeepSpeedEngine``.
Its ``optimizer`` wraps torch's, by another class for each ZeRO stage and precision. ``hasattr`` tells these apart:

    fp32_partitioned_groups_flat    ZeRO 3
    update_lp_params                ZeRO 1 and 2, and bf16 in a pipeline
    fp16_groups, fp32_groups        bf16 or fp16 without ZeRO
    none of them                    float32 without ZeRO: ``optimizer`` is torch's own

"Master" means the float32 tensor from which DeepSpeed updates parameters. Under ZeRO many parameters share one, flat.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from app.errors import TrainingError
from app.training.engine.checked_handle import CheckedHandle


@dataclass(frozen=True)
class Slice:
    """The place of a local parameter in the whole model's: along ``dim``, from ``start``. ``dim`` None: all of it."""

    whole_shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0


@dataclass(frozen=True)
class HeldPart:
    """The part of a local parameter whose float32 weight and optimizer state this rank holds.

    It is elements ``start`` to ``start + length`` of the flattened parameter, and lies in ``master`` from ``offset``.
    """

    master: Tensor
    offset: int
    start: int
    length: int
    is_partition: bool
    """Whether the other data-parallel ranks hold the rest. Otherwise each holds all."""


class LossScale(BaseModel):
    """The state of fp16's dynamic loss scale."""

    scale: float
    iteration: int
    last_overflow: int
    hysteresis: int


# Where parameters and their optimizer state lie. Our checkpoints, which any plan can read, are written from there.
# DeepSpeed's own checkpoints are tied to the plan that wrote them.


def held_part(engine: Any, parameter: Any, masters: Mapping[int, Tensor]) -> HeldPart | None:
    """Return what this rank holds of ``parameter``; None if the parameter lies wholly in other ranks.

    ``masters`` are the ``master_pairs``, by ``id`` of the parameter.
    """
    if hasattr(parameter, "ds_id"):  # ZeRO 3
        return _held_under_zero_3(engine.optimizer, parameter)
    if hasattr(parameter, "_hp_mapping"):  # ZeRO 1 and 2
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        master = engine.optimizer.param_groups[mapping.param_group_index]["params"][0]
        address = mapping.get_hp_fragment_address()
        return HeldPart(master, address.start, mapping.lp_fragment_address.start, address.numel, is_partition=True)
    return HeldPart(masters.get(id(parameter), parameter), 0, 0, parameter.numel(), is_partition=False)


def _held_under_zero_3(optimizer: Any, parameter: Any) -> HeldPart | None:
    size = parameter.partition_numel()
    start = size * torch.distributed.get_rank(parameter.ds_process_group)
    length = max(0, min(size, parameter.ds_numel - start))  # the last partition is padded
    if not length:
        return None
    if not parameter.requires_grad:  # A frozen parameter has no master.
        return HeldPart(parameter.ds_tensor, 0, start, length, is_partition=True)
    group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
    return HeldPart(optimizer.fp32_partitioned_groups_flat[group], offset, start, length, is_partition=True)


def master_pairs(optimizer: Any) -> list[tuple[Tensor, Tensor]]:
    """Return each parameter of the model with its float32 copy, in bf16 or fp16 without ZeRO; else an empty list."""
    if not hasattr(optimizer, "fp32_groups"):
        return []
    groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    return [pair for lows, masters in groups for pair in zip(lows, masters, strict=True)]


def unpartitioned_shape(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of the whole local parameter. ZeRO 3 leaves an empty tensor in its place."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def slice_of(parameter: Any, tensor_rank: int) -> Slice:
    """Return where a parameter lies in the whole one, from what DeepSpeed's tensor-parallel layers note on it.

    Raises:
        TrainingError: DeepSpeed does not say how it cut the matrix.
    """
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    meta = getattr(parameter, DS_AUTOTP_UC_META, None)
    if meta is None or meta["partition_dim"] is None:
        return Slice(tuple(unpartitioned_shape(parameter)))
    if meta["partition_sizes"] is None:
        raise TrainingError(
            "DeepSpeed cuts a matrix of this model (queries, keys and values in one) in a way that a checkpoint cannot "
            "undo: train it with plan.tensor 1"
        ).of("matrix.split_unknown", "train.plan.tensor")
    start = sum(meta["partition_sizes"][:tensor_rank])
    return Slice(tuple(meta["original_shape"]), meta["partition_dim"], start)


def is_pipeline_replica(parameter: nn.Parameter) -> bool:
    """Return whether an earlier stage holds the same tied parameter."""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def partition_by(zero_init: Any, parameter: Any) -> None:
    """Keep only this rank's part of ``parameter``, as a ``deepspeed.zero.Init`` does with each one of a module."""
    if _shows_bytes(parameter):
        zero_init._convert_to_zero_parameters([parameter])
        return
    parameter.data = parameter.data.to(zero_init.local_device)
    zero_init._convert_to_deepspeed_param(parameter)
    group = zero_init.get_partition_dp_group(parameter)
    torch.distributed.broadcast(parameter.data, torch.distributed.get_global_rank(group, 0), group)
    parameter.partition()


def _shows_bytes(parameter: Tensor) -> bool:
    """Return whether torch can view a parameter as bytes. DeepSpeed 0.19.8 sends those of the first rank so."""
    return parameter.dim() > 0 and parameter.stride(-1) == 1


@contextmanager
def all_parameters_sent() -> Iterator[None]:
    """Let an engine that is created in the block send any parameter of the first rank to the others.

    DeepSpeed itself cannot send scalars, and columns that were rows.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    broadcast = DeepSpeedEngine._broadcast_model

    def broadcast_all(engine: Any) -> None:
        others = [parameter for parameter in engine.module.parameters() if not _shows_bytes(parameter)]
        kept = [parameter.data for parameter in others]
        for parameter in others:
            parameter.data = parameter.data.view(-1)  # of the same memory
        broadcast(engine)
        for parameter, value in zip(others, kept, strict=True):
            parameter.data = value

    DeepSpeedEngine._broadcast_model = broadcast_all
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model = broadcast


def restore_linear() -> None:
    """Undo ZeRO 3's replacement of ``torch.nn.functional.linear``. DeepSpeed leaves it in place for later models."""
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Replaced

    nn.functional.linear = getattr(Replaced, "linear_bk", nn.functional.linear)


# Steps after weights, state and counters were written. DeepSpeed takes them only in its own ``load_checkpoint``.


@torch.no_grad()
def refresh_weights(engine: Any) -> None:
    """Copy the master weights into the model."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        _refresh_under_zero_3(engine)
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    else:
        for low, master in master_pairs(optimizer):
            low.copy_(master)


def _refresh_under_zero_3(engine: Any) -> None:
    optimizer = engine.optimizer
    # Small parameters stay whole on every rank, and others between two uses. All must be partitioned while their parts
    # are replaced: a part in memory would not be written to NVMe.
    optimizer._partition_all_parameters()
    for group, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        with read_from_nvme(engine, master):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def set_step(engine: Any, step: int) -> None:
    """Set the counters as after ``step`` optimizer steps. DeepSpeed finds the end of an accumulation by them."""
    engine.global_steps = step
    engine.global_samples = step * engine.train_batch_size()
    engine.micro_steps = step * engine.gradient_accumulation_steps()


def recall_cpu_adam_steps(optimizer: Any, steps: int) -> None:
    """Make DeepSpeed's CPU Adam correct its bias as after ``steps``, to the bit. Do nothing for other optimizers.

    Its C++ code multiplies the powers of its betas from step to step. For a step that does not follow the last one it
    computes them anew, which rounds differently. So run every step, with nothing to update.
    """
    if not hasattr(optimizer, "ds_opt_adam"):
        return
    rates, nothing = (0.0, *optimizer.defaults["betas"], 1.0, 0.0), [torch.empty(0)] * 4
    for step in range(1, steps + 1):
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, *rates, True, *nothing)


# fp16's loss scale: the dynamic one in use. The one in DeepSpeed's configuration is 0.


def _scaler_of(engine: Any) -> Any:
    if not engine.fp16_enabled():
        return None
    return getattr(engine.optimizer, "loss_scaler", None) or engine.optimizer.loss_scale_config  # without ZeRO


def loss_scale_of(engine: Any) -> LossScale | None:
    """Return the state of the loss scale; None unless the engine trains in fp16."""
    scaler = _scaler_of(engine)
    if scaler is None:
        return None
    return LossScale(
        scale=float(scaler.cur_scale),
        iteration=int(getattr(scaler, "cur_iter", 0)),
        last_overflow=int(getattr(scaler, "last_overflow_iter", -1)),
        hysteresis=int(getattr(scaler, "cur_hysteresis", 1)),
    )


def set_loss_scale(engine: Any, state: LossScale) -> None:
    """Set the state of the loss scale. Do nothing unless the engine trains in fp16."""
    if scaler := _scaler_of(engine):
        scaler.cur_scale, scaler.cur_iter = state.scale, state.iteration
        scaler.last_overflow_iter, scaler.cur_hysteresis = state.last_overflow, state.hysteresis


def continue_at_min_loss_scale(engine: Any) -> None:
    """Raise no error when a gradient overflows at the minimum loss scale. The loop does, and names step and rank."""
    if engine.fp16_enabled() and hasattr(engine.optimizer, "loss_scaler"):
        engine.optimizer.loss_scaler.raise_error_at_min_scale = False


# Gradients.


def disable_reduction(engine: Any) -> None:
    """Keep ``backward`` from reducing gradients. torch reduces them, or ``DataParallelEngine``."""
    engine.enable_backward_allreduce = False


def keep_norm_when_clipping(engine: Any) -> None:
    """Have DeepSpeed keep the norm when it clips without ZeRO in float32. By itself it forgets it."""
    engine.clip_fp32_gradients = partial(_clip, engine)


def _clip(engine: Any) -> None:
    from deepspeed.runtime.utils import clip_grad_norm_

    parameters = [_with_vector_gradient(parameter) for parameter in engine.module.parameters()]
    engine._global_grad_norm = clip_grad_norm_(parameters, engine.gradient_clipping(), mpu=engine.mpu)


def _with_vector_gradient(parameter: Tensor) -> Tensor:
    """Return a scalar parameter as a vector with the same memory: DeepSpeed multiplies gradients by a vector."""
    if parameter.dim() or parameter.grad is None:
        return parameter
    vector = parameter.detach().view(1)
    vector.grad = parameter.grad.view(1)
    return vector


# Optimizer state on NVMe, which ZeRO 3 swaps group by group. Only ``step`` does so publicly.


def is_on_nvme(engine: Any, master: Tensor) -> bool:
    """Return whether ``master`` and its state lie on NVMe between their uses."""
    return _swapped_group(engine, master) is not None


@contextmanager
def read_from_nvme(engine: Any, master: Tensor) -> Iterator[None]:
    """Hold ``master`` and its state in memory inside the context, to be read. Do nothing if they always are."""
    group = _swapped_group(engine, master)
    if group is None:
        yield
        return
    engine.optimizer._optimizer_states_and_gradient_swap_in(group)
    try:
        yield
    finally:
        engine.optimizer._release_swap_buffers(group)


@contextmanager
def written_to_nvme(engine: Any, master: Tensor) -> Iterator[None]:
    """Hold ``master``, which is on NVMe, and its state in memory inside the context; then write them back.

    They are also written back after an error. Releasing the buffers would not do: DeepSpeed would then look for files
    of state that was never written.
    """
    group = _swapped_group(engine, master)
    engine.optimizer._optimizer_states_and_gradient_swap_in(group)
    try:
        yield
    finally:
        engine.optimizer._optimizer_states_and_gradient_swap_out(group)


def _swapped_group(engine: Any, master: Tensor) -> int | None:
    """Return the number of the group that is swapped with ``master``; None if ``master`` stays in memory."""
    optimizer = engine.optimizer
    masters = getattr(optimizer, "fp32_partitioned_groups_flat", [])
    group = next((number for number, candidate in enumerate(masters) if candidate is master), None)
    return group if group is not None and optimizer._swappable_optimizer_subgroup(group) else None


def misaligned_gradient(engine: Any) -> tuple[str, int, int] | None:
    """Return name, offset and required alignment of a gradient that DeepSpeed would read back to the wrong place.

    DeepSpeed writes a large gradient by itself and reads it straight into the buffer of its group. There only an offset
    of whole blocks is right. With any other, training continues as another model, without an error.
    """
    optimizer = engine.optimizer
    swapper = optimizer.optimizer_swapper
    for parameter in (parameter for parameter in engine.module.parameters() if parameter.requires_grad):
        group, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
        is_written = optimizer._swappable_optimizer_subgroup(group) and swapper.is_swappable_tensor(numel=length)
        if is_written and offset % swapper.numel_alignment:
            return engine.param_names[parameter], offset, swapper.numel_alignment
    return None


# Parameters on NVMe. ZeRO 3 asks a swapper for this rank's part of each (``ParameterSwapper``).


def show_part(parameter: Any, part: Tensor) -> None:
    """Let ZeRO 3 see this rank's part of ``parameter``, which was read into memory."""
    parameter.ds_tensor.data = part
    parameter.ds_tensor.status = _part_status().AVAILABLE


def hide_part(parameter: Any) -> None:
    """Tell ZeRO 3 that this rank's part of ``parameter`` is only on NVMe."""
    parameter.ds_tensor.data = torch.empty(0, dtype=parameter.dtype)
    parameter.ds_tensor.status = _part_status().NOT_AVAILABLE


def _part_status() -> Any:
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

    return PartitionedParamStatus


def check_file_operations(extension: Any) -> None:
    """Make all handles that ``extension``, DeepSpeed's ``async_io``, creates from now on ``CheckedHandle``s.

    DeepSpeed's swapper of optimizer state creates its own, and writes with them before its constructor returns.
    """
    unchecked = extension.aio_handle
    extension.aio_handle = lambda **options: CheckedHandle(unchecked(**options))


def file_handle(deepspeed: Mapping[str, Any]) -> Any:
    """Return an ``aio_handle``, which reads and writes files, with the options in DeepSpeed's configuration."""
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.runtime.swap_tensor.aio_config import get_aio_config

    options = get_aio_config(deepspeed)
    names = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")
    return AsyncIOBuilder().load(verbose=False).aio_handle(**{name: options[name] for name in names})


# The pipeline.


def wrap_instructions(engine: Any, wrap: Callable[[Any, Callable[..., None]], Callable[..., None]]) -> None:
    """Replace the function of each instruction of the schedule by ``wrap(instruction, function)``.

    Inside ``train_batch`` there is no other way to see which phase a stage is in.
    """
    engine._INSTRUCTION_MAP = {kind: wrap(kind, function) for kind, function in engine._INSTRUCTION_MAP.items()}


def forget_last_loss(engine: Any) -> None:
    """Drop the loss of the last training step. ``eval_batch`` would add its own to it."""
    engine.total_loss = None


def forget_layer_specs(stage: Any) -> None:
    """Drop the layers of all stages once ``stage``, a ``PipelineModule``, has built its own. They keep the model."""
    stage._layer_specs.clear()


def replace_layer_function(stage: Any, old: nn.Module, new: nn.Module) -> None:
    """Replace a layer in the list of functions that ``stage`` calls, beside its modules."""
    stage.forward_funcs[:] = [new if function is old else function for function in stage.forward_funcs]


def disable_input_reduction(part: Any) -> None:
    """Keep a column-parallel layer from reducing the gradient of its input. Layers with one input reduce it once."""
    part.mp_group = None


# C++ extensions.


def is_prebuilt(extension: str) -> bool:
    """Return whether the extension was compiled when DeepSpeed was installed, for the accelerator in use."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name, installed_ops

    return bool(installed_ops.get(extension)) and accelerator_name == get_accelerator().device_name()
