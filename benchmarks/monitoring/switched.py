"""Jobs whose processes switch their metrics on and off in turn: python -m benchmarks.monitoring.switched JOB ARGUMENT…

Both states of a comparison are of one process, so they share its memory, its caches and its neighbors. Each process
writes what it has done and used by then to a file in the folder that ``RAYLOOM_SWITCHED`` names.
"""

import asyncio
import contextlib
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
"""How long metrics are on, and then off. They are published twice in that time."""
_PERIOD_S = 0.25


class Mark(BaseModel):
    """What a process had done by a time."""

    turn: int
    """Even: metrics are on."""
    done: int
    """Requests, or steps."""
    cpu_s: float
    """CPU time of all threads of the process."""


class Turns:
    """Writes a mark whenever it is asked, and says whose turn it is."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = Path(os.environ[FOLDER]) / f"{name}-{os.getpid()}.jsonl"
        self._clock, self._began_s = clock, clock()

    def mark(self, done: int) -> bool:
        """Write a mark. Return whether metrics are to be on from now on."""
        turn = int((self._clock() - self._began_s) / TURN_S)
        mark = Mark(turn=turn, done=done, cpu_s=time.process_time())
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{mark.model_dump_json()}\n")
        return turn % 2 == 0


class SwitchedServer(ModelServer.func_or_class):  # type: ignore[misc, name-defined] # from the decorator
    """A replica that counts and reports its requests in every other turn."""

    def __init__(self) -> None:
        super().__init__()
        self._is_on = True
        self._off = contextlib.ExitStack()
        self._switching: asyncio.Task[None] | None = None

    async def check_health(self) -> None:
        """Check the engines, and report only if it is the turn for it."""
        if self._switching is None:
            self._switching = asyncio.create_task(self._switch())
        if self._is_on:
            await super().check_health()
        else:
            await self._endpoint.check()

    async def _switch(self) -> None:
        turns = Turns("replica")
        while True:
            done = sum(served.batching.inferences for _, served in self._endpoint.counted)
            if (is_on := turns.mark(done)) != self._is_on:
                self._is_on = is_on
                self._off.close()
                if not is_on:
                    self._off.enter_context(_uncounted())
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
    turns = Turns("worker")
    publish = RunMetrics.append

    def append(metrics: RunMetrics, *records: StepRecord | EpochRecord) -> None:
        if turns.mark(records[-1].step):
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
