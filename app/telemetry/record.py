"""The records that training reports: one per step, one per epoch."""

import json
import resource
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import orjson
from pydantic import BaseModel, ConfigDict

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
