"""Memory that was freed, and that the C library keeps."""

import ctypes


def return_freed_memory() -> None:
    """Give the system what is free in the heap of this process; with a C library other than glibc, do nothing.

    glibc keeps freed blocks of up to 32 MB, and cuts small pieces from them, until no tensor fits into what is left.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
