"""Shared memory for the micro-batches of a loader process. It is reused once training has dropped a micro-batch.

Fresh shared memory costs a page fault for every 4 KiB, which is a fifth of the time that pictures take to decode.
"""

import math
import os
import weakref
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_HEADER = 64
"""Bytes before the values, which keeps these aligned. The first byte is 1 while the buffer is lent."""
Buffer = NDArray[np.uint8]


class Lender:
    """Lends the buffers of a loader process to micro-batches."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._unsent: list[Buffer] = []

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array with arbitrary values in a free buffer."""
        num_bytes = _HEADER + math.prod(shape) * dtype.itemsize
        free = (buffer for buffer in self._buffers if not buffer[0] and buffer.nbytes == num_bytes)
        if (buffer := next(free, None)) is None:
            memory = torch.empty(num_bytes, dtype=torch.uint8)
            buffer = memory.share_memory_().numpy()  # type: ignore[no-untyped-call]
            # Free buffers of other sizes are not kept.
            self._buffers = [*(other for other in self._buffers if other[0]), buffer]
        buffer[0] = 1
        self._unsent.append(buffer)
        return _values(buffer, shape, dtype)

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """Return an array as a tensor. If it fills a buffer, training receives it without a copy."""
        for place, buffer in enumerate(self._unsent):
            if np.may_share_memory(array, buffer):
                if not array.flags.c_contiguous or array.nbytes < buffer.nbytes - _HEADER:
                    return torch.from_numpy(array.copy())  # the buffer will be taken back
                del self._unsent[place]
                lent = torch.from_numpy(array).as_subclass(_Lent)
                lent.memory = cast(Tensor, buffer.base)
                return lent
        return torch.from_numpy(array)

    def take_back(self) -> None:
        """Take back the buffers that no tensor fills."""
        for buffer in self._unsent:
            buffer[0] = 0
        self._unsent.clear()


class _Lent(Tensor):
    """A tensor that fills a buffer. The process that receives it gets a plain tensor."""

    memory: Tensor
    """The buffer, of shape (bytes,)."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _receive, (self.memory, tuple(self.shape), self.numpy().dtype)


def _receive(memory: Tensor, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
    """Return the tensor that fills a buffer. The buffer is returned when nothing uses its memory."""
    buffer = memory.numpy()
    values = _values(buffer, shape, dtype)
    # The tensor's storage refers to this very array.
    weakref.finalize(values, _return, buffer, os.getpid()).atexit = False
    return torch.from_numpy(values)


def _values(buffer: Buffer, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    return buffer[_HEADER:].view(dtype).reshape(shape)


def _return(buffer: Buffer, receiver: int) -> None:
    if os.getpid() == receiver:  # and not a fork of it, which has these objects too
        buffer[0] = 0
