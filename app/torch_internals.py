"""torch's private parts that training and telemetry use: each in one function, with the reason for its use.

``app/lazy_compiler.py`` replaces functions of torch, some of them private, for reasons of its own.
"""

from collections.abc import Sequence
from datetime import timedelta
from io import IOBase
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.modules.batchnorm import _BatchNorm

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

TensorType = TypeVar("TensorType", bound=Tensor)

BatchNorm = _BatchNorm
"""The base class of every batch norm. torch has no public one."""


def is_profiling() -> bool:
    """Return whether a profiler records. There is no public way to ask that takes less than 1 µs."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def default_store() -> "Store":
    """Return the default group's store, in which the watchdog exchanges beats. No public name returns it."""
    return distributed_c10d._get_default_store()


def set_default_group_timeout(timeout: timedelta) -> None:
    """Set the timeout of process groups that are created from now on.

    DeepSpeed creates groups without passing a timeout, so they take these module variables.
    """
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, name, timeout)


def is_persistent_buffer(module: nn.Module, name: str) -> bool:
    """Return whether a buffer of ``module`` is in its state dict.

    Only ``state_dict()`` would tell it publicly, but under ZeRO 3 its hooks gather all parameters.
    """
    return name not in module._non_persistent_buffers_set


def extension_folder(name: str) -> Path:
    """Return the folder in which torch compiles the C++ extension ``name``, where a killed build leaves its lock."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, verbose=False))


def make_shell(cls: type[TensorType], shape: tuple[int, ...]) -> TensorType:
    """Return a float32 tensor of class ``cls`` with this shape and no memory.

    ``torch.distributed.checkpoint`` documents its protocol for tensors in parts only for subclasses made this way.
    """
    made: TensorType = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)
    return made


def view_of_file(file: IO[bytes], offset: int, length: int) -> IO[bytes]:
    """Return bytes ``offset`` to ``offset + length`` of ``file`` as a file, as torch's own checkpoint reader does."""
    from torch.distributed.checkpoint.utils import _create_file_view

    return cast(IO[bytes], _create_file_view(cast(IOBase, file), offset, length))


def narrow(whole: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return the rectangle of ``whole`` at ``offsets``, as torch's own checkpoint reader cuts it."""
    from torch.distributed._shard._utils import narrow_tensor_by_index

    return narrow_tensor_by_index(whole, offsets, lengths)


def offset_in_file(meta_tensor: Any) -> int:
    """Return where the values begin in the file from which ``meta_tensor`` was loaded with ``map_location="meta"``.

    It allows reading a part of a large tensor. The public loader reads whole tensors only.
    """
    offset: int | None = meta_tensor.untyped_storage()._checkpoint_offset
    assert offset is not None
    return offset
