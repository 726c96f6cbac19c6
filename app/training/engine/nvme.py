"""The optimizer's state on NVMe, as DeepSpeed's ZeRO 3 swaps it (ZeRO-Infinity, arXiv:2104.07857)."""

import atexit
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from torch import Tensor

from app.config import TrainConfig
from app.errors import TrainingError
from app.training.engine.extensions import load_extension
from app.training.worker import import_deepspeed


def require_asynchronous_io() -> None:
    """Raises TrainingError if DeepSpeed cannot compile its asynchronous I/O on this machine."""
    import_deepspeed()
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise TrainingError(
            "train.plan.offload is nvme, and DeepSpeed cannot compile its asynchronous I/O here: install libaio-dev "
            "and a C++ compiler, or offload to cpu"
        )


def load_asynchronous_io() -> None:
    """Load what DeepSpeed reads and writes the disk with."""
    from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder

    for builder in (PinMemoryBuilder(), AsyncIOBuilder()):  # the second is linked to the first
        load_extension(builder)


def with_own_folder(config: TrainConfig) -> TrainConfig:
    """``config`` with a folder of this process's own, gone with it, in its ``nvme_path``.

    DeepSpeed names its files by rank alone: two runs would overwrite each other's.
    """
    assert config.plan.nvme_path is not None  # a rule of the plan
    Path(config.plan.nvme_path).mkdir(parents=True, exist_ok=True)
    own = mkdtemp(prefix="rayloom-", dir=config.plan.nvme_path)
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return config.model_copy(update={"plan": config.plan.model_copy(update={"nvme_path": own})})


def require_aligned_gradients(deepspeed: Any) -> None:
    """Raises TrainingError if DeepSpeed 0.19 would read a gradient back to the wrong place.

    It writes a large gradient by itself and reads it straight into the buffer of its group, where only an offset of
    whole blocks is right; with any other one training goes on, as another model.
    """
    optimizer = deepspeed.optimizer
    for parameter in (parameter for parameter in deepspeed.module.parameters() if parameter.requires_grad):
        group, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
        swapper = optimizer.optimizer_swapper
        is_written = optimizer._swappable_optimizer_subgroup(group) and swapper.is_swappable_tensor(numel=length)
        if is_written and offset % swapper.numel_alignment:
            raise TrainingError(
                f"train.plan.offload is nvme, and a worker's part of {deepspeed.param_names[parameter]} begins after "
                f"{offset:,} elements: DeepSpeed's swapping takes a multiple of {swapper.numel_alignment}; change the "
                "model's width, or offload to cpu"
            )


def is_swapped(deepspeed: Any, master: Tensor) -> bool:
    """Whether ``master`` and its state lie on NVMe between their uses."""
    return _group_of(deepspeed, master) is not None


@contextmanager
def read_from_nvme(deepspeed: Any, master: Tensor) -> Iterator[None]:
    """While it lasts, ``master`` and its state are in memory to be read."""
    group = _group_of(deepspeed, master)
    if group is None:
        yield
        return
    deepspeed.optimizer._optimizer_states_and_gradient_swap_in(group)
    try:
        yield
    finally:
        deepspeed.optimizer._release_swap_buffers(group)


@contextmanager
def written_to_nvme(deepspeed: Any, master: Tensor) -> Iterator[None]:
    """Hold ``master``, which is swapped, and its state in memory inside the context; then write them back.

    They are also written back after an error. Releasing the buffers would not do: DeepSpeed would then look for files
    of state that was never written.
    """
    group = _group_of(deepspeed, master)
    deepspeed.optimizer._optimizer_states_and_gradient_swap_in(group)
    try:
        yield
    finally:
        deepspeed.optimizer._optimizer_states_and_gradient_swap_out(group)


def _group_of(deepspeed: Any, master: Tensor) -> int | None:
    """The number of the group that is swapped as one; None if ``master`` stays in memory."""
    optimizer = deepspeed.optimizer
    masters = getattr(optimizer, "fp32_partitioned_groups_flat", [])  # of ZeRO 3 alone, as is NVMe
    group = next((number for number, candidate in enumerate(masters) if candidate is master), None)
    return group if group is not None and optimizer._swappable_optimizer_subgroup(group) else None
