"""What the planner predicts for the same cases."""

from dataclasses import replace
from functools import cache

import torch

from app.config.plan import Precision
from app.planner.calibration import Calibration
from app.planner.cluster import Link, this_machine
from app.planner.measure import measure
from app.planner.plan import parallel_plan
from app.planner.profile import ModelProfile
from app.planner.search import Problem, price_plan
from app.planner.stack import RAYLOOM
from app.planner.traffic import traffic
from app.training.planning.machine import measure_machine
from benchmarks.network.cases import LENGTH, Case, Rate, blueprint
from benchmarks.network.machines import MACHINES

_RING_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


class Predictions:
    """The planner with the measured rates of this machine's processors, and the rate of the network."""

    def __init__(self) -> None:
        self._calibrations: dict[str, Calibration] = {}

    def step_s(self, case: Case, rate: Rate) -> float:
        """Return the seconds of a step."""
        if case.precision not in self._calibrations:
            self._calibrations[case.precision] = measure_machine(MACHINES, case.precision, threads=1)
        problem, calibration = _problem(case), self._calibrations[case.precision]
        cluster = calibration.apply(problem.cluster)
        # Without a limit: the bandwidth between two processes of this machine.
        bandwidth = rate.bits_per_s / 8 if rate.bits_per_s else cluster.node_link.bandwidth
        cluster = replace(cluster, devices_per_node=1, network=Link(bandwidth, cluster.node_link.latency_s))
        config = case.config(MACHINES)
        plan = parallel_plan(config.plan, config.layout(MACHINES))
        found = price_plan(replace(problem, cluster=cluster, rates=calibration.rates), config.plan, plan)
        assert found is not None
        return found.time.step_s


def sent_bytes(case: Case) -> float:
    """Return the bytes that a machine is predicted to send in a step."""
    config, profile = case.config(MACHINES), _problem(case).profile
    plan = parallel_plan(config.plan, config.layout(MACHINES))
    found = traffic(profile, plan, RAYLOOM, profile.layers)
    return sum(_RING_PASSES[one.kind] * one.bytes * (MACHINES - 1) / MACHINES for one in found)


def _problem(case: Case) -> Problem:
    config = case.config(MACHINES)
    profile = _profile(case.precision)
    setting = config.setting(profile.traits, ("input_ids",))
    return Problem(profile, this_machine(MACHINES), setting, config.batch_size)


@cache
def _profile(precision: Precision) -> ModelProfile:
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    return measure(blueprint().model, {"input_ids": tokens}, precision)
