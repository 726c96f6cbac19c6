"""Runs Rayloom and its peers as a person does, and reads when their steps ended."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from app.telemetry.tensorboard import TENSORBOARD
from benchmarks.cluster import local_cluster
from benchmarks.launch import torchrun
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
    """By the number of the step: the mean over all ranks."""

    @property
    def first_step_s(self) -> float:
        """Seconds from the command to the end of the first step."""
        return self.ends[1] - self.launched

    @property
    def steps_per_s(self) -> float:
        """After start-up, from the first step that it tells of to the last."""
        first, *_, last = (step for step in sorted(self.ends) if step >= WARM_UP_STEPS)
        return (last - first) / (self.ends[last] - self.ends[first])

    @property
    def mean_loss(self) -> float:
        """Over the steps after start-up."""
        return mean(loss for step, loss in self.losses.items() if step > WARM_UP_STEPS)


Contender = Callable[[Case, Workload, Path], Trial]
"""Runs a case in a folder; the workload has the case's tokens."""


def run_rayloom(case: Case, _: Workload, folder: Path) -> Trial:
    """``torchrun -m app.training RECIPE``, data included."""
    launched = time.time()
    torchrun(WORKERS, "app.training", *case.command(folder))
    return _take_run(folder, launched)


def run_job(case: Case, _: Workload, folder: Path) -> Trial:
    """``rayloom submit train RECIPE``, data included, on a Ray cluster that is up only meanwhile."""
    with local_cluster() as cluster:
        launched = time.time()
        cluster.submit("train", *case.command(folder))
    return _take_run(folder, launched)


def _take_run(folder: Path, launched: float) -> Trial:
    """The one run in storage, moved out of it."""
    (run,) = (folder / "storage" / "runs" / "train").iterdir()
    trial = read_run(run, launched)
    run.rename(folder / f"{run.name}.done")
    return trial


def read_run(run: Path, launched: float) -> Trial:
    """From the TensorBoard files of a run, whose records carry the time.

    Workers tell each other of several steps at once; the record of the last of these is written when that step
    ended. They share one rate.
    """
    events = EventAccumulator(str(run / TENSORBOARD), size_guidance={"scalars": 0}).Reload()
    rates = events.Scalars("step/samples_per_s")
    last_of_exchange = [one for one, following in pairwise(rates) if one.value != following.value] + rates[-1:]
    losses = {event.step: event.value for event in events.Scalars("step/loss")}
    return Trial(launched, {event.step: event.wall_time for event in last_of_exchange}, losses)


def run_peer(module: str) -> Contender:
    """``torchrun -m MODULE WORKLOAD``, with tokens that are there already."""

    def run(case: Case, work: Workload, folder: Path) -> Trial:  # noqa: ARG001
        path = folder / "workload.json"
        work.write(path)
        launched = time.time()
        torchrun(WORKERS, module, str(path))
        stamps = json.loads(Path(work.stamps_file).read_text(encoding="utf-8"))
        ends, losses = (dict(enumerate(stamps[name], start=1)) for name in ("ends", "losses"))
        return Trial(launched, ends, losses)

    return run


CONTENDERS: dict[str, Contender] = {
    "torchrun": run_peer("benchmarks.training.bare_deepspeed"),
    "accelerate": run_peer("benchmarks.training.with_accelerate"),
    OURS: run_rayloom,
    OURS_ON_RAY: run_job,
}
