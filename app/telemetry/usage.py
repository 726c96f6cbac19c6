"""The device-hours of a run, and its energy and GPU utilisation where the hardware measures them."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Protocol

from pydantic import BaseModel, TypeAdapter, ValidationError
from upath import UPath

from app.best_effort import BestEffort, repeat_in_background
from app.shared_files import read
from app.storage import to_path, write_atomically
from app.telemetry.mirror import Mirror

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
    machine: str = ""
    """The first worker's."""
    code: str = ""
    """sha256 of the library's code."""
    energy_j: dict[str, float] = {}
    """Joules by source: ``cpu`` for the processor packages of the first worker's machine, with all that runs there;
    ``gpu`` for the first worker's GPU. A source that cannot be read is missing."""
    gpu_busy_s: float | None = None
    """Seconds in which the first worker's GPU ran a kernel of any process; None if not measured."""

    @property
    def device_hours(self) -> float:
        """Hours of GPUs, or of CPU cores where there are none."""
        devices = self.workers * (1 if self.device == "gpu" else self.cpus_per_worker)
        return devices * self.seconds / 3600


class Counter(Protocol):
    """A source of joules or busy seconds."""

    def read(self) -> float:
        """Return the amount so far, from an arbitrary start. It never decreases."""
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
class _NvmlGpu:
    uuid: str

    def __post_init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml: Any = pynvml
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{self.uuid}")


class GpuCounter(_NvmlGpu):
    """NVML's counter of one GPU's total energy, in mJ since the driver was loaded. It needs Volta or later."""

    def read(self) -> float:
        """Return the joules so far."""
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3


class Utilisation(Protocol):
    """A source of the share of time in which a GPU runs a kernel."""

    def samples(self, after_us: int) -> list[tuple[int, float]]:
        """Return the samples later than ``after_us``, as pairs of a time in µs and a share."""
        ...

    def now(self) -> float:
        """Return the current share."""
        ...


class GpuUtilisation(_NvmlGpu):
    """NVML's utilisation of one GPU. The driver takes one to six samples a second and keeps the newest."""

    def samples(self, after_us: int) -> list[tuple[int, float]]:
        """Return the samples later than ``after_us``. A driver may take none while the GPU is idle."""
        kind = self._nvml.NVML_GPU_UTILIZATION_SAMPLES
        try:
            _, samples = self._nvml.nvmlDeviceGetSamples(self._handle, kind, after_us)
        except self._nvml.NVMLError:
            # There are none yet, or this driver keeps none.
            return []
        return [(sample.timeStamp, sample.sampleValue.uiVal / 100) for sample in samples]

    def now(self) -> float:
        """Return the share of the last second or less."""
        return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100


@dataclass
class BusyCounter:
    """The busy seconds of a GPU: the time between two reads, times the mean of the samples in between."""

    gpu: Utilisation
    clock: Callable[[], float]
    _newest_us: int = 0
    _busy_s: float = 0.0

    def __post_init__(self) -> None:
        self._read_s = self.clock()

    def read(self) -> float:
        """Return the busy seconds so far."""
        samples = {at_us: share for at_us, share in self.gpu.samples(self._newest_us) if at_us > self._newest_us}
        share = fmean(samples.values()) if samples else self.gpu.now()
        now_s = self.clock()
        self._busy_s += share * (now_s - self._read_s)
        self._read_s, self._newest_us = now_s, max(samples, default=self._newest_us)
        return self._busy_s


class UsageMeter:
    """Writes what a run has taken so far, every few seconds, so that a killed attempt is counted too."""

    def __init__(
        self,
        mirror: Mirror,
        usage: Usage,
        sources: Mapping[str, Callable[[], Counter]],
        utilisation: Callable[[], Utilisation] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Measure the attempt that begins now, in ``usage``. A source that cannot be opened is left out.

        Args:
            sources: functions that open the counters of joules.
            utilisation: function that opens the source of the GPU's utilisation.
        """
        self._mirror, self._usage, self._clock = mirror, usage, clock
        self._began = clock()
        opened = {name: _since_now(open_counter) for name, open_counter in sources.items()}
        self._energy = {name: joules for name, joules in opened.items() if joules}
        self._busy = _since_now(lambda: BusyCounter(utilisation(), clock)) if utilisation else None
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
        taken = {
            "energy_j": {name: joules() for name, joules in self._energy.items()},
            "gpu_busy_s": self._busy() if self._busy else None,
            "seconds": self._clock() - self._began,  # read last, because no GPU is busy for longer
        }
        now = self._usage.model_copy(update=taken)
        content = json.dumps([usage.model_dump(mode="json") for usage in (*self._earlier, now)], indent=1)
        write_atomically(to_path(self._mirror.folder / USAGE_FILE), content.encode())


def _since_now(open_counter: Callable[[], Counter]) -> Callable[[], float] | None:
    """Return a function that returns what a counter has counted from now on; None if it cannot be read.

    It cannot be read without a driver or permission, or on an older GPU.
    """
    with suppress(Exception):
        counter = open_counter()
        start = counter.read()
        return lambda: counter.read() - start
    return None


def begin_usage(workers: int, device: Literal["cpu", "gpu"], cpus_per_worker: float, **known: str) -> Usage:
    """Describe an attempt that begins now, with the ``machine`` and the ``code`` if they are ``known``."""
    began = datetime.now(UTC)
    return Usage(began=began, seconds=0.0, workers=workers, device=device, cpus_per_worker=cpus_per_worker, **known)


def read_usage(run_folder: UPath) -> list[Usage]:
    """Return what each attempt of a run took, the first one first."""
    return _parse(read(run_folder / USAGE_FILE) or b"[]")


def _parse(content: bytes) -> list[Usage]:
    try:
        return TypeAdapter(list[Usage]).validate_json(content)
    except ValidationError:
        return []
