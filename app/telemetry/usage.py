"""The device-hours of a run, and its energy where the hardware counts it."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, TypeAdapter, ValidationError
from upath import UPath

from app.conditional import read
from app.storage import to_path, write_atomically
from app.telemetry.mirror import Mirror
from app.warnings import BestEffort, repeat_in_background

USAGE_FILE = "usage.json"
_INTERVAL_S = 10.0
_POWERCAP = Path("/sys/class/powercap")


class Usage(BaseModel):
    """What one attempt of a run took: from the start of its workers to their end."""

    began: datetime
    seconds: float
    workers: int
    device: Literal["cpu", "gpu"]
    cpus_per_worker: float
    energy_j: dict[str, float] = {}
    """Joules by source: ``cpu`` for the processor packages of the first worker's machine, with all that runs there;
    ``gpu`` for the first worker's GPU. A source that cannot be read is missing."""

    @property
    def device_hours(self) -> float:
        """Hours of GPUs, or of CPU cores where there are none."""
        devices = self.workers * (1 if self.device == "gpu" else self.cpus_per_worker)
        return devices * self.seconds / 3600


class Counter(Protocol):
    """A source of energy figures."""

    def read(self) -> float:
        """Return the joules so far, counted from any point. It never decreases."""
        ...


@dataclass
class RaplCounter:
    """Intel's and AMD's running average power limit: one file for each processor package, in µJ.

    See Documentation/power/powercap in the Linux kernel. Most systems let only root read it.
    """

    folder: Path = _POWERCAP
    _last: dict[Path, int] = field(default_factory=dict)
    _total_uj: int = 0

    def read(self) -> float:
        """Return the joules since the first call. Raises OSError if no package can be read."""
        # Names with two colons are zones within a package, whose energy the package counts already.
        packages = [path for path in sorted(self.folder.glob("intel-rapl:*")) if path.name.count(":") == 1]
        if not packages:
            raise FileNotFoundError(f"{self.folder} has no package of intel-rapl")
        for package in packages:
            now = int((package / "energy_uj").read_text())
            passed = now - self._last.get(package, now)
            if passed < 0:  # the counter has begun again
                passed += int((package / "max_energy_range_uj").read_text())
            self._total_uj += passed
            self._last[package] = now
        return self._total_uj / 1e6


@dataclass
class GpuCounter:
    """NVML's total energy counter of one GPU, in mJ since the driver was loaded. Volta and later have it."""

    uuid: str

    def __post_init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml: Any = pynvml
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{self.uuid}")

    def read(self) -> float:
        """Return the joules so far."""
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3


class UsageMeter:
    """Writes what a run has taken so far, every few seconds, so that a killed attempt is counted too."""

    def __init__(
        self,
        mirror: Mirror,
        usage: Usage,
        sources: Mapping[str, Callable[[], Counter]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``usage`` describes the attempt that begins now. A source that cannot be opened is left out."""
        self._mirror, self._usage, self._clock = mirror, usage, clock
        self._began = clock()
        self._counters: dict[str, tuple[Counter, float]] = {}
        for name, open_counter in sources.items():
            with suppress(Exception):
                # Without a driver or the right to read, or on an older GPU, the energy is not measured.
                counter = open_counter()
                self._counters[name] = (counter, counter.read())
        self._earlier: list[Usage] = []
        self._writing = BestEffort(f"{USAGE_FILE} cannot be written")

    @contextmanager
    def measure(self, interval_s: float = _INTERVAL_S) -> Iterator[None]:
        """Write now, every few seconds, and at the end of the block."""
        self._writing(self._read_earlier)
        self.write()
        with repeat_in_background(self.write, interval_s, name="usage"):
            yield
        self.write()

    def write(self) -> None:
        """Write what the attempt has taken so far."""
        self._writing(self._write)

    def _read_earlier(self) -> None:
        file = self._mirror.fetch(USAGE_FILE)
        self._earlier = _parse(file.read_bytes()) if file.exists() else []

    def _write(self) -> None:
        energy_j = {name: counter.read() - start for name, (counter, start) in self._counters.items()}
        now = self._usage.model_copy(update={"seconds": self._clock() - self._began, "energy_j": energy_j})
        content = json.dumps([usage.model_dump(mode="json") for usage in (*self._earlier, now)], indent=1)
        write_atomically(to_path(self._mirror.folder / USAGE_FILE), content.encode())


def begin_usage(workers: int, device: Literal["cpu", "gpu"], cpus_per_worker: float) -> Usage:
    """Describe an attempt that begins now."""
    return Usage(began=datetime.now(UTC), seconds=0.0, workers=workers, device=device, cpus_per_worker=cpus_per_worker)


def read_usage(run_folder: UPath) -> list[Usage]:
    """Return what each attempt of a run took, the first one first."""
    return _parse(read(run_folder / USAGE_FILE) or b"[]")


def _parse(content: bytes) -> list[Usage]:
    try:
        return TypeAdapter(list[Usage]).validate_json(content)
    except ValidationError:
        return []
