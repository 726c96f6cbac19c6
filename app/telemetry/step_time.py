"""Where the time of training steps goes, read from a trace of torch.profiler."""

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from app.telemetry.phases import Phase


class StepTime(BaseModel):
    """Where the time of some steps went in one worker.

    ``compute`` to ``other`` are shares of the steps' time that add up to 1. ``hidden_communication`` is
    the share in which an exchange was under way behind computation, and is counted in the others.
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
        """As a person reads it."""
        return (
            f"{self.steps} steps of {self.step_ms:,.1f} ms: compute {self.compute:.1%}, "
            f"communication {self.communication:.1%}, data {self.data:.1%}, optimizer {self.optimizer:.1%}, "
            f"other {self.other:.1%}"
        )


def read_step_time(trace: bytes, worker: int, steps: int) -> StepTime:
    """Share out the time of the first ``steps`` steps of a Chrome trace that torch.profiler wrote.

    Every instant counts once. It is communication if an exchange is under way and nothing is computed
    meanwhile; else it belongs to the phase that started what the GPU computes; else, as always without
    a GPU, to the phase that the loop is in.

    Raises:
        ValueError: the trace has fewer steps.
    """
    events = _read_events(trace)
    spans = sorted((each for each in events if each.is_step), key=lambda each: each.start)[:steps]
    if len(spans) < max(steps, 1):
        raise ValueError(f"the trace has {len(spans)} steps, expected {max(steps, 1)}")
    phases = [each for each in events if each.phase and each.thread == spans[0].thread]
    work = _computation(events, spans[0].thread)
    exchanges = [each for each in events if each.is_exchange]

    timeline = _Timeline.of([*spans, *phases, *work, *exchanges])
    owner = np.full(len(timeline.widths), _Share.OTHER)
    for share, doing in (*_by_share(phases, phases).items(), *_by_share(work, phases).items()):
        owner[timeline.covered(doing)] = share
    computing, exchanging = timeline.covered(work), timeline.covered(exchanges)
    owner[exchanging & ~computing] = _Share.COMMUNICATION
    inside = timeline.covered(spans)

    def share_of(instants: NDArray[np.bool_]) -> float:
        return float(timeline.widths[inside & instants].sum() / timeline.widths[inside].sum())

    return StepTime(
        worker=worker,
        steps=steps,
        step_ms=float(timeline.widths[inside].sum()) / 1000 / steps,
        hidden_communication=share_of(exchanging & computing),
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
    """A span of the trace; ``begun`` is when the process started it, all times in µs."""

    category: str
    name: str
    thread: tuple[Any, Any]
    begun: float
    start: float
    end: float

    @property
    def is_step(self) -> bool:
        return self.category == "user_annotation" and self.name.startswith("ProfilerStep#")

    @property
    def phase(self) -> Phase | None:
        return Phase(self.name) if self.category == "user_annotation" and self.name in set(Phase) else None

    @property
    def is_exchange(self) -> bool:
        """Whether workers exchange data.

        NCCL does so in kernels. Gloo does so in threads of its own, as ``gloo:all_reduce`` and its like;
        the caller's ``c10d::allreduce_`` ends when the exchange is queued.
        """
        match self.category:
            case "kernel":
                return self.name.startswith("nccl")
            case "user_annotation":
                return self.name.startswith("gloo:")
            case _:
                return self.category == "cpu_op" and self.name.startswith(("c10d::", "_c10d_functional::"))


def _read_events(trace: bytes) -> list[_Event]:
    """All spans of a trace; a kernel begins where it was launched."""
    entries = [each for each in json.loads(trace)["traceEvents"] if each.get("ph") == "X"]
    launches = {
        each["args"]["correlation"]: each["ts"]
        for each in entries
        if each.get("cat") in _LAUNCHES and "correlation" in each.get("args", {})
    }
    return [
        _Event(
            category=each.get("cat", ""),
            name=each["name"],
            thread=(each["pid"], each["tid"]),
            begun=launches.get(each.get("args", {}).get("correlation"), each["ts"]),
            start=each["ts"],
            end=each["ts"] + each["dur"],
        )
        for each in entries
    ]


def _computation(events: Iterable[_Event], thread: tuple[Any, Any]) -> list[_Event]:
    """What the GPU computes; if there is none, what the loop's thread does."""
    kernels = [each for each in events if each.category in _KERNELS and not each.is_exchange]
    return kernels or [
        each
        for each in events
        if each.category == "cpu_op" and each.thread == thread and each.name.startswith("aten::")
    ]


def _by_share(events: Iterable[_Event], phases: Sequence[_Event]) -> dict[_Share, list[_Event]]:
    """``events`` by what the phase that they were begun in counts as."""
    phases = sorted(phases, key=lambda each: each.start)
    starts = [each.start for each in phases]
    shares: dict[_Share, list[_Event]] = {share: [] for share in _Share}
    for event in events:
        index = bisect_right(starts, event.begun) - 1
        phase = phases[index].phase if index >= 0 and event.begun <= phases[index].end else None
        shares[_SHARES[phase] if phase else _Share.OTHER].append(event)
    return shares


class _Timeline(NamedTuple):
    """Time cut at every start and end of some events; ``widths`` are those of the pieces, in µs."""

    edges: NDArray[np.float64]
    widths: NDArray[np.float64]

    @classmethod
    def of(cls, events: Iterable[_Event]) -> Self:
        edges = np.unique([time for each in events for time in (each.start, each.end)])
        return cls(edges, np.diff(edges))

    def covered(self, events: Sequence[_Event]) -> NDArray[np.bool_]:
        """The pieces that lie in at least one of ``events``."""
        changes = np.zeros(len(self.edges), dtype=np.int64)
        np.add.at(changes, np.searchsorted(self.edges, [each.start for each in events]), 1)
        np.add.at(changes, np.searchsorted(self.edges, [each.end for each in events]), -1)
        return changes.cumsum()[:-1] > 0
