"""What was measured on a machine, kept in a file that later plans read."""

import hashlib
import json
import platform
from dataclasses import replace
from statistics import median
from typing import Any, Self

import torch
from pydantic import BaseModel, ValidationError

from app.config.plan import Precision
from app.engines.architecture import usable_cores
from app.planner.cluster import Cluster, Link
from app.planner.rates import PROCESSOR, Rates
from app.storage import HOME, to_path, write_atomically

_FOLDER = HOME / "calibration"


class MeasuredPlan(BaseModel):
    """A few steps of one plan."""

    subject: str
    """Names the model, its samples, batch and precision."""
    plan: dict[str, Any]
    """The keys of ``train.plan`` that the planner chooses."""
    step_s: float
    """Median of the steps."""
    memory_bytes: int
    """Peak resident memory of the fullest worker."""
    context_bytes: int
    """What of it no predicted tensor accounts for: its code, and buffers of libraries."""
    predicted_step_s: float


class Calibration(BaseModel):
    """Rates of this machine with a number of worker processes, and plans that have run on it."""

    machine: str
    workers: int
    threads: int = 1
    """Threads of each worker."""
    precision: Precision
    matmul_flops: float
    """Operations per second of a worker, while all compute."""
    memory_bandwidth: float
    launch_s: float
    link_bandwidth: float
    """Bytes per second that an all-reduce moves from one worker to another."""
    link_latency_s: float
    plans: list[MeasuredPlan] = []

    def apply(self, cluster: Cluster) -> Cluster:
        """Return ``cluster`` with what was measured in place of typical figures."""
        device = replace(
            cluster.device,
            # The file is for one precision, so its rate stands for both.
            half_flops=self.matmul_flops,
            float_flops=self.matmul_flops,
            memory_bandwidth=self.memory_bandwidth,
            launch_s=self.launch_s,
        )
        link = Link(self.link_bandwidth, self.link_latency_s)
        return replace(cluster, device=device, node_link=link)

    @property
    def rates(self) -> Rates:
        """Shares of what was measured: all of it, since it was measured as training uses it."""
        return replace(PROCESSOR, matmul=1.0, memory=1.0, node_link=1.0, network=1.0)

    @property
    def context_bytes(self) -> float | None:
        """Memory of a worker without a model; None before a plan has run."""
        return median(plan.context_bytes for plan in self.plans) if self.plans else None

    def error(self, subject: str) -> float | None:
        """Return the largest error of the step times that were predicted for ``subject``; None before any ran."""
        errors = [abs(plan.predicted_step_s / plan.step_s - 1) for plan in self.plans if plan.subject == subject]
        return max(errors, default=None)

    def measured(self, subject: str, plan: dict[str, Any]) -> MeasuredPlan | None:
        """Return the run of ``plan``, if it has run for ``subject``."""
        return next((run for run in self.plans if run.subject == subject and run.plan == plan), None)

    def with_plans(self, plans: list[MeasuredPlan]) -> Self:
        """Return this with further runs. A plan that ran again replaces its earlier run."""
        known = {(plan.subject, json.dumps(plan.plan, sort_keys=True)): plan for plan in (*self.plans, *plans)}
        return self.model_copy(update={"plans": list(known.values())})

    def save(self) -> None:
        """Write the file that ``read_calibration`` reads."""
        file = to_path(_file(self.machine, self.workers, self.threads, self.precision))
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, self.model_dump_json(indent=1).encode())


def machine_name() -> str:
    """Return what the measurements depend on: the processor, the cores that this process may use, and torch."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        models = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return f"{models[0] if models else platform.processor()}, {usable_cores()} cores, torch {torch.__version__}"


def read_calibration(cluster: Cluster, precision: Precision) -> Calibration | None:
    """Return what as many workers with as many threads measured on this machine; None if nothing readable is there."""
    file = _file(machine_name(), cluster.devices, cluster.device.threads, precision)
    try:
        # A file of another version counts as none: what it held can be measured again.
        return Calibration.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


def _file(machine: str, workers: int, threads: int, precision: Precision) -> Any:
    key = hashlib.sha256(machine.encode()).hexdigest()[:12]
    return _FOLDER / f"{key}-{workers}x{threads}-{precision}.json"
