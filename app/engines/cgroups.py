"""How much of the machine this process is granted: the CPU time of containers is bounded by cgroups, not by affinity.

Documentation/admin-guide/cgroup-v2.rst and Documentation/scheduler/sched-bwc.rst of the kernel.
"""

import math
from collections.abc import Iterator
from pathlib import Path

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
