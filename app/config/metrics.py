"""The metrics of recipes: their names and modes, and the one that compares epochs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator

from app.errors import RecipeError

Mode = Literal["min", "max"]

MODES: Mapping[str, Mode] = {
    "val_loss": "min",
    "val_accuracy": "max",
    "val_perplexity": "min",
    "val_mae": "min",
    "val_rmse": "min",
    "val_r2": "max",
    "val_f1": "max",
    "val_exact_match": "max",
    "val_recall_at_1": "max",
    "val_mrr": "max",
    "val_entity_f1": "max",
    "train_loss": "min",
    "samples_per_s": "max",
    "latency_ms": "min",
    "parameters": "min",
}
"""The metrics of built-in tasks, and those of a trial. A task of one's own names the modes of its own."""

MEASURED_AT_END = {"latency_ms", "parameters"}
"""Metrics of a trial that are measured once, after its last epoch."""


def _is_of_task(given: str) -> str:
    if not given.startswith("val_"):
        raise ValueError(f"expected val_loss, or val_NAME for a metric of the task, got {given!r}")
    return given


def _is_of_trial(given: str) -> str:
    if not given.startswith("val_") and given not in MODES:
        others = [name for name in MODES if not name.startswith("val_")]
        raise RecipeError(
            f"expected val_loss, val_NAME for a metric of the task, or {', '.join(others)}, got {given!r}"
        ).of("metric.unknown")
    return given


def cost_of(value: float, mode: Mode) -> float:
    """Convert a metric's value so that lower is better. NaN is the worst."""
    return math.inf if math.isnan(value) else value if mode == "min" else -value


@dataclass(frozen=True)
class Selection:
    """The metric by which the epochs of a run are compared."""

    metric: str
    mode: Mode


TaskMetric = Annotated[str, AfterValidator(_is_of_task)]
TrialMetric = Annotated[str, AfterValidator(_is_of_trial)]
