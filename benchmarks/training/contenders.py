"""Runs Rayloom and its peers as a person does, and reads when their steps ended."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from app.telemetry.tensorboard import TENSORBOARD
from benchmarks.cluster import Cluster, local_cluster
from benchmarks.launch import torchrun
from benchmarks.machine import CpuUse, record_cpu_use
from benchmarks.training.cases import WORKERS, Case
from benchmarks.training.workload import Workload

WARM_UP_STEPS = 10
OURS, OURS_ON_RAY = "Rayloom", "Rayloom on Ray"


@dataclass(frozen=True)
class Trial:
    """One run of one contender."""

    launched: float
    """Unix time at which its command was started."""
    ends: dict[int, float]
    """Unix times at which steps ended, by the number of the step; Rayloom tells of some steps only."""
    losses: dict[int, float]
    """The mean loss over all ranks, by the number of the step."""
    cpu: CpuUse
    """CPU time of the whole machine while it ran."""
    second_start_s: float | None = None
    """``first_step_s`` of the next job from the same folder on the same cluster; None without a cluster."""

    @property
    def first_step_s(self) -> float:
        """Seconds from the command to the end of the first step."""
        return self.ends[1] - self.launched

    @property
    def steps_per_s(self) -> float:
        """Steps a second after start-up."""
        first, last = self._timed_steps
        return (last - first) / (self.ends[last] - self.ends[first])

    @property
    def cpu_s_per_step(self) -> float:
        """CPU seconds a step after start-up, of all processes of the machine."""
        first, last = self._timed_steps
        return self.cpu.between(self.ends[first], self.ends[last]) / (last - first)

    @property
    def _timed_steps(self) -> tuple[int, int]:
        """The first and last recorded step after start-up."""
        first, *_, last = (step for step in sorted(self.ends) if step >= WARM_UP_STEPS)
        return first, last

    @property
    def mean_loss(self) -> float:
        """Over the steps after start-up."""
        return mean(loss for step, loss in self.losses.items() if step > WARM_UP_STEPS)


Contender = Callable[[Case, Workload, Path], Trial]
"""Runs a case in a folder; the workload has the case's tokens."""


def run_rayloom(case: Case, _: Workload, folder: Path) -> Trial:
    """``torchrun -m app.training RECIPE``, data included."""
    launched = time.time()
    with record_cpu_use() as cpu:
        torchrun(WORKERS, "app.training", *case.command(folder))
    return _take_run(folder, launched, cpu)


def run_job(case: Case, _: Workload, folder: Path) -> Trial:
    """``rayloom submit train RECIPE``, data included, on a fresh Ray cluster, then a second job of a few steps."""
    with local_cluster() as cluster:
        trial = _submit(cluster, case.command(folder), folder)
        second = _submit(cluster, replace(case, steps=WARM_UP_STEPS).command(folder), folder)
    return replace(trial, second_start_s=second.first_step_s)


def _submit(cluster: Cluster, command: Sequence[str], folder: Path) -> Trial:
    launched = time.time()
    with record_cpu_use() as cpu:
        cluster.submit("train", *command)
    return _take_run(folder, launched, cpu)


def _take_run(folder: Path, launched: float, cpu: CpuUse) -> Trial:
    """Read the only run in storage, and move it away."""
    (run,) = (folder / "storage" / "runs" / "train").iterdir()
    trial = read_run(run, launched, cpu)
    run.rename(folder / f"{run.name}.done")
    return trial


def read_run(run: Path, launched: float, cpu: CpuUse) -> Trial:
    """Read the TensorBoard files of a run, whose records carry the time.

    Workers tell each other of several steps at once; the record of the last of these is written when that step
    ended. They share one rate.
    """
    events = EventAccumulator(str(run / TENSORBOARD), size_guidance={"scalars": 0}).Reload()
    rates = events.Scalars("step/samples_per_s")
    last_of_exchange = [one for one, following in pairwise(rates) if one.value != following.value] + rates[-1:]
    losses = {event.step: event.value for event in events.Scalars("step/loss")}
    return Trial(launched, {event.step: event.wall_time for event in last_of_exchange}, losses, cpu)


def run_peer(module: str) -> Contender:
    """``torchrun -m MODULE WORKLOAD``, with tokens that are there already."""

    def run(case: Case, work: Workload, folder: Path) -> Trial:  # noqa: ARG001
        path = folder / "workload.json"
        work.write(path)
        launched = time.time()
        with record_cpu_use() as cpu:
            torchrun(WORKERS, module, str(path))
        stamps = json.loads(Path(work.stamps_file).read_text(encoding="utf-8"))
        ends, losses = (dict(enumerate(stamps[name], start=1)) for name in ("ends", "losses"))
        return Trial(launched, ends, losses, cpu)

    return run


CONTENDERS: dict[str, Contender] = {
    "torchrun": run_peer("benchmarks.training.bare_deepspeed"),
    "accelerate": run_peer("benchmarks.training.with_accelerate"),
    OURS: run_rayloom,
    OURS_ON_RAY: run_job,
}
