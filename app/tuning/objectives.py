"""The objectives of a trial: metrics of an epoch, the number of parameters, or the latency."""

import math
import statistics
import time
from collections.abc import Sequence

import torch
from torch import nn

from app.config import Objective, Recipe
from app.data.prepared import PreparedData
from app.errors import NonFiniteLossError
from app.models.factory import blueprint_of, build_model
from app.tasks import find_task
from app.training.records import EpochRecord, best_of, require_finite

_LATENCY_CALLS = 20


def objective_of(record: EpochRecord, objective: Objective) -> float:
    """Return an objective after an epoch.

    Raises:
        NonFiniteLossError: it is NaN or infinite.
    """
    value = record.value_of(objective.metric)
    if not math.isfinite(value):
        raise NonFiniteLossError(f"{objective.metric} is {value} after epoch {record.epoch}")
    return value


def epoch_value(record: EpochRecord, objective: Objective) -> float:
    """Return an objective after an epoch. One that is NaN or infinite is the worst: training goes on, and may recover.

    Raises:
        NonFiniteLossError: the epoch has no such metric.
    """
    is_known = getattr(record, objective.metric, None) is not None
    is_finite = math.isfinite(record.value_of(objective.metric))
    return objective.worst if is_known and not is_finite else objective_of(record, objective)


def final_values(
    objectives: Sequence[Objective], records: Sequence[EpochRecord], recipe: Recipe, data: PreparedData
) -> list[float]:
    """Return the objectives of a trained trial, at the epoch whose weights training keeps."""
    selection = find_task(recipe.task).selection(recipe.train)
    best = best_of(records, selection)
    require_finite(best, selection)
    return [_measure(objective, best, recipe, data) for objective in objectives]


def _measure(objective: Objective, best: EpochRecord, recipe: Recipe, data: PreparedData) -> float:
    match objective.metric:
        case "parameters":
            return float(blueprint_of(recipe.model, data.facts).num_parameters)
        case "latency_ms":
            return _latency_ms(build_model(recipe.model, data.facts), data)
    return objective_of(best, objective)


def _latency_ms(model: nn.Module, data: PreparedData) -> float:
    """Return the median time in ms of the PyTorch model for one validation sample, on this process's CPU threads."""
    inputs = {name: torch.from_numpy(array) for name, array in data.validation.batch([0]).inputs.items()}
    model.eval()
    times = []
    with torch.inference_mode():
        for _ in range(1 + _LATENCY_CALLS):
            began = time.perf_counter()
            model(**inputs)
            times.append(1000.0 * (time.perf_counter() - began))
    return statistics.median(times[1:])  # the first call warms up
