"""Offload of parameters and the optimizer's state to NVMe, as DeepSpeed's ZeRO 3 swaps them (arXiv:2104.07857)."""

import atexit
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from app.errors import TrainingError
from app.training.engine.deepspeed_internals import check_file_operations, file_handle, misaligned_gradient
from app.training.engine.extensions import load_extension
from app.training.engine.parameter_swapper import ParameterSwapper
from app.training.worker import import_deepspeed

_SECTIONS = ("offload_optimizer", "offload_param")


def require_asynchronous_io() -> None:
    """Raise TrainingError if DeepSpeed cannot compile its asynchronous I/O on this machine."""
    import_deepspeed()
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise TrainingError(
            "train.plan offloads to nvme, and DeepSpeed cannot compile its asynchronous I/O here: install libaio-dev "
            "and a C++ compiler, or offload to cpu"
        )


@cache
def load_asynchronous_io() -> None:
    """Load the extensions with which DeepSpeed reads and writes the disk, and have them raise errors of a full one."""
    from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder

    # The second extension is linked against the first.
    load_extension(PinMemoryBuilder())
    check_file_operations(load_extension(AsyncIOBuilder()))


def with_own_folder(deepspeed: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's configuration with an ``nvme_path`` of this process alone. The folder goes when it ends.

    DeepSpeed names its files by rank alone: two runs would overwrite each other's.
    """
    zero = deepspeed["zero_optimization"]
    sections = {name: zero[name] for name in _SECTIONS if "nvme_path" in zero.get(name, {})}
    shared = next(section["nvme_path"] for section in sections.values())
    Path(shared).mkdir(parents=True, exist_ok=True)
    own = mkdtemp(prefix="rayloom-", dir=shared)
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return deepspeed | {
        "zero_optimization": zero | {name: section | {"nvme_path": own} for name, section in sections.items()}
    }


def parameter_swapper(deepspeed: dict[str, Any], dtype: torch.dtype) -> ParameterSwapper | None:
    """Return the swapper of parameters of ``dtype``; None if they are not offloaded to NVMe.

    ``deepspeed`` names a folder of this process alone.
    """
    section = deepspeed["zero_optimization"].get("offload_param", {})
    if "nvme_path" not in section:
        return None
    return ParameterSwapper(Path(section["nvme_path"]) / "parameters", file_handle(deepspeed), dtype)


def require_aligned_gradients(engine: Any) -> None:
    """Raise TrainingError if DeepSpeed would read a gradient back to the wrong place."""
    if found := misaligned_gradient(engine):
        name, offset, alignment = found
        raise TrainingError(
            f"train.plan.offload is nvme, and a worker's part of {name} begins after {offset:,} elements: DeepSpeed's "
            f"swapping takes a multiple of {alignment}; change the model's width, or offload to cpu"
        )
