"""What a load of requests came to, and the programs that make one."""

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from shutil import which
from typing import Self

import psutil

from benchmarks.machine import busy_s

TIMEOUT_S = 10
"""The longest wait for an answer."""
_STOLEN, _TRIES = 0.05, 5


@dataclass(frozen=True)
class Load:
    """The results of a load, as the clients see them."""

    rate: float
    """Good answers a second."""

    p50_ms: float
    p99_ms: float
    errors: int
    """Answers that were not good, and connections that broke or waited for more than 10 s."""

    generator_busy: float
    """The share of one core that the load generator took: near 1, it could not have asked for more."""

    stolen: float
    """Share of a core that the hypervisor gave to other machines meanwhile; 0 if it does not report that."""

    cpu_us: float
    """CPU time of the whole machine for each answer, including the load generator's."""


@dataclass(frozen=True)
class CpuTimes:
    """CPU time, in seconds."""

    machine_s: float
    """CPU seconds of all processes."""

    children_s: float
    """CPU seconds of this process's ended children."""

    stolen_s: float
    """Time of all cores that the hypervisor gave to other machines, if it reports this."""

    @classmethod
    def now(cls) -> Self:
        """Return the times since the machine and this process started."""
        own = os.times()
        return cls(busy_s(), own.children_user + own.children_system, psutil.cpu_times().steal)

    def __sub__(self, earlier: "CpuTimes") -> "CpuTimes":
        """Return the time spent since ``earlier``."""
        return CpuTimes(
            self.machine_s - earlier.machine_s,
            self.children_s - earlier.children_s,
            self.stolen_s - earlier.stolen_s,
        )


class GeneratorMissingError(RuntimeError):
    """A load generator is not installed."""

    def __init__(self, generator: "Generator") -> None:
        program, package = generator.program, generator.package
        super().__init__(
            f"{program}, which makes the load, is not installed: install the Debian package {package}, "
            f"apt-get install {package}"
        )


@dataclass(frozen=True)
class Generator:
    """A program that makes a load with one thread."""

    program: str
    package: str
    """The Debian package that has it."""

    def require(self) -> None:
        """Raise GeneratorMissingError if the program is not installed."""
        if which(self.program) is None:
            raise GeneratorMissingError(self)

    def run(self, arguments: Sequence[str]) -> tuple[str, CpuTimes]:
        """Run the program; return its output and the CPU time spent meanwhile.

        Raises:
            GeneratorMissingError: the program is not installed.
            RuntimeError: it fails.
        """
        self.require()
        before = CpuTimes.now()
        done = subprocess.run([self.program, *arguments], capture_output=True, text=True, check=False)
        spent = CpuTimes.now() - before
        if done.returncode:
            raise RuntimeError(f"{self.program} ended with {done.returncode}: {done.stderr or done.stdout}")
        return done.stdout, spent


def least_disturbed(load: Callable[[], Load]) -> Load:
    """Load again while other machines on this host take part of the cores, a few times at most.

    The load that lost least counts, with the errors of all.
    """
    loads = [load()]
    while loads[-1].stolen > _STOLEN and len(loads) < _TRIES:
        loads.append(load())
    best = min(loads, key=lambda load: load.stolen)
    return replace(best, errors=sum(load.errors for load in loads))
