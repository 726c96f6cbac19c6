"""Load by ``wrk``: so many connections, each of which sends its next request once the last one is answered.

https://github.com/wg/wrk
"""

import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import which
from typing import Self
from urllib.parse import urlsplit

import psutil
from pydantic import BaseModel

from benchmarks.serving.wire import Request

_SCRIPT = Path(__file__).with_name("requests.lua")
_TIMEOUT_S = 10
_MARK = "REPORT "
_STOLEN, _TRIES = 0.05, 5


class Report(BaseModel):
    """What the script prints at the end."""

    requests: int
    """Answers, of any status."""

    duration_us: int
    p50_us: int
    p99_us: int
    refused: int
    """Answers with status 400 or more."""

    connect: int
    read: int
    write: int
    timeout: int


@dataclass(frozen=True)
class Load:
    """What came of it, from the point of view of those who asked."""

    rate: float
    """Good answers a second."""

    p50_ms: float
    p99_ms: float
    errors: int
    """Answers that were not good, and connections that broke or waited for more than 10 s."""

    generator_busy: float
    """The share of its one core that wrk took: near 1, it could not have asked for more."""

    stolen: float
    """How much of a core the hypervisor gave to other machines meanwhile, where it tells."""

    cpu_us: float
    """CPU time of the whole machine for each answer, including wrk's."""


@dataclass(frozen=True)
class CpuTimes:
    """CPU time, in seconds."""

    machine_s: float
    """Of all processes."""

    children_s: float
    """Of this process's children that have ended."""

    stolen_s: float
    """Time of all cores that the hypervisor gave to other machines, if it reports this."""

    @classmethod
    def now(cls) -> Self:
        """Return the times since the machine and this process started."""
        machine, own = psutil.cpu_times(), os.times()
        busy_s = machine.user + machine.nice + machine.system + machine.irq + machine.softirq
        return cls(busy_s, own.children_user + own.children_system, machine.steal)

    def __sub__(self, earlier: "CpuTimes") -> "CpuTimes":
        """Return the time spent since ``earlier``."""
        return CpuTimes(
            self.machine_s - earlier.machine_s,
            self.children_s - earlier.children_s,
            self.stolen_s - earlier.stolen_s,
        )


class WrkMissingError(RuntimeError):
    """wrk is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "wrk, which makes the load, is not installed: install the Debian package wrk, apt-get install wrk"
        )


def require_wrk() -> None:
    """Raises WrkMissingError if it cannot be run."""
    if which("wrk") is None:
        raise WrkMissingError


def drive(url: str, requests: Sequence[Request], connections: int, seconds: int) -> Load:
    """Send the requests in turn, again and again.

    Args:
        url: scheme, host and port.

    Raises:
        WrkMissingError: it cannot be run.
        RuntimeError: it fails, or nothing was answered.
    """
    require_wrk()
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as temporary:
        files = [Path(temporary) / str(number) for number in range(len(requests))]
        for file, request in zip(files, requests, strict=True):
            file.write_bytes(request.raw(urlsplit(url).netloc))
        command = ["wrk", "--threads=1", f"--connections={connections}", f"--duration={seconds}s"]
        command += [f"--timeout={_TIMEOUT_S}s", f"--script={_SCRIPT}", url, "--", *map(str, files)]
        before = CpuTimes.now()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        spent = CpuTimes.now() - before
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} ended with {done.returncode}: {done.stderr or done.stdout}")
    return parse(done.stdout, spent)


def least_disturbed(load: Callable[[], Load]) -> Load:
    """Load again while other machines on this host take part of the cores, a few times at most.

    The load that lost least counts, with the errors of all.
    """
    loads = [load()]
    while loads[-1].stolen > _STOLEN and len(loads) < _TRIES:
        loads.append(load())
    return replace(min(loads, key=lambda each: each.stolen), errors=sum(each.errors for each in loads))


def parse(output: str, spent: CpuTimes) -> Load:
    """Return the load that wrk printed, with the CPU time spent meanwhile.

    Raises:
        RuntimeError: it printed no report, or nothing was answered.
    """
    line = next((line for line in output.splitlines() if line.startswith(_MARK)), None)
    if line is None:
        raise RuntimeError(f"wrk printed no report: {output}")
    report = Report.model_validate_json(line.removeprefix(_MARK))
    if not report.requests:
        raise RuntimeError(f"nothing was answered: {report}")
    return Load(
        rate=(report.requests - report.refused) / (seconds := report.duration_us / 1e6),
        p50_ms=report.p50_us / 1e3,
        p99_ms=report.p99_us / 1e3,
        errors=report.refused + report.connect + report.read + report.write + report.timeout,
        generator_busy=spent.children_s / seconds,
        stolen=spent.stolen_s / seconds,
        cpu_us=1e6 * spent.machine_s / report.requests,
    )
