"""What the planner found, as a table for people and as JSON."""

from typing import Any

from pydantic import BaseModel

from app.config.plan import PlanConfig
from app.planner.cluster import GIB
from app.planner.search import Candidate, Findings, Problem, fewest_devices
from app.planner.validation import validation_of
from app.training.planning.advice import Help, what_would_help

_SHOWN_KEYS = ("tensor", "pipeline", "zero_stage", "offload", "micro_batch", "activation_checkpointing")


class PlanRow(BaseModel):
    """One plan, and what it is predicted to take."""

    plan: dict[str, Any]
    """Keys of ``train.plan``."""
    data: int
    """Data-parallel ranks."""
    gradient_accumulation: int
    step_s: float
    error: float | None
    """Nine of ten published runs on such hardware were within this share. None: not validated."""
    memory_bytes: int
    """Of the fullest rank."""
    communication: float
    """Share of the step in which communication is not hidden."""
    bubble: float
    """Share of the step in which a stage waits."""
    samples_per_s: float
    tokens_per_s: float | None
    hours: float
    """Of the whole recipe, without validation and checkpoints."""
    device_hours: float
    price: float | None
    measured_step_s: float | None = None


class RefusedPlans(BaseModel):
    """Plans that one rule refused."""

    rule: str
    count: int
    example: str


class PlanReport(BaseModel):
    """The best plans of a recipe on a cluster."""

    recipe: str
    model: str
    parameters: int
    cluster: str
    devices: int
    global_batch_size: int
    steps: int
    plans: list[PlanRow]
    num_fitting: int
    refused: list[RefusedPlans]
    would_help: list[Help] = []
    """Options beyond the plans that can run as the recipe stands."""
    fewest_devices: int | None = None
    """Devices that would do, if no plan fits."""
    search_s: float

    def to_text(self) -> str:
        """Return the table, with why plans were refused below it."""
        head = (
            f"{self.model}: {self.parameters:,} parameters on {self.cluster}, global batch {self.global_batch_size}, "
            f"{self.steps:,} steps"
        )
        body = _table(self.plans) if self.plans else [self._advice()]
        refused = [f"{row.count:>7,}  {row.rule}: {row.example}" for row in self.refused]
        total = sum(row.count for row in self.refused)
        why = [f"refused {total:,} plans, by rule and with the first reason:", *refused] if refused else []
        found = f"{self.num_fitting:,} plans fit; searched in {self.search_s:.2f} s"
        return "\n".join([head, *body, *self._help(), found, *why])

    def _help(self) -> list[str]:
        """Return the lines about options that are faster, or that fit where no plan does."""
        return [
            f"would help: {row.option}, {_seconds(row.step_s)} not validated, {row.memory_bytes / GIB:.1f} GiB "
            f"({row.needs})"
            for row in self.would_help
        ]

    def _advice(self) -> str:
        if self.fewest_devices is None:
            return "no plan fits, on any number of these devices: choose a device with more memory or a smaller model"
        return f"no plan fits: {self.fewest_devices} of these devices would do"


def report(recipe: str, problem: Problem, findings: Findings, steps: int, top: int, price: float | None) -> PlanReport:
    """Return the report of a search.

    Args:
        steps: optimizer steps of the whole recipe.
        top: plans to show.
        price: of a device's hour.
    """
    refused = sorted(findings.refusals.counts.items(), key=lambda item: -item[1])
    fewest = None if findings.candidates else fewest_devices(problem)
    return PlanReport(
        recipe=recipe,
        model=problem.profile.name,
        parameters=problem.profile.parameters,
        cluster=str(problem.cluster),
        devices=problem.cluster.devices,
        global_batch_size=problem.global_batch,
        steps=steps,
        plans=[_row(candidate, problem, steps, price) for candidate in findings.candidates[:top]],
        num_fitting=len(findings.candidates),
        refused=[
            RefusedPlans(rule=rule, count=count, example=findings.refusals.examples[rule]) for rule, count in refused
        ],
        would_help=what_would_help(problem, findings),
        fewest_devices=fewest[0] if fewest else None,
        search_s=round(findings.search_s, 3),
    )


def _row(candidate: Candidate, problem: Problem, steps: int, price: float | None) -> PlanRow:
    validation = validation_of(problem.cluster.device, candidate.config)
    hours = candidate.step_s * steps / 3600
    device_hours = hours * problem.cluster.devices
    tokens = problem.profile.sequence
    return PlanRow(
        plan=plan_keys(candidate.config),
        data=candidate.plan.data,
        gradient_accumulation=candidate.plan.accumulation,
        step_s=candidate.step_s,
        measured_step_s=candidate.measured_step_s,
        error=validation.p90 if validation else None,
        memory_bytes=int(candidate.memory.total),
        communication=candidate.time.communication,
        bubble=candidate.time.bubble,
        samples_per_s=candidate.samples_per_s,
        tokens_per_s=candidate.samples_per_s * tokens if tokens > 1 else None,
        hours=hours,
        device_hours=device_hours,
        price=device_hours * price if price is not None else None,
    )


def plan_keys(plan: PlanConfig) -> dict[str, Any]:
    """Return the keys of a plan that the planner chooses, as a recipe writes them."""
    keys: dict[str, Any] = {key: getattr(plan, key) for key in _SHOWN_KEYS}
    if plan.offload_param != "none":
        keys["offload_param"] = plan.offload_param
    return keys | plan.model_dump(include={"zero_plus_plus"}, exclude_defaults=True)


def _table(rows: list[PlanRow]) -> list[str]:
    """Return the lines of the table."""
    has_price = any(row.price is not None for row in rows)
    titles = ["plan", "step", "memory", "comm.", "bubble", "samples/s", "tokens/s", "recipe", "device time"]
    cells = [[*titles, *(["price"] if has_price else [])]]
    for row in rows:
        error = f"± {row.error:.0%}" if row.error is not None else "not validated"
        error = "measured" if row.measured_step_s else error
        cells.append(
            [
                _plan_text(row),
                f"{_seconds(row.step_s)} {error}",
                f"{row.memory_bytes / GIB:.1f} GiB",
                f"{row.communication:.0%}",
                f"{row.bubble:.0%}",
                f"{row.samples_per_s:,.1f}",
                f"{row.tokens_per_s:,.0f}" if row.tokens_per_s else "",
                _duration(row.hours),
                _duration(row.device_hours),
                *([f"{row.price:,.2f}"] if row.price is not None else []),
            ]
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _plan_text(row: PlanRow) -> str:
    plan = row.plan
    parts = [f"data {row.data}"]
    parts += [f"{key} {plan[key]}" for key in ("tensor", "pipeline") if plan[key] > 1]
    parts.append(f"zero {plan['zero_stage']}")
    parts += [f"offload {plan['offload']}"] if plan["offload"] != "none" else []
    parts += [f"parameters {plan['offload_param']}"] if "offload_param" in plan else []
    plus = plan.get("zero_plus_plus", {})
    parts += [f"hpz {plus['hpz_partition_size']}"] if plus else []
    parts += ["quantized"] if plus.get("quantized_weights") else []
    parts.append(f"micro {plan['micro_batch']} x {row.gradient_accumulation}")
    parts += ["recompute"] if plan["activation_checkpointing"] else []
    return ", ".join(parts)


def _seconds(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f} s"
    return f"{value:.3g} s" if value >= 0.1 else f"{value * 1000:.3g} ms"


def _duration(hours: float) -> str:
    """Return hours in the unit that shows them best."""
    if hours >= 100:
        return f"{hours:,.0f} h"
    if hours >= 2:
        return f"{hours:.3g} h"
    minutes = 60 * hours
    return f"{minutes:.3g} min" if minutes >= 2 else f"{60 * minutes:.3g} s"
