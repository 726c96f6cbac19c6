"""Shared memory for the micro-batches of a loader process. It is reused once nothing uses a micro-batch any more.

Each 4 KiB of new shared memory costs a page fault. Together, these take a quarter as long as decoding the pictures.
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
"""Bytes in front of the values, which stay aligned. The first byte is 1 while another process has the values."""
Bytes = NDArray[np.uint8]


class Lender:
    """Lends the buffers of a loader process."""

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an uninitialized array in a free buffer."""
        num_bytes = _HEADER + math.prod(shape) * dtype.itemsize
        free = [buffer for buffer in self._buffers if buffer.is_free]
        buffer = next((buffer for buffer in free if buffer.memory.nbytes >= num_bytes), None)
        if buffer is None:
            # Batches have grown, so the smaller buffers are of no use any more.
            self._buffers = [kept for kept in self._buffers if kept not in free]
            self._buffers.append(buffer := _Buffer(num_bytes))
        return _values(buffer.lend(), shape, dtype)

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """Return an array as a tensor. If it is one of ``array``, another process receives it without a copy."""
        tensor = torch.from_numpy(array)
        for buffer in self._buffers:
            is_first = array.ctypes.data == buffer.memory.data_ptr() + _HEADER
            if is_first and array.flags.c_contiguous:
                lent = tensor.as_subclass(_Lent)
                lent.memory = buffer.memory
                return lent
        return tensor


class _Buffer:
    """Shared memory. Its loan is the array that all views of the lent values have as their base."""

    def __init__(self, num_bytes: int) -> None:
        self.memory: Tensor = torch.empty(num_bytes, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self._loan: weakref.ref[Bytes] | None = None

    def lend(self) -> Bytes:
        loan: Bytes = self.memory.numpy()
        self._loan = weakref.ref(loan)
        return loan

    @property
    def is_free(self) -> bool:
        # In this order: the byte is set while the loan is in use.
        return (self._loan is None or self._loan() is None) and not self.memory[0]


class _Lent(Tensor):
    """A tensor in a buffer. The process that receives it gets a plain tensor, and gives the buffer back."""

    memory: Tensor
    """The buffer, uint8 of shape (bytes,)."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self.memory[0] = 1
        return _receive, (self.memory, tuple(self.shape), self.numpy().dtype)


def _receive(memory: Tensor, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
    """Return the tensor in a buffer. The buffer is given back when nothing uses its memory."""
    loan = memory.numpy()
    values = _values(loan, shape, dtype)
    # The tensor's storage refers to this very array.
    weakref.finalize(values, _give_back, loan, os.getpid()).atexit = False
    return torch.from_numpy(values)


def _values(loan: Bytes, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    return loan[_HEADER : _HEADER + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _give_back(loan: Bytes, receiver: int) -> None:
    if os.getpid() == receiver:  # a fork has the same finalizers
        loan[0] = 0
