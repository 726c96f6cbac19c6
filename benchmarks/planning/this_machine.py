"""Eight plans on two worker processes of this machine: predicted, then measured."""

from app.config import load_recipe
from app.models.factory import blueprint_of
from app.planner.calibration import Calibration, MeasuredPlan
from app.planner.cluster import this_machine
from app.planner.search import Candidate, search
from app.tasks import prepare
from app.training.planning.machine import measure_machine, measure_plan
from app.training.planning.recipe import Subject, problem_of, subject_of, with_measurements
from benchmarks.markdown import table, verdict

_RECIPE = "recipes/stdlib_gpt.yaml"
_PLANS: tuple[tuple[int, int, int, int, str], ...] = (
    (1, 1, 0, 16, "none"),
    (1, 1, 1, 16, "none"),
    (1, 1, 2, 16, "none"),
    (1, 1, 3, 16, "none"),
    (1, 1, 1, 4, "none"),
    (1, 1, 1, 16, "full"),
    (2, 1, 1, 32, "none"),
    (1, 2, 1, 8, "none"),
)
"""Tensor, pipeline, ZeRO stage, micro-batch and recomputation."""
_MEMORY_ERROR = 0.1


def machine_section() -> str:
    """Measure this machine's rates and one plan, predict eight plans, measure them, and return the tables."""
    recipe = load_recipe(_RECIPE, [])
    data = prepare(recipe)
    subject = subject_of(recipe, blueprint_of(recipe.model, data.facts).model, data)
    calibration = measure_machine(2, recipe.train.precision, threads=1)
    usual = _candidates(subject, calibration)[1]
    calibration = calibration.with_plans([measure_plan(recipe, data, usual, subject.name)])
    candidates = _candidates(subject, calibration)
    runs = [measure_plan(recipe, data, candidate, subject.name) for candidate in candidates]
    return _report(calibration, candidates, runs)


def _candidates(subject: Subject, calibration: Calibration) -> list[Candidate]:
    """Return the eight plans with their predictions, scaled by the plan that has run."""
    cluster = this_machine(2)
    findings = search(problem_of(subject, cluster, calibration))
    by_key = {
        _key(candidate): candidate
        for candidate in with_measurements(findings, calibration, subject.name).candidates
        if candidate.config.offload == "none"
    }
    return [by_key[key] for key in _PLANS]


def _key(candidate: Candidate) -> tuple[int, int, int, int, str]:
    plan = candidate.plan
    return plan.tensor, plan.pipeline, plan.zero_stage, plan.micro_batch, plan.recompute


def _plan_label(candidate: Candidate) -> str:
    tensor, pipeline, zero_stage, micro_batch, recompute = _key(candidate)
    split = [f"{kind} {degree}" for kind, degree in (("tensor", tensor), ("pipeline", pipeline)) if degree > 1]
    recomputation = [f"recomputation {recompute}"] if recompute != "none" else []
    return ", ".join([*split, f"ZeRO {zero_stage}", f"micro-batch {micro_batch}", *recomputation])


def _report(calibration: Calibration, candidates: list[Candidate], runs: list[MeasuredPlan]) -> str:
    """Return what was measured beside what was predicted."""
    order = sorted(range(len(runs)), key=lambda number: candidates[number].predicted_step_s)
    best = min(range(len(runs)), key=lambda number: runs[number].step_s)
    rows = []
    for number in order:
        candidate, run = candidates[number], runs[number]
        time, memory = candidate.predicted_step_s, candidate.memory.total
        rows.append(
            [
                _plan_label(candidate),
                f"{time * 1000:.1f}",
                f"{run.step_s * 1000:.1f}{' (best)' if number == best else ''}",
                f"{time / run.step_s - 1:+.0%}",
                f"{memory / 1e6:.0f}",
                f"{run.memory_bytes / 1e6:.0f}",
                f"{memory / run.memory_bytes - 1:+.0%}",
            ]
        )
    place, lost = order.index(best) + 1, runs[order[0]].step_s / runs[best].step_s - 1
    errors = [abs(c.memory.total / run.memory_bytes - 1) for c, run in zip(candidates, runs, strict=True)]
    goals = [
        ["predicted place of the measured best", "≤ 2", f"{place}", verdict(place <= 2)],
        [
            "memory, largest error",
            f"≤ {_MEMORY_ERROR:.0%}",
            f"{max(errors):.0%}",
            verdict(max(errors) <= _MEMORY_ERROR),
        ],
    ]
    header = ["plan", "predicted ms", "measured ms", "error", "predicted MB", "measured MB", "error"]
    rates, latency = calibration, calibration.link_latency_s * 1e6
    measured = (
        f"A worker has {rates.matmul_flops / 1e9:.0f} GFLOP/s and {rates.memory_bandwidth / 1e9:.1f} GB/s of memory "
        f"bandwidth. All-reduces run at {rates.link_bandwidth / 1e9:.2f} GB/s with a latency of {latency:.0f} µs. "
        "Times are scaled by one measured plan: ZeRO 1 with micro-batches of 16. "
        f"The best measured plan is {lost:.1%} faster than the plan that was predicted to be the best."
    )
    return "\n\n".join([table(["what", "goal", "reached", ""], goals), measured, table(header, rows)])
