"""A swapper, called by DeepSpeed, that keeps the parts of ZeRO 3's parameters in files on NVMe."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.training.engine.deepspeed_internals import hide_part, show_part

_MIN_BYTES = 2**20
"""Smaller parts stay in memory, as with DeepSpeed's own swapper."""
_BLOCK_BYTES = 4096
"""Direct I/O takes whole blocks."""


class ParameterSwapper:
    """Holds the part of a parameter in memory while the whole is gathered, and writes it after it has changed.

    DeepSpeed's own swapper has a fixed number of buffers of one size. If the layers of a model need more buffers, an
    assertion fails. Buffers for all parameters would take the memory that offload saves. This swapper makes a buffer
    when none of its size is free, so memory holds only as many parts as were needed at once.

    Nothing is read ahead: DeepSpeed would keep the old value of such a part while a step writes the new one to its
    file.
    """

    def __init__(self, folder: Path, handle: Any, dtype: torch.dtype) -> None:
        """``handle`` is from ``file_handle``, ``folder`` this process's own, ``dtype`` the parameters'."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._handle, self._dtype = folder, handle, dtype
        self._block = _BLOCK_BYTES * handle.get_intra_op_parallelism() // dtype.itemsize
        self._free: dict[int, list[Tensor]] = {}
        self._used: dict[int, Tensor] = {}
        """Buffers by the parameter's ``ds_id``."""

    def swappable_tensor(self, param: Any = None, numel: int | None = None) -> bool:  # noqa: ARG002
        """Return whether a part of ``numel`` elements is large enough."""
        return numel is not None and numel * self._dtype.itemsize >= _MIN_BYTES

    def available_swap_in_buffers(self) -> int:
        """Return the number of parts that DeepSpeed may read ahead."""
        return 0

    def reserve_partitioned_swap_space(self, sizes: Sequence[int]) -> None:
        """Reserve nothing: ``swap_out_partitioned_params`` takes one buffer at a time."""

    def synchronize_reads(self) -> None:
        """Wait for nothing: each read has ended when it returns."""

    def get_buffer(self, param: Any, numel: int) -> Tensor:
        """Return zeros of shape (numel,), for the first value of the parameter's part."""
        self._used[param.ds_id] = self._take(numel).zero_()
        return self._used[param.ds_id][:numel]

    def swap_out_and_release(self, params: Sequence[Any]) -> None:
        """Write the parts that are in buffers, and free the buffers."""
        for param in params:
            self._write(param, self._used[param.ds_id])
        self.remove_partition_and_release_buffers(params)

    def swap_in(self, params: Sequence[Any], async_op: bool = False) -> None:  # noqa: ARG002
        """Read the parts into buffers, where they stay until they are released."""
        for param in params:
            numel = param.ds_tensor.ds_numel
            buffer = self._used[param.ds_id] = self._take(numel)
            self._handle.async_pread(buffer, self._file_of(param), 0)
            self._handle.wait()
            show_part(param, buffer[:numel])

    def remove_partition_and_release_buffers(self, params: Sequence[Any]) -> None:
        """Free the buffers of the parts, which are then only in their files."""
        for param in params:
            hide_part(param)
            if (buffer := self._used.pop(param.ds_id, None)) is not None:
                self._give_back(buffer)

    def swap_out_partitioned_params(self, dst_fp16_params: Sequence[Any], src_fp32_params: Sequence[Tensor]) -> None:
        """Write new values of parts that are in no buffer, in the parameters' own precision."""
        for param, source in zip(dst_fp16_params, src_fp32_params, strict=True):
            buffer = self._take(source.numel())
            buffer[: source.numel()].copy_(source)
            self._write(param, buffer)
            self._give_back(buffer)

    def _take(self, numel: int) -> Tensor:
        """Return a page-locked buffer of at least ``numel`` elements, in whole blocks."""
        size = math.ceil(numel / self._block) * self._block
        if free := self._free.get(size):
            return free.pop()
        buffer: Tensor = self._handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=self._dtype))
        return buffer

    def _give_back(self, buffer: Tensor) -> None:
        self._free.setdefault(buffer.numel(), []).append(buffer)

    def _write(self, param: Any, buffer: Tensor) -> None:
        self._handle.async_pwrite(buffer, self._file_of(param), 0)
        self._handle.wait()

    def _file_of(self, param: Any) -> str:
        return str(self._folder / f"{param.ds_id}.swp")
