"""Profiles of a few training steps: a trace of each worker, and a summary of the first worker's time."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from torch import profiler
from upath import UPath

from app.best_effort import best_effort, warn
from app.config import ProfileConfig
from app.storage import no_op, write_atomically
from app.telemetry.step_time import StepTime, read_step_time

PROFILE = "profile"
"""The folder of a run's profile."""

SUMMARY_FILE = "summary.json"
"""The first worker's ``StepTime``."""


def trace_file(rank: int) -> str:
    """Return the name of a worker's trace, as TensorBoard's profiler plugin expects it."""
    return f"rank{rank}.pt.trace.json"


class StepProfiler(Protocol):
    """Counts optimizer steps, and profiles some of them."""

    def step(self) -> None:
        """Report the end of an optimizer step."""
        ...


@contextmanager
def profile_steps(
    config: ProfileConfig | None, folder: UPath, rank: int, summarized: Callable[[StepTime], None] = no_op
) -> Iterator[StepProfiler]:
    """Profile the steps in the block as ``config`` says. None profiles nothing, and costs nothing.

    After the active steps, or at the end of the block, the worker writes its trace to ``profile/`` in the run's folder.
    Rank 0 also writes ``summary.json``, prints it, and calls ``summarized``. Errors are printed as
    warnings and never stop training.
    """
    if config is None:
        yield _NoProfiler()
        return
    recorder = _TraceProfiler(config, folder / PROFILE, rank, summarized)
    try:
        yield recorder
    finally:
        recorder.close()


class _NoProfiler:
    def step(self) -> None:
        pass


class _TraceProfiler:
    def __init__(self, config: ProfileConfig, folder: UPath, rank: int, summarized: Callable[[StepTime], None]) -> None:
        self._folder, self._rank, self._summarized = folder, rank, summarized
        self._skipped, self._total = config.wait + config.warmup, config.wait + config.warmup + config.active
        self._steps = 0
        self._profile: profiler.profile | None = profiler.profile(
            schedule=profiler.schedule(wait=config.wait, warmup=config.warmup, active=config.active, repeat=1),
            on_trace_ready=self._write_trace,
        )
        self._try(self._profile.start)

    def step(self) -> None:
        if self._profile is None:
            return
        self._steps += 1
        if self._steps < self._total:
            self._try(self._profile.step)
        else:
            self.close()

    def close(self) -> None:
        """Stop, and write the trace recorded so far."""
        if self._profile is None:
            return
        if self._steps <= self._skipped:
            warn(f"no step was profiled: there were {self._steps}, and train.profile begins after {self._skipped}")
        # This writes the trace, through ``on_trace_ready``.
        self._try(self._profile.stop)
        self._profile = None

    def _try(self, action: Callable[[], None]) -> None:
        if not best_effort(action, f"worker {self._rank} cannot be profiled"):
            self._profile = None

    def _write_trace(self, profile: profiler.profile) -> None:
        """Write the trace. In the first worker, also print and write its summary."""
        steps = self._steps - self._skipped
        # ``close`` has warned that no step was profiled.
        if steps < 1:
            return
        with tempfile.TemporaryDirectory(prefix="rayloom-profile-") as temporary:
            # The profiler writes to a local path, and the run's folder may be remote.
            file = Path(temporary) / trace_file(self._rank)
            profile.export_chrome_trace(str(file))
            trace = file.read_bytes()
        self._write(trace_file(self._rank), trace)
        if self._rank == 0:
            summary = read_step_time(trace, self._rank, steps)
            print(f"profiled {summary}; in {self._folder}", flush=True)
            self._summarized(summary)
            self._write(SUMMARY_FILE, summary.model_dump_json(indent=1).encode())

    def _write(self, name: str, content: bytes) -> None:
        path = self._folder / name
        best_effort(partial(write_atomically, path, content), f"{str(path)!r} cannot be written")
