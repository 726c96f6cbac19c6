"""State of this process: what is changed within a block and restored after it, and what holds for its life."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MALLOC_PARAMETERS = (
    # M_MMAP_THRESHOLD, at its maximum. Larger blocks are mapped, and returned when they are freed.
    (-3, 32 * 2**20),
    # M_TRIM_THRESHOLD, the free bytes at the end of the heap before any are returned.
    (-1, 2**31 - 1),
)
"""Numbers from glibc's malloc.h."""


@contextmanager
def sigterm_calls(action: Callable[[], object]) -> Iterator[None]:
    """Call ``action`` on SIGTERM within the block, instead of ending the process."""
    before = signal.signal(signal.SIGTERM, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def sigterm_exits() -> AbstractContextManager[None]:
    """Raise SystemExit on SIGTERM within the block, so that blocks that clean up are left in order."""
    return sigterm_calls(lambda: sys.exit(128 + signal.SIGTERM))


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable within the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def spare_loopback() -> None:
    """Have this process, and those that it starts, reach this machine itself and not through a proxy.

    With ``HTTP_PROXY`` alone, a proxy would be asked for the cluster's own addresses.
    """
    spared = [entry for name in ("no_proxy", "NO_PROXY") for entry in os.environ.get(name, "").split(",") if entry]
    # A star means every host, but only if it is alone.
    hosts = ["*"] if "*" in map(str.strip, spared) else dict.fromkeys([*spared, *_LOOPBACK])
    # Programs read either of them, some the lower case first.
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)


def keep_freed_memory() -> None:
    """Have glibc keep freed memory, in a process that trains once. With other C libraries do nothing.

    By default glibc returns much of it to the system, and each step takes the same memory again, page by page.
    Do not call this in a process that trains many times: it would grow from one training to the next.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in _MALLOC_PARAMETERS:
            mallopt(parameter, value)


def return_freed_memory() -> None:
    """Return the free heap memory of this process to the system. With a C library other than glibc, do nothing.

    glibc keeps freed blocks of up to 32 MB and splits them for small allocations, until no tensor fits into the rest.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
