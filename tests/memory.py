"""Measure the memory that a piece of work uses in this process."""

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_PROCESS = Path("/proc/self")


@contextmanager
def peak_growth() -> Iterator[Callable[[], int]]:
    """Measure the block inside. Yield a function that returns the peak growth of resident memory, in bytes."""
    gc.collect()
    (_PROCESS / "clear_refs").write_text("5", encoding="ascii")  # resets the peak
    before = _kilobytes("VmRSS")
    yield lambda: 1024 * (_kilobytes("VmHWM") - before)


def _kilobytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", (_PROCESS / "status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1])
