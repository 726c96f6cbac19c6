"""Shared memory for the micro-batches of a loader process. A buffer is reused once its micro-batch is no longer in use.

New shared memory costs a page fault for each 4 KiB, so decoding pictures into it takes a third longer.
"""

import math
import os
import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_HEADER = 64
"""Bytes before the values, enough to keep them aligned. The first byte is 1 until a receiver gives the buffer back."""
Bytes = NDArray[np.uint8]


class Lender:
    """A pool of shared-memory buffers for the micro-batches of a loader process."""

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an uninitialized array in a free buffer."""
        num_bytes = _HEADER + math.prod(shape) * dtype.itemsize
        free = [buffer for buffer in self._buffers if buffer.is_free]
        buffer = next((buffer for buffer in free if buffer.memory.nbytes >= num_bytes), None)
        if buffer is None:
            # Batches have grown, so the smaller free buffers will not be used again.
            self._buffers = [kept for kept in self._buffers if kept not in free]
            self._buffers.append(buffer := _Buffer(num_bytes))
        return _values(buffer.lend(), shape, dtype)

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """Return an array as a tensor. Other processes receive it without a copy if it came from ``Lender.array``."""
        tensor = torch.from_numpy(array)
        for buffer in self._buffers:
            is_first = array.ctypes.data == buffer.memory.data_ptr() + _HEADER
            # A buffer is given back once, so a second tensor of the same values is copied.
            if is_first and array.flags.c_contiguous and not buffer.memory[0]:
                buffer.memory[0] = 1
                lent = tensor.as_subclass(_Lent)
                lent.memory = buffer.memory
                return lent
        return tensor


class _Buffer:
    """A block of shared memory. Its loan is the array that is the base of all views of the lent values."""

    def __init__(self, num_bytes: int) -> None:
        self.memory: Tensor = torch.zeros(num_bytes, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self._loan: weakref.ref[Bytes] | None = None

    def lend(self) -> Bytes:
        loan: Bytes = self.memory.numpy()
        self._loan = weakref.ref(loan)
        return loan

    @property
    def is_free(self) -> bool:
        return (self._loan is None or self._loan() is None) and not self.memory[0]


class _Lent(Tensor):
    """A tensor in a buffer. The receiving process gets a plain tensor, and gives the buffer back after use."""

    memory: Tensor
    """The buffer, uint8 of shape (bytes,)."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _receive, (self.memory, tuple(self.shape), self.numpy().dtype)


def _receive(memory: Tensor, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
    """Return the tensor in a buffer, and give the buffer back once nothing uses its memory."""
    loan = memory.numpy()
    values = _values(loan, shape, dtype)
    # The storage of the tensor keeps this array alive, so the finalizer runs after the last view is gone.
    weakref.finalize(values, _give_back, loan, os.getpid()).atexit = False
    return torch.from_numpy(values)


def _values(loan: Bytes, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    return loan[_HEADER : _HEADER + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _give_back(loan: Bytes, receiver: int) -> None:
    if os.getpid() == receiver:  # forked processes inherit the finalizer
        loan[0] = 0
