"""Jobs whose processes switch their metrics and traces in turns: python -m benchmarks.monitoring.switched JOB ARGUMENT…

All states are of one process, so they share its memory, its caches and its neighbors. Each process writes what it has
done and used by then to a file in the folder that ``RAYLOOM_SWITCHED`` names.
"""

import asyncio
import contextlib
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pydantic import BaseModel

from app.serving.batching.statistics import Buckets
from app.serving.traffic import Traffic
from app.training import ray_worker
from app.training.records import EpochRecord, StepRecord
from app.training.reporting.run_metrics import RunMetrics
from jobs import _endpoint
from serve_deployments.model_server import ModelServer

FOLDER = "RAYLOOM_SWITCHED"
TURN_S = 10.0
"""How long a state lasts. Metrics are published twice in that time."""
_PERIOD_S = 0.25


class State(StrEnum):
    """What is on in a turn."""

    ON = "on"
    """Metrics, as always."""
    OFF = "off"
    TRACED = "traced"
    """Metrics, and traces of a share of the requests."""


class Mark(BaseModel):
    """What a process had done by a time."""

    turn: int
    state: State
    done: int
    """Requests, or steps."""
    cpu_s: float
    """CPU time of all threads of the process."""


class Turns:
    """Writes a mark whenever it is asked, and says whose turn it is."""

    def __init__(self, name: str, *states: State, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = Path(os.environ[FOLDER]) / f"{name}-{os.getpid()}.jsonl"
        self._states, self._clock, self._began_s = states, clock, clock()

    def mark(self, done: int) -> State:
        """Write a mark. Return the state from now on."""
        turn = int((self._clock() - self._began_s) / TURN_S)
        state = self._states[turn % len(self._states)]
        mark = Mark(turn=turn, state=state, done=done, cpu_s=time.process_time())
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{mark.model_dump_json()}\n")
        return state


class SwitchedServer(ModelServer.func_or_class):  # type: ignore[misc, name-defined] # from the decorator
    """A replica that counts, reports and traces its requests in some turns only."""

    async def __init__(self) -> None:  # type: ignore[misc] # Serve awaits it
        await super().__init__()
        self._state = State.ON
        self._tracer = self._endpoint.traffic.tracer
        self._endpoint.traffic.tracer = None
        self._uncounted = contextlib.ExitStack()
        self._switching: asyncio.Task[None] | None = None

    async def check_health(self) -> None:
        """Check the engines, and report only if it is the turn for it."""
        if self._switching is None:
            self._switching = asyncio.create_task(self._switch())
        if self._state is State.OFF:
            await self._endpoint.check()
        else:
            await super().check_health()

    async def _switch(self) -> None:
        turns = Turns("replica", *State)
        while True:
            state = turns.mark(sum(served.batching.inferences for _, served in self._endpoint.counted))
            if state is not self._state:
                self._state = state
                self._uncounted.close()
                if state is State.OFF:
                    self._uncounted.enter_context(_uncounted())
                self._endpoint.traffic.tracer = self._tracer if state is State.TRACED else None
            await asyncio.sleep(_PERIOD_S)


@contextmanager
def _uncounted() -> Iterator[None]:
    """Count no request, and put no latency into a histogram."""

    def add(*_: object) -> None:
        pass

    with patch.object(Traffic, "add", add), patch.object(Buckets, "add", add):
        yield


def train_worker(arguments: ray_worker.WorkerArguments) -> bytes:
    """Train as a worker that publishes its metrics in every other turn."""
    turns = Turns("worker", State.ON, State.OFF)
    publish = RunMetrics.append

    def append(metrics: RunMetrics, *records: StepRecord | EpochRecord) -> None:
        if turns.mark(records[-1].step) is State.ON:
            publish(metrics, *records)

    with patch.object(RunMetrics, "append", append):
        return ray_worker.train_worker(arguments)


def main() -> None:
    """Run a job with switched workers and replicas."""
    job, *sys.argv[1:] = sys.argv[1:]
    switched: Any = ModelServer.options(func_or_class=SwitchedServer)  # type: ignore[attr-defined]
    with patch.object(_endpoint, "ModelServer", switched), patch.object(ray_worker, "train_worker", train_worker):
        runpy.run_module(f"jobs.{job}", run_name="__main__")


if __name__ == "__main__":
    from benchmarks.monitoring import switched  # by its name, by which other processes find its classes

    switched.main()
