"""What compiled models depend on of this machine."""

import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from app.config import ComputePrecision
from app.errors import EngineError

Device = Literal["cpu", "gpu"]
_CPU_INFO = Path("/proc/cpuinfo")
_X86 = ("x86_64", "AMD64")
_VNNI = {"avx512_vnni", "avx_vnni"}


def architecture_of(device: Device, precision: ComputePrecision) -> str:
    """The processor of this machine, as far as a model's numbers in ``precision`` depend on it.

    Of a GPU its compute capability, such as ``SM90``; of a CPU ``platform.machine()``. In int8 it matters whether an
    x86 CPU has VNNI: without, a sum of two products of 8 bits saturates at 16, so that the same file gives other
    answers (https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html, on VPMADDUBSW).

    Raises:
        EngineError: ``device`` is the GPU, and this machine has none.
    """
    if device == "gpu":
        if (capability := compute_capability()) is None:
            raise EngineError("this machine has no GPU that PyTorch finds: choose the device cpu, or another machine")
        return capability
    machine = platform.machine()
    if precision == "int8" and machine in _X86:
        return f"{machine} {'without' if _VNNI.isdisjoint(cpu_flags()) else 'with'} VNNI"
    return machine


def compute_capability() -> str | None:
    """Of this machine's GPU, such as ``SM90``; None where there is none."""
    import torch  # which takes seconds, and only GPUs need

    return "SM{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else None


def usable_cores() -> int:
    """The cores that this process may run on, or as many whole ones as its cgroups grant it CPU time for.

    Threads that share less are stopped in turn, and the others wait for them.
    """
    return max(1, math.floor(min(len(os.sched_getaffinity(0)), granted_cores())))


def cpu_flags() -> frozenset[str]:
    """What this CPU has, as Linux names it; nothing where the kernel lists nothing."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


_MOUNT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def granted_cores() -> float:
    """Seconds of CPU time that this process has in a second; infinite where nothing bounds it."""
    return min(map(_quota, _cgroups()), default=math.inf)


def _cgroups() -> Iterator[Path]:
    """The folders of the cgroups that may bound it: its own, and those around, whose bound holds for all in them.

    In a container the path can be the host's, which is not there; then the mount itself is the container's cgroup.
    """
    for line in (_text(_OWN) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in (_MOUNT / (controllers or "unified"), _MOUNT / "cpu" if controllers else _MOUNT):
            own = mount / path.lstrip("/")
            yield from (each for each in (own, *own.parents) if each.is_relative_to(mount))


def _quota(cgroup: Path) -> float:
    """Of one cgroup, in version 2 or 1."""
    quota, period = (_text(cgroup / "cpu.max") or "max 1").split()
    if quota == "max":
        quota, period = _text(cgroup / "cpu.cfs_quota_us") or "-1", _text(cgroup / "cpu.cfs_period_us") or "1"
    return int(quota) / int(period) if int(quota) > 0 else math.inf


def _text(file: Path) -> str | None:
    """None if it is not there, or not to be read."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return None
