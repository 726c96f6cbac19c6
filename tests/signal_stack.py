"""The alternate signal stack of a thread, on which Python's signal handlers run."""

import ctypes


class _Stack(ctypes.Structure):
    """``stack_t`` of sigaltstack(2)."""

    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def signal_stack() -> tuple[int, int]:
    """Return the address and size of this thread's signal stack, or zeros."""
    stack = _Stack()
    assert ctypes.CDLL(None).sigaltstack(None, ctypes.byref(stack)) == 0
    return stack.address or 0, stack.size
