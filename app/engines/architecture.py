"""The properties of this machine that compiled models depend on: its processor, its GPU and its granted cores.

CPU time of containers is bounded by cgroups, not by affinity: Documentation/admin-guide/cgroup-v2.rst and
Documentation/scheduler/sched-bwc.rst of the kernel.
"""

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
    """Return those properties of the processor that a model's numbers in ``precision`` depend on.

    For a GPU this is its compute capability, such as ``SM90``. For a CPU it is ``platform.machine()``, and for int8 and
    int4 on x86 also whether it has VNNI: see ``adds_products_in_16_bits``.

    Raises:
        EngineError: ``device`` is the GPU, and this machine has none.
    """
    if device == "gpu":
        if (capability := compute_capability()) is None:
            raise EngineError(
                "this machine has no GPU that PyTorch finds: choose the device cpu, or another machine"
            ).of("gpu.missing")
        return capability
    machine = platform.machine()
    if precision in ("int8", "int4") and machine in _X86:
        return f"{machine} {'without' if adds_products_in_16_bits() else 'with'} VNNI"
    return machine


def adds_products_in_16_bits() -> bool:
    """Return whether sums of two 8-bit products saturate at 16 bits on this machine: on x86 without VNNI.

    There, weights of 8 bits give other answers than elsewhere
    (https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html, on VPMADDUBSW).
    """
    return platform.machine() in _X86 and _VNNI.isdisjoint(cpu_flags())


def compute_capability() -> str | None:
    """Return the compute capability of this machine's GPU, such as ``SM90``; None without a GPU."""
    import torch  # takes seconds, and only GPUs need it

    return "SM{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else None


def usable_cores() -> int:
    """Return the number of whole cores that affinity and cgroups grant this process, at least 1.

    With more threads than that, the kernel stops some in turn, and the others wait for them.
    """
    return max(1, math.floor(min(len(os.sched_getaffinity(0)), granted_cores())))


def cpu_flags() -> frozenset[str]:
    """Return the CPU's features by their Linux names; an empty set if the kernel lists none."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


_MOUNT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def granted_cores() -> float:
    """Return the CPU time in seconds that cgroups grant this process per second; infinite without a limit."""
    return min(map(_quota, _cgroups()), default=math.inf)


def granted_memory() -> float:
    """Return the bytes of memory that cgroups of version 2 still grant this process; infinite without a limit."""
    return min(map(_room, _cgroups()), default=math.inf)


def _cgroups() -> Iterator[Path]:
    """Yield the folders of the cgroups that may limit this process: its own, and all around it.

    In a container the path can be the host's, which does not exist there. Then the mount itself is the container's
    cgroup.
    """
    for line in (_text(_OWN) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in (_MOUNT / (controllers or "unified"), _MOUNT / "cpu" if controllers else _MOUNT):
            own = mount / path.lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(mount))


def _quota(cgroup: Path) -> float:
    """Return the limit of one cgroup, of version 2 or 1, in cores."""
    quota, period = (_text(cgroup / "cpu.max") or "max 1").split()
    if quota == "max":
        quota, period = _text(cgroup / "cpu.cfs_quota_us") or "-1", _text(cgroup / "cpu.cfs_period_us") or "1"
    return int(quota) / int(period) if int(quota) > 0 else math.inf


def _room(cgroup: Path) -> float:
    """Return the bytes that one cgroup of version 2 may still take. Cached files make way for them."""
    limit, used = (_text(cgroup / name) for name in ("memory.max", "memory.current"))
    if limit is None or used is None or limit.strip() == "max":
        return math.inf
    cached = dict(line.split() for line in (_text(cgroup / "memory.stat") or "").splitlines()).get("inactive_file", 0)
    return max(0.0, int(limit) - int(used) + int(cached))


def _text(file: Path) -> str | None:
    """Return the file's text; None if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return None
