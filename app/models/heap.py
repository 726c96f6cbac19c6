"""Freed memory that the C library does not return to the system."""

import ctypes


def return_freed_memory() -> None:
    """Return the free heap memory of this process to the system. With a C library other than glibc, do nothing.

    glibc keeps freed blocks of up to 32 MB and splits them for small allocations, until no tensor fits into the rest.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
