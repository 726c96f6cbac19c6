"""What the planner says of a run that has ended, beside what was measured."""

import json
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from upath import UPath

from app.best_effort import warn
from app.config import Recipe
from app.data.prepared import PreparedData
from app.models.factory import blueprint_of
from app.planner.calibration import read_calibration
from app.planner.cluster import Cluster
from app.planner.plan import parallel_plan
from app.planner.prediction import MeasuredRun, Prediction
from app.planner.search import price_plan
from app.planner.validation import validation_of
from app.telemetry.profiler import SUMMARY_FILE
from app.training.planning.auto import is_small
from app.training.planning.recipe import find_plans, layout_in_samples, subject_of
from app.training.planning.report import plan_keys

_RAY_BYTES = 110e6
"""Resident memory of Ray's own code in a worker on CPUs, which calibration runs without. Measured."""


def prediction_of(
    recipe: Recipe,
    data: PreparedData,
    workers: int,
    find_cluster: Callable[[], Cluster],
    metrics: UPath,
    profile: UPath,
) -> Prediction | None:
    """Return the prediction for a run that has trained, and warn where it was off by more than its stated error.

    None for a small model on CPUs that was never calibrated, for which nobody predicted anything, and where records
    are missing.

    Args:
        metrics: the run's ``metrics.jsonl``.
        profile: the folder of its profile, which may be missing.
    """
    blueprint, cluster = blueprint_of(recipe.model, data.facts), find_cluster()
    calibration = read_calibration(cluster, recipe.train.precision) if cluster.device.kind == "cpu" else None
    if calibration is None and is_small(blueprint, cluster):
        return None
    measured = measured_run(metrics, profile)
    if measured is None:
        return None

    subject = subject_of(recipe, blueprint.model, data)
    problem, findings = find_plans(subject, cluster)
    plan = recipe.train.plan
    candidate = price_plan(problem, plan, parallel_plan(plan, layout_in_samples(subject, workers)))
    if candidate is None:
        return None

    # Where calibration has run this very plan, the planner named the measured time.
    run = calibration and calibration.measured(subject.name, plan_keys(plan))
    # Plans that were measured here correct the prediction of this one, too.
    scale = findings.candidates[0].scale if findings.candidates else 1.0
    candidate = replace(candidate, measured_step_s=run.step_s if run else None, scale=scale)
    validation = validation_of(cluster.device, plan)
    prediction = Prediction(
        step_s=candidate.step_s,
        error=validation.p90 if validation else calibration and calibration.error(subject.name),
        memory_bytes=int(candidate.memory.total + (_RAY_BYTES if cluster.device.kind == "cpu" else 0.0)),
        communication=candidate.time.communication,
        measured=measured,
    )

    for difference in prediction.differences():
        warn(difference)
    return prediction


def measured_run(metrics: UPath, profile: UPath) -> MeasuredRun | None:
    """Return what the records of a run's steps say; None if there are none."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()] if metrics.exists() else []
    steps = [line for line in lines if line.get("step_s") and "memory" in line]
    if not steps:
        return None
    summary = profile / SUMMARY_FILE
    communication = json.loads(summary.read_text(encoding="utf-8")).get("communication") if summary.exists() else None
    return MeasuredRun(
        step_s=median(line["step_s"] for line in steps),
        memory_bytes=max(line["memory"]["peak_bytes"] for line in steps),
        communication=communication,
    )
