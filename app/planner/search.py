"""The fastest plans of a model on a cluster, and why others were refused."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from app.config.plan import PlanConfig
from app.config.plan_rules import Setting
from app.errors import PlanError
from app.planner.cluster import GIB, Cluster
from app.planner.enumeration import Refusals, divisors, enumerate_plans, without_options
from app.planner.memory import GPU_PROCESS, MemoryEstimate, ProcessMemory, memory
from app.planner.plan import ParallelPlan
from app.planner.profile import ModelProfile
from app.planner.rates import Rates, rates_of
from app.planner.stack import RAYLOOM
from app.planner.stages import stages_of
from app.planner.step_time import StepEstimate, step_time

_MAX_DEVICES = 65536


@dataclass(frozen=True)
class Problem:
    """What a plan is searched for."""

    profile: ModelProfile
    cluster: Cluster
    setting: Setting
    global_batch: int
    base: PlanConfig = field(default_factory=PlanConfig)
    rates: Rates | None = None
    """None: those of the published runs."""
    optimizer_numbers: int = 2
    process: ProcessMemory = GPU_PROCESS


@dataclass(frozen=True)
class Candidate:
    """A plan that fits, with what it is predicted to take."""

    config: PlanConfig
    plan: ParallelPlan
    time: StepEstimate
    memory: MemoryEstimate
    measured_step_s: float | None = None
    """What a few steps took on this machine."""
    scale: float = 1.0
    """Measured by predicted time of like plans that have run."""

    @property
    def step_s(self) -> float:
        """The measured time of a step; without one the predicted."""
        return self.measured_step_s or self.predicted_step_s

    @property
    def predicted_step_s(self) -> float:
        """The predicted time of a step, with what like plans have taught."""
        return self.time.step_s * self.scale

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks together in a second."""
        return self.plan.global_batch / self.step_s


@dataclass(frozen=True)
class Findings:
    """The plans that fit, fastest first, and the count of those refused."""

    candidates: tuple[Candidate, ...]
    refusals: Refusals
    search_s: float

    @property
    def best(self) -> Candidate:
        """The fastest."""
        return self.candidates[0]

    @property
    def exact(self) -> tuple[Candidate, ...]:
        """Those that compute the same as the default plan: nothing is sent in fewer bits."""
        return tuple(candidate for candidate in self.candidates if not candidate.plan.quantized_weights)


def search(problem: Problem) -> Findings:
    """Return all plans that fit, fastest first. None may fit.

    Raises:
        PlanError: no number of data-parallel ranks divides the global batch.
    """
    started = time.perf_counter()
    refusals = Refusals()
    _require_divisible(problem)
    candidates = [
        candidate
        for config, plan in enumerate_plans(
            problem.base, problem.setting, problem.cluster, problem.global_batch, refusals
        )
        if (candidate := _priced(problem, config, plan, refusals)) is not None
    ]
    candidates = _helpful(candidates)
    candidates.sort(key=lambda candidate: candidate.time.step_s)
    # Sorted by time, except that the plan to take is the first.
    if candidates:
        chosen = best_of([(candidate.time.step_s, candidate.memory.total) for candidate in candidates])
        candidates.insert(0, candidates.pop(chosen))
    return Findings(tuple(candidates), refusals, time.perf_counter() - started)


def _helpful(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates whose options help: the same plan without them is slower, or does not fit."""
    plain = {candidate.config: candidate.time.step_s for candidate in candidates}

    def helps(candidate: Candidate) -> bool:
        without = without_options(candidate.config)
        return without == candidate.config or candidate.time.step_s < plain.get(without, math.inf)

    return [candidate for candidate in candidates if helps(candidate)]


def best_of(plans: Sequence[tuple[float, float]]) -> int:
    """Return the index of the plan to take, from each one's seconds and bytes.

    Plans within 1 % of the fastest count as equally fast, because predictions are no better. The one with the least
    memory is taken.
    """
    limit = min(seconds for seconds, _ in plans) * 1.01
    return min((number for number, plan in enumerate(plans) if plan[0] <= limit), key=lambda number: plans[number][1])


def price_plan(problem: Problem, config: PlanConfig, plan: ParallelPlan) -> Candidate | None:
    """Return the plan with its time and memory; None if it does not fit."""
    return _priced(problem, config, plan, Refusals())


def _priced(problem: Problem, config: PlanConfig, plan: ParallelPlan, refusals: Refusals) -> Candidate | None:
    """Return the plan with its time and memory; None, and a refusal, if it does not fit."""
    device = problem.cluster.device
    stages = stages_of(problem.profile, plan.pipeline)
    # Of the stages in between, the second keeps the activations of the most micro-batches.
    positions = sorted({0, min(1, len(stages) - 1), len(stages) - 1})
    estimates = [
        memory(problem.profile, plan, RAYLOOM, stages, position, problem.optimizer_numbers, problem.process)
        for position in positions
    ]

    fullest = max(estimates, key=lambda estimate: estimate.total)
    if fullest.total > device.memory:
        refusals.add(
            "the device's memory",
            f"needs {fullest.total / GIB:.1f} GiB, and {device.name} has {device.memory / GIB:.1f}",
        )
        return None
    host = fullest.host * problem.cluster.devices_per_node
    if host > problem.cluster.host_memory:
        refusals.add("the node's memory", f"offload needs {host / GIB:.0f} GiB of a node")
        return None

    rates = problem.rates or rates_of(device)
    return Candidate(config, plan, step_time(problem.profile, plan, problem.cluster, RAYLOOM, stages, rates), fullest)


def _require_divisible(problem: Problem) -> None:
    """Refuse a batch that no plan could share out. Raises PlanError."""
    devices, batch = problem.cluster.devices, problem.global_batch
    layers = problem.setting.model.layers if problem.setting.model else None
    divisor = problem.setting.model.tensor_divisor if problem.setting.model else None
    # Model parallelism takes this many devices at most. The others are data-parallel ranks.
    most = min(divisor or 1, problem.cluster.devices_per_node) * (layers or 1)
    possible = [data for data in divisors(devices) if devices // data <= most]
    if not any(batch % data == 0 for data in possible):
        multiples = (factor * data for data in possible for factor in (batch // data, batch // data + 1) if factor)
        nearest = min(multiples, key=lambda size: abs(size - batch))
        raise PlanError(
            f"train.global_batch_size is {batch}, which no plan divides over {devices} devices: expected a multiple "
            f"of {possible[0]}; the nearest is {nearest}"
        ).of("batch.uneven", "train.global_batch_size")


def fewest_devices(problem: Problem) -> tuple[int, Candidate] | None:
    """Return the fewest devices of this kind, doubling, on which a plan fits, and the fastest plan there."""
    devices = 1
    while devices <= _MAX_DEVICES:
        cluster = problem.cluster.resized(devices, problem.cluster.devices_per_node)
        setting = replace(problem.setting, workers=(devices, devices))
        try:
            findings = search(replace(problem, cluster=cluster, setting=setting))
        # The batch does not divide over this many devices, and so not over twice as many.
        except PlanError:
            return None
        if findings.candidates:
            return devices, findings.best
        devices *= 2
    return None
