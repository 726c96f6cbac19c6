"""The machine, versions and date of a measurement, and the CPU time and memory that it took."""

import ctypes
import gc
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil

from app.engines.architecture import cpu_flags, usable_cores

_SAMPLE_S = 0.05
"""Seconds between two samples of the CPU time."""
_PROCESS = Path("/proc/self")
_MMAP_THRESHOLD = -3
"""From glibc's malloc.h."""
_FEATURES = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")


def machine() -> str:
    """The processor, its cores as this process sees them, and memory; nothing that names the machine."""
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    model = found[1] if found else platform.machine()
    cores = usable_cores()
    return (
        f"{cores} core{'s' if cores > 1 else ''} of {model}, {psutil.virtual_memory().total / 2**30:.0f} GiB of memory"
    )


def cpu_features() -> tuple[str, ...]:
    """Return those instruction sets of this CPU that matter to compiled models, by Linux's names."""
    flags = cpu_flags()
    return tuple(feature for feature in _FEATURES if feature in flags)


def versions(packages: Sequence[str]) -> str:
    """Python's version and those of ``packages``."""
    named = [f"{package} {version(package)}" for package in packages]
    return ", ".join([f"Python {platform.python_version()}", *named])


def today() -> str:
    """The date in UTC."""
    return f"{datetime.now(UTC):%Y-%m-%d}"


def load_average() -> str:
    """Processes that ran or waited in the last 1, 5 and 15 minutes."""
    return ", ".join(f"{load:.1f}" for load in os.getloadavg())


@dataclass(frozen=True)
class Conditions:
    """Date and duration of a measurement, and the machine's load before and after it. Create it before measuring.

    If the load before is above 0.5, other work used part of the cores. Single figures are then worth little. Ratios of
    measurements taken in turns are more reliable.
    """

    began_s: float = field(default_factory=time.monotonic)
    load_before: str = field(default_factory=load_average)

    def __str__(self) -> str:
        minutes = (time.monotonic() - self.began_s) / 60
        duration = f"{minutes:.0f}" if minutes >= 10 else f"{minutes:.1f}"
        return (
            f"{today()}, {duration} minutes. "
            f"Load average over 1, 5 and 15 minutes: {self.load_before} before, {load_average()} after."
        )


def busy_s() -> float:
    """CPU seconds that all processes of the machine have used since it started, on all cores."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


@dataclass(frozen=True)
class CpuUse:
    """CPU time of the whole machine over a period, sampled."""

    unix_s: list[float] = field(default_factory=list)
    """Unix times of the samples."""
    busy_s: list[float] = field(default_factory=list)
    """``busy_s()`` at each sample."""

    def between(self, start_s: float, end_s: float) -> float:
        """CPU seconds used between two Unix times, interpolated between samples."""
        start, end = np.interp([start_s, end_s], self.unix_s, self.busy_s)
        return float(end - start)


@contextmanager
def record_cpu_use() -> Iterator[CpuUse]:
    """Sample the machine's CPU time in a thread while the block runs. It includes other work on the machine."""
    use, ended = CpuUse(), threading.Event()

    def sample() -> None:
        while True:
            use.unix_s.append(time.time())
            use.busy_s.append(busy_s())
            if ended.wait(_SAMPLE_S):
                return

    thread = threading.Thread(target=sample, name="cpu use", daemon=True)
    thread.start()
    try:
        yield use
    finally:
        ended.set()
        thread.join()


@contextmanager
def peak_growth() -> Iterator[Callable[[], int]]:
    """Measure the block inside. Yield a function that returns the peak growth of resident memory, in bytes.

    From here on, glibc returns blocks of at least 1 MiB once they are freed, so that they are not counted.
    """
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**20)
    gc.collect()
    (_PROCESS / "clear_refs").write_text("5", encoding="ascii")  # resets the peak
    before = _kilobytes("VmRSS")
    yield lambda: 1024 * (_kilobytes("VmHWM") - before)


def _kilobytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", (_PROCESS / "status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1])
