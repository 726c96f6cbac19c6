"""The phases of a training step, and the time that each takes, read from a trace of torch.profiler."""

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from torch.profiler import record_function

from app.torch_internals import is_profiling


class Phase(StrEnum):
    """The phases of a step. The value is the name of its mark in a trace."""

    DATA = "rayloom.data"
    FORWARD = "rayloom.forward"
    BACKWARD = "rayloom.backward"
    OPTIMIZER = "rayloom.optimizer"


def phase(name: Phase) -> AbstractContextManager[object]:
    """Mark the block as one phase of the step. Phases cannot be nested.

    A mark costs about 15 µs while a profiler records, and otherwise 1 µs.
    """
    if not is_profiling():
        return nullcontext()  # record_function would cost the same as while recording
    return record_function(name.value)


class StepTime(BaseModel):
    """The time of some steps of one worker, shared out.

    ``compute`` to ``other`` are shares of the steps' time that add up to 1. ``hidden_communication`` is the share in
    which a collective ran behind computation. It is counted in the others too.
    """

    worker: int
    steps: int
    step_ms: float
    compute: float
    communication: float
    data: float
    optimizer: float
    other: float
    hidden_communication: float

    def __str__(self) -> str:
        """Return one line for a person."""
        return (
            f"{self.steps} steps of {self.step_ms:,.1f} ms: compute {self.compute:.1%}, "
            f"communication {self.communication:.1%}, data {self.data:.1%}, optimizer {self.optimizer:.1%}, "
            f"other {self.other:.1%}"
        )


def read_step_time(trace: bytes, worker: int, steps: int) -> StepTime:
    """Share out the time of the first ``steps`` steps of a Chrome trace that torch.profiler wrote.

    Every instant counts once. It is communication if a collective runs and nothing is computed. Otherwise it belongs to
    the phase that launched what the GPU computes, or, as always without a GPU, to the phase that the loop is in.

    Raises:
        ValueError: the trace has fewer steps.
    """
    events = _read_events(trace)
    spans = sorted((event for event in events if event.is_step), key=lambda event: event.start)[:steps]
    if len(spans) < max(steps, 1):
        raise ValueError(f"the trace has {len(spans)} steps, expected {max(steps, 1)}")
    phases = [event for event in events if event.phase and event.thread == spans[0].thread]
    work = _computation(events, spans[0].thread)
    collectives = [event for event in events if event.is_collective]

    timeline = _Timeline.of([*spans, *phases, *work, *collectives])
    owner = np.full(len(timeline.widths), _Share.OTHER)
    # Later assignments win: the work of the GPU over the phase of the loop, and communication over both.
    for share, share_events in (*_by_share(phases, phases).items(), *_by_share(work, phases).items()):
        owner[timeline.covered(share_events)] = share
    computing, communicating = timeline.covered(work), timeline.covered(collectives)
    owner[communicating & ~computing] = _Share.COMMUNICATION
    inside = timeline.covered(spans)

    def share_of(instants: NDArray[np.bool_]) -> float:
        return float(timeline.widths[inside & instants].sum() / timeline.widths[inside].sum())

    return StepTime(
        worker=worker,
        steps=steps,
        step_ms=float(timeline.widths[inside].sum()) / 1000 / steps,
        hidden_communication=share_of(communicating & computing),
        **{share.name.lower(): share_of(owner == share) for share in _Share},
    )


class _Share(IntEnum):
    OTHER = 0
    DATA = 1
    OPTIMIZER = 2
    COMPUTE = 3
    COMMUNICATION = 4


_SHARES = {
    Phase.DATA: _Share.DATA,
    Phase.FORWARD: _Share.COMPUTE,
    Phase.BACKWARD: _Share.COMPUTE,
    Phase.OPTIMIZER: _Share.OPTIMIZER,
}
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


class _Event(NamedTuple):
    """A span of the trace. ``launched`` is when the process started it. All times are in µs."""

    category: str
    name: str
    thread: tuple[Any, Any]
    launched: float
    start: float
    end: float

    @property
    def is_step(self) -> bool:
        return self.category == "user_annotation" and self.name.startswith("ProfilerStep#")

    @property
    def phase(self) -> Phase | None:
        return Phase(self.name) if self.category == "user_annotation" and self.name in set(Phase) else None

    @property
    def is_collective(self) -> bool:
        """Whether workers communicate.

        NCCL does so in kernels. Gloo does so in threads of its own, as ``gloo:all_reduce`` and the like. The caller's
        ``c10d::allreduce_`` ends when the collective is queued.
        """
        match self.category:
            case "kernel":
                return self.name.startswith("nccl")
            case "user_annotation":
                return self.name.startswith("gloo:")
            case _:
                return self.category == "cpu_op" and self.name.startswith(("c10d::", "_c10d_functional::"))


def _read_events(trace: bytes) -> list[_Event]:
    """Return all spans of a trace."""
    # "X" marks events with a start and a duration. Others, such as names of threads, have none.
    entries = [entry for entry in json.loads(trace)["traceEvents"] if entry.get("ph") == "X"]
    launches = {
        entry["args"]["correlation"]: entry["ts"]
        for entry in entries
        if entry.get("cat") in _LAUNCHES and "correlation" in entry.get("args", {})
    }
    return [
        _Event(
            category=entry.get("cat", ""),
            name=entry["name"],
            thread=(entry["pid"], entry["tid"]),
            # A kernel has the correlation of the call that launched it.
            launched=launches.get(entry.get("args", {}).get("correlation"), entry["ts"]),
            start=entry["ts"],
            end=entry["ts"] + entry["dur"],
        )
        for entry in entries
    ]


def _computation(events: Iterable[_Event], thread: tuple[Any, Any]) -> list[_Event]:
    """Return the kernels of the GPU or, without one, the operations of the loop's thread."""
    kernels = [event for event in events if event.category in _KERNELS and not event.is_collective]
    return kernels or [
        event
        for event in events
        if event.category == "cpu_op" and event.thread == thread and event.name.startswith("aten::")
    ]


def _by_share(events: Iterable[_Event], phases: Sequence[_Event]) -> dict[_Share, list[_Event]]:
    """Group ``events`` by the share of the phase in which they were launched."""
    phases = sorted(phases, key=lambda event: event.start)
    starts = [event.start for event in phases]
    shares: dict[_Share, list[_Event]] = {share: [] for share in _Share}
    for event in events:
        # Phases are never nested, so only the last one that began can hold the event.
        index = bisect_right(starts, event.launched) - 1
        found = phases[index].phase if index >= 0 and event.launched <= phases[index].end else None
        shares[_SHARES[found] if found else _Share.OTHER].append(event)
    return shares


class _Timeline(NamedTuple):
    """Time cut into pieces at every start and end of some events. ``widths`` are the lengths of the pieces, in µs."""

    edges: NDArray[np.float64]
    widths: NDArray[np.float64]

    @classmethod
    def of(cls, events: Iterable[_Event]) -> Self:
        edges = np.unique([time for event in events for time in (event.start, event.end)])
        return cls(edges, np.diff(edges))

    def covered(self, events: Sequence[_Event]) -> NDArray[np.bool_]:
        """Return which pieces lie in at least one of ``events``."""
        # The running sum counts the events that lie over each piece.
        changes = np.zeros(len(self.edges), dtype=np.int64)
        np.add.at(changes, np.searchsorted(self.edges, [event.start for event in events]), 1)
        np.add.at(changes, np.searchsorted(self.edges, [event.end for event in events]), -1)
        return changes.cumsum()[:-1] > 0
