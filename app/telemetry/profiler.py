"""Profiles of a few training steps: a trace of each worker, and where the first worker's time went."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from torch import profiler
from upath import UPath

from app.config import ProfileConfig
from app.storage import write_atomically
from app.telemetry.step_time import read_step_time
from app.warnings import attempt, warn

PROFILE = "profile"
"""The folder of a run's profile."""

SUMMARY_FILE = "summary.json"
"""The first worker's ``StepTime``."""


def trace_file(rank: int) -> str:
    """The name of a worker's trace, as TensorBoard's profiler plugin looks for it."""
    return f"rank{rank}.pt.trace.json"


class StepProfiler(Protocol):
    """Counts optimizer steps, and profiles some of them."""

    def step(self) -> None:
        """Say that an optimizer step is over."""
        ...


@contextmanager
def profile_steps(config: ProfileConfig | None, folder: UPath, rank: int) -> Iterator[StepProfiler]:
    """Profile the steps inside as ``config`` says; None profiles nothing, and costs nothing.

    Once the active steps are over, or what was inside has ended before them, the worker writes its
    trace to ``profile/`` in the run's folder; rank 0 also writes ``summary.json``, and prints it.

    Training never fails for its profile: what goes wrong here is printed as a warning.
    """
    if config is None:
        yield _NoProfiler()
        return
    steps = _TraceProfiler(config, folder / PROFILE, rank)
    try:
        yield steps
    finally:
        steps.close()


class _NoProfiler:
    def step(self) -> None:
        pass


class _TraceProfiler:
    def __init__(self, config: ProfileConfig, folder: UPath, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._before, self._total = config.wait + config.warmup, config.wait + config.warmup + config.active
        self._steps = 0
        self._profile: profiler.profile | None = profiler.profile(
            schedule=profiler.schedule(wait=config.wait, warmup=config.warmup, active=config.active, repeat=1),
            on_trace_ready=self._keep,
        )
        self._do(self._profile.start)

    def step(self) -> None:
        if self._profile is None:
            return
        self._steps += 1
        if self._steps < self._total:
            self._do(self._profile.step)
        else:
            self.close()

    def close(self) -> None:
        """Stop; a trace that is under way is kept."""
        if self._profile is None:
            return
        if self._steps <= self._before:
            warn(f"no step was profiled: there were {self._steps}, and train.profile begins after {self._before}")
        self._do(self._profile.stop)
        self._profile = None

    def _do(self, action: Callable[[], None]) -> None:
        if not attempt(action, f"worker {self._rank} cannot be profiled"):
            self._profile = None

    def _keep(self, profile: profiler.profile) -> None:
        """Write the trace; as the first worker, also show and write where the time went."""
        steps = self._steps - self._before
        if steps < 1:
            return
        with tempfile.TemporaryDirectory(prefix="rayloom-profile-") as temporary:
            file = Path(temporary) / trace_file(self._rank)
            profile.export_chrome_trace(str(file))
            trace = file.read_bytes()
        self._write(trace_file(self._rank), trace)
        if self._rank == 0:
            summary = read_step_time(trace, self._rank, steps)
            print(f"profiled {summary}; in {self._folder}", flush=True)
            self._write(SUMMARY_FILE, summary.model_dump_json(indent=1).encode())

    def _write(self, name: str, content: bytes) -> None:
        path = self._folder / name
        attempt(partial(write_atomically, path, content), f"{str(path)!r} cannot be written")
