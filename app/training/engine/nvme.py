"""Offload of parameters and the optimizer's state to NVMe, as DeepSpeed's ZeRO 3 swaps them (arXiv:2104.07857)."""

import atexit
import fcntl
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import IO, Any

import torch

from app.errors import TrainingError, first_line
from app.training.engine.deepspeed_internals import check_file_operations, file_handle, misaligned_gradient
from app.training.engine.extensions import load_extension
from app.training.engine.parameter_swapper import ParameterSwapper
from app.training.worker import import_deepspeed

_SECTIONS = ("offload_optimizer", "offload_param")
_PREFIX, _IN_USE = "rayloom-", "in_use.lock"
"""The beginning of the name of a process's own folder, and a file there that the process holds locked."""
_own: dict[Path, IO[bytes]] = {}
"""The folders of this process, and their locked files."""


def require_asynchronous_io() -> None:
    """Raise TrainingError if DeepSpeed cannot compile its asynchronous I/O on this machine."""
    import_deepspeed()
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise TrainingError(
            "train.plan offloads to nvme, and DeepSpeed cannot compile its asynchronous I/O here: install libaio-dev "
            "and a C++ compiler, or offload to cpu"
        ).of("nvme.not_compiled", "train.plan.offload")


@cache
def load_asynchronous_io() -> None:
    """Load the extensions with which DeepSpeed reads and writes the disk, and have them raise errors of a full one."""
    from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder

    # The second extension is linked against the first.
    load_extension(PinMemoryBuilder())
    check_file_operations(load_extension(AsyncIOBuilder()))


def with_own_folder(deepspeed: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's configuration with an ``nvme_path`` of this process alone, until ``remove_own_folders``.

    DeepSpeed names its files by rank alone: two runs would overwrite each other's.

    Raises:
        TrainingError: no folder can be made there.
    """
    zero = deepspeed["zero_optimization"]
    sections = {name: zero[name] for name in _SECTIONS if "nvme_path" in zero.get(name, {})}
    shared = next(section["nvme_path"] for section in sections.values())
    try:
        Path(shared).mkdir(parents=True, exist_ok=True)
        own = str(_make_folder(Path(shared)))
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"train.plan.nvme_path is {shared!r}, where no folder can be made ({first_line(error)}): name a folder "
            "on a local disk that each worker may write"
        ).of("nvme.folder", "train.plan.nvme_path") from error
    return deepspeed | {
        "zero_optimization": zero | {name: section | {"nvme_path": own} for name, section in sections.items()}
    }


def _make_folder(shared: Path) -> Path:
    """Make a folder of this process alone. Remove those that killed processes have left, before they fill the disk."""
    for lock in shared.glob(f"{_PREFIX}*/{_IN_USE}"):
        if not _is_held(lock):
            shutil.rmtree(lock.parent, ignore_errors=True)
    # It gets its name once it is locked, so that no other process removes it before.
    hidden = Path(mkdtemp(prefix=f".{_PREFIX}", dir=shared))
    lock_file = (hidden / _IN_USE).open("ab")
    fcntl.flock(lock_file, fcntl.LOCK_EX)
    own = hidden.rename(shared / hidden.name.removeprefix("."))
    _own[own] = lock_file
    return own


def _is_held(lock: Path) -> bool:
    """Return whether a process holds the lock. The system frees it when the process ends in any way."""
    try:
        with lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


@atexit.register
def remove_own_folders() -> None:
    """Remove this process's folders. No engine uses them any more.

    Call it after training: Ray ends its workers without what is registered for their exit.
    """
    while _own:
        folder, lock = _own.popitem()
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


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
        ).of("nvme.misaligned", "train.plan.offload")
