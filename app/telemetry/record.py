"""The records that training reports: one per step, one per epoch."""

import json
import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

if TYPE_CHECKING:  # who only reads records, such as the command line, may lack torch
    import torch


class Record(BaseModel):
    """One line of ``metrics.jsonl``. NaN and Infinity are written as Python's ``json`` writes and reads them."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    kind: ClassVar[Literal["step", "epoch"]]
    """A step or an epoch, which ends with this record."""
    step: int
    epoch: int

    def scalars(self) -> dict[str, float]:
        """Return its numbers by their keys, such as ``loss`` and ``memory.peak_bytes``."""
        return numbers(self.model_dump())


def flatten(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested fields by dotted keys, such as ``memory.peak_bytes``."""
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def numbers(fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among nested fields by dotted keys."""
    return {
        key: value for key, value in flatten(fields) if isinstance(value, int | float) and not isinstance(value, bool)
    }


def tag_of(kind: str, key: str) -> str:
    """Return the name of a record's number in TensorBoard and trackers, such as ``step/memory/peak_bytes``.

    Seconds of phases are a group of their own, apart from the losses of the epoch: ``phase_s/forward``.
    """
    tag = key.replace(".", "/")
    return tag if tag.startswith("phase_s/") else f"{kind}/{tag}"


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return a line of ``metrics.jsonl``; None if it is torn."""
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:
        # Only Python's own parser reads NaN and Infinity. Otherwise the line is torn.
        try:
            entry = json.loads(line)
        except ValueError:
            return None
    return entry if isinstance(entry, dict) and "step" in entry else None


class MemoryRecord(BaseModel):
    """A worker's peak of memory since it started."""

    peak_bytes: int
    """On a GPU: the peak of its tensors. On a CPU: the peak of the whole process (resident set)."""

    reserved_bytes: int | None = None
    """The peak that torch's allocator has taken from the GPU."""

    fragmentation: float | None = None
    """1 - peak / reserved: the share of the reserved memory that no tensor used at the peak."""


Medium = Literal["memory", "disk", "network"]
"""Where samples are read from."""
Bound = Literal["decoding", "cores", "memory", "disk", "network"]
BOUNDS: dict[Bound, str] = {
    "decoding": "decoding",
    "cores": "CPU cores",
    "memory": "free memory",
    "disk": "the disk",
    "network": "the network",
}
"""What may bound reading, in words."""
MAX_STALL = 0.02
"""Share of the time that training may wait for data, before reading is changed or explained."""


_SCHEDULE = Path("/proc/thread-self/schedstat")


class ReadAhead(NamedTuple):
    """How samples are read ahead."""

    processes: int
    """0: the training process reads."""
    prefetch: int
    """Micro-batches that each of them reads ahead."""


class ReadTime(NamedTuple):
    """The time that reading took."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    """Seconds on a core."""
    queued_s: float = 0.0
    """Seconds ready to run, while others had the cores."""

    def __add__(self, other: "ReadTime") -> "ReadTime":  # type: ignore[override]
        return ReadTime(*(own + more for own, more in zip(self, other, strict=True)))

    def __sub__(self, earlier: "ReadTime") -> "ReadTime":
        return ReadTime(*(own - before for own, before in zip(self, earlier, strict=True)))

    @classmethod
    def now(cls, of_process: bool) -> Self:
        """Return the clocks of this thread. ``of_process``: with the CPU time of all threads of the process."""
        try:
            # Nanoseconds on a core, nanoseconds ready to run, and turns: Documentation/scheduler/sched-stats.rst.
            queued_s = int(_SCHEDULE.read_bytes().split()[1]) / 1e9
        except (OSError, IndexError):  # only Linux counts it
            queued_s = 0.0
        return cls(time.monotonic(), time.process_time() if of_process else time.thread_time(), queued_s)


NO_TIME = ReadTime()


def bound_of(read: ReadTime, source: Medium) -> Bound:
    """Return what reading spends most of its time on."""
    spent: dict[Bound, float] = {"decoding": read.cpu_s, "cores": read.queued_s}
    if source != "memory":
        spent[source] = read.seconds - read.cpu_s - read.queued_s
    return max(spent, key=lambda bound: spent[bound])


class ReadingRecord(BaseModel):
    """How the first worker's micro-batches of a step were read. Those of several steps can be added, in order."""

    processes: int
    seconds: float
    """Of all processes together, as are the next two."""
    cpu_s: float
    queued_s: float
    source: Medium
    limit: Literal["cores", "memory"] | None = None
    """What prevents more processes, with ``train.loader.num_workers: auto``."""

    def __add__(self, later: "ReadingRecord") -> "ReadingRecord":
        read = self._time + later._time
        return later.model_copy(update=read._asdict())

    def __str__(self) -> str:
        """Say what bounds reading, such as ``bound by decoding, read by 2 processes``."""
        return f"bound by {BOUNDS[self.limit or bound_of(self._time, self.source)]}, {describe_readers(self.processes)}"

    @property
    def _time(self) -> ReadTime:
        return ReadTime(self.seconds, self.cpu_s, self.queued_s)


def parse_reading(given: object) -> ReadingRecord | None:
    """Return the ``reading`` of a step's line; None if it has none, or a damaged one."""
    try:
        return ReadingRecord.model_validate(given) if given else None
    except ValidationError:
        return None


def describe_readers(processes: int) -> str:
    """Say which processes read, such as ``read by 2 processes``."""
    return {0: "read by the training process", 1: "read by 1 process"}.get(processes, f"read by {processes} processes")


def memory_record(device: "torch.device") -> MemoryRecord:
    """Return the peak of this process on ``device``. Nothing is reset, so it never falls.

    Fragmentation assumes that both peaks came together. The allocator returns memory only when it must.
    """
    if device.type == "cpu":
        # Linux counts KiB.
        return MemoryRecord(peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    import torch

    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    fragmentation = 1 - allocated / reserved if reserved else 0.0
    return MemoryRecord(peak_bytes=allocated, reserved_bytes=reserved, fragmentation=fragmentation)
