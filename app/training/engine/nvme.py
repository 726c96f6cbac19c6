"""Offload of the optimizer's state to NVMe, as DeepSpeed's ZeRO 3 swaps it (ZeRO-Infinity, arXiv:2104.07857)."""

import atexit
import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from app.errors import TrainingError
from app.training.engine.deepspeed_internals import misaligned_gradient
from app.training.engine.extensions import load_extension
from app.training.worker import import_deepspeed


def require_asynchronous_io() -> None:
    """Raise TrainingError if DeepSpeed cannot compile its asynchronous I/O on this machine."""
    import_deepspeed()
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise TrainingError(
            "train.plan.offload is nvme, and DeepSpeed cannot compile its asynchronous I/O here: install libaio-dev "
            "and a C++ compiler, or offload to cpu"
        )


def load_asynchronous_io() -> None:
    """Load the extensions with which DeepSpeed reads and writes the disk."""
    from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder

    # The second extension is linked against the first.
    for builder in (PinMemoryBuilder(), AsyncIOBuilder()):
        load_extension(builder)


def with_own_folder(deepspeed: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's configuration with an ``nvme_path`` of this process alone. The folder goes when it ends.

    DeepSpeed names its files by rank alone: two runs would overwrite each other's.
    """
    zero = deepspeed["zero_optimization"]
    shared = zero["offload_optimizer"]["nvme_path"]
    Path(shared).mkdir(parents=True, exist_ok=True)
    own = mkdtemp(prefix="rayloom-", dir=shared)
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return deepspeed | {
        "zero_optimization": zero | {"offload_optimizer": zero["offload_optimizer"] | {"nvme_path": own}}
    }


def require_aligned_gradients(engine: Any) -> None:
    """Raise TrainingError if DeepSpeed would read a gradient back to the wrong place."""
    if found := misaligned_gradient(engine):
        name, offset, alignment = found
        raise TrainingError(
            f"train.plan.offload is nvme, and a worker's part of {name} begins after {offset:,} elements: DeepSpeed's "
            f"swapping takes a multiple of {alignment}; change the model's width, or offload to cpu"
        )
