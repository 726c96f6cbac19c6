"""The plan of ``train.plan: auto``, chosen once the model is known, with its reason."""

from collections.abc import Callable
from dataclasses import dataclass

from app.config import PlanConfig, Recipe
from app.config.layout import lay_out
from app.data.prepared import PreparedData
from app.errors import PlanError
from app.models.blueprint import Blueprint
from app.planner.calibration import Calibration, MeasuredPlan, read_calibration
from app.planner.cluster import Cluster
from app.planner.plan import parallel_plan
from app.planner.search import Candidate, fewest_devices, price_plan
from app.planner.validation import validation_of
from app.training.planning.recipe import Subject, find_plans, subject_name, subject_of

_SMALL_SHARE = 0.25
"""A model whose states take less of a CPU worker's memory is not measured, which takes seconds of imports."""
_STATE_BYTES = 20
"""Of a parameter at most, without ZeRO: two copies, a gradient in 32 bits and Adam's two numbers."""


@dataclass(frozen=True)
class Chosen:
    """A plan and why it was chosen."""

    plan: PlanConfig
    reason: str
    predicted: Candidate | None = None


def choose_plan(
    recipe: Recipe, blueprint: Blueprint, data: PreparedData, find_cluster: Callable[[], Cluster]
) -> Chosen:
    """Return the plan for ``recipe`` on the cluster at hand.

    The default plan, ZeRO 1, stays unless another is faster by more than the planner's error on such hardware, or the
    default does not fit. So a small model on CPUs keeps it, unless calibration has run a faster one.

    Raises:
        PlanError: no plan fits.
    """
    least, most = recipe.train.workers_range
    default = PlanConfig()
    if least != most:
        return Chosen(default, f"workers [{least}, {most}] grow and shrink: ZeRO 1 fits any number of them")
    cluster = find_cluster()
    if cluster.device.kind == "cpu":
        # A measured plan beats any prediction.
        if run := _fastest_run(recipe, blueprint, data, cluster):
            plan = default.model_copy(update=run.plan)
            return Chosen(plan, f"the fastest that calibration has run on this machine, {run.step_s:.3g} s a step")
        if is_small(blueprint, cluster):
            states = blueprint.num_parameters * _STATE_BYTES
            share = states / cluster.device.memory
            return Chosen(default, f"ZeRO 1: the model's states take {share:.1%} of a worker's memory at most")
    try:
        subject = subject_of(recipe, blueprint.model, data)
    except PlanError as error:
        # A model that cannot be measured may still train.
        return Chosen(default, f"ZeRO 1: {error}")
    return _by_prediction(subject, cluster, default)


def is_small(blueprint: Blueprint, cluster: Cluster) -> bool:
    """Return True for a model on CPUs that fits whatever the plan. Measuring it would take longer than it is worth."""
    is_cpu = cluster.device.kind == "cpu"
    return is_cpu and blueprint.num_parameters * _STATE_BYTES < _SMALL_SHARE * cluster.device.memory


def _fastest_run(recipe: Recipe, blueprint: Blueprint, data: PreparedData, cluster: Cluster) -> MeasuredPlan | None:
    """Return the fastest plan that has run for this model on this machine."""
    calibration: Calibration | None = read_calibration(cluster, recipe.train.precision)
    if calibration is None:
        return None
    name = subject_name(recipe, blueprint.num_parameters, data)
    runs = [run for run in calibration.plans if run.subject == name]
    return min(runs, key=lambda run: run.step_s, default=None)


def _by_prediction(subject: Subject, cluster: Cluster, default: PlanConfig) -> Chosen:
    problem, findings = find_plans(subject, cluster)
    if not findings.candidates:
        reasons = "; ".join(f"{rule}: {why}" for rule, why in findings.refusals.examples.items() if "memory" in rule)
        fewest = fewest_devices(problem)
        advice = f"{fewest[0]} of these devices would do" if fewest else "no number of these devices would do"
        raise PlanError(f"train.plan auto: no plan fits {cluster} ({reasons}): {advice}").of(
            "plan.none_fits", "train.plan"
        )
    # Only plans that compute the same count. Those of a kind that published runs validate are preferred.
    exact = findings.exact
    best = next((found for found in exact if validation_of(cluster.device, found.config)), exact[0])
    try:
        layout = lay_out(default, problem.global_batch, cluster.devices)
    except ValueError as error:
        return Chosen(best.config, f"the fastest of {len(findings.candidates)}; the default cannot run: {error}", best)

    usual = price_plan(problem, default, parallel_plan(default, layout))
    validation = validation_of(cluster.device, best.config)
    if usual is None:
        doubt = "" if validation else ", not validated"
        return Chosen(best.config, f"the fastest of {len(findings.candidates)}{doubt}; ZeRO 1 does not fit", best)
    gain = usual.step_s / best.step_s - 1
    if validation is None:
        return Chosen(default, "ZeRO 1: predictions for this hardware are not validated", usual)
    # A gain within the error of predictions may be none.
    if gain <= validation.p90:
        return Chosen(default, f"ZeRO 1: within {max(gain, 0):.0%} of the fastest of {len(findings.candidates)}", usual)
    text = f"predicted {gain:.0%} faster than ZeRO 1 (± {validation.p90:.0%})"
    return Chosen(best.config, f"the fastest of {len(findings.candidates)}, {text}", best)
