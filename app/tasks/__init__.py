"""Tasks, which recipes name. One class says how data are read, learned, judged, compiled and answered."""

from app.tasks.base import Encoded, ServedTask, Task
from app.tasks.metrics import Metric, SklearnMetric, TorchMetric, sum_and_count
from app.tasks.registry import (
    find_compiled_task,
    find_served_task,
    find_task,
    load_prepared,
    load_with_test,
    prepare,
)

__all__ = [
    "Encoded",
    "Metric",
    "ServedTask",
    "SklearnMetric",
    "Task",
    "TorchMetric",
    "find_compiled_task",
    "find_served_task",
    "find_task",
    "load_prepared",
    "load_with_test",
    "prepare",
    "sum_and_count",
]
