"""Variants of a compiled model, and how each compares with PyTorch on the validation split."""

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel
from torch import nn

from app.compile.export import OUTPUT
from app.config import GatesConfig
from app.data.dataset import Dataset
from app.engines.base import Engine
from app.models.factory import logits_of
from app.tensors import Tensors

_BATCH = 64
_LATENCY_BATCHES = (1, 8)
_REPEATS = 30


class Variant(BaseModel):
    """One engine's numbers for one precision."""

    precision: str
    engine: str
    engine_version: str
    size_bytes: int
    accuracy: float
    max_difference: float
    latency_ms: dict[int, float]
    throughput: dict[int, float]
    passed: bool

    def __str__(self) -> str:
        latency = ", ".join(f"{value:.2f} ms at batch {batch}" for batch, value in self.latency_ms.items())
        return (
            f"{self.engine} {self.precision}: accuracy {self.accuracy:.4f}, "
            f"largest difference {self.max_difference:.1e}, {latency}{'' if self.passed else ' (refused)'}"
        )


@dataclass(frozen=True)
class Reference:
    """PyTorch's answers on the validation split, in batches: inputs, logits (rows, labels) and classes (rows)."""

    inputs: list[Tensors]
    logits: list[NDArray[np.float32]]
    classes: NDArray[np.int64]

    @property
    def accuracy(self) -> float:
        """Share of the rows that PyTorch answers right."""
        return _accuracy(self.logits, self.classes)


def pytorch_reference(model: nn.Module, dataset: Dataset) -> Reference:
    """Run a trained model over a split."""
    starts = range(0, len(dataset), _BATCH)
    batches = [dataset.batch(range(start, min(start + _BATCH, len(dataset)))) for start in starts]
    with torch.no_grad():
        logits = [
            logits_of(model(**{name: torch.from_numpy(array) for name, array in batch.inputs.items()})).numpy()
            for batch in batches
        ]
    targets = np.concatenate([batch.targets for batch in batches])
    return Reference([batch.inputs for batch in batches], logits, targets)


def measure(engine: Engine, precision: str, size_bytes: int, reference: Reference, gates: GatesConfig) -> Variant:
    """Compare an engine with PyTorch on every row, and time it at a few batch sizes."""
    logits = [engine.infer(batch)[OUTPUT] for batch in reference.inputs]
    difference = max(float(np.abs(a - b).max()) for a, b in zip(logits, reference.logits, strict=True))
    accuracy = _accuracy(logits, reference.classes)
    first = reference.inputs[0]
    latency = {
        size: _median_ms(engine, {name: np.resize(array, (size, *array.shape[1:])) for name, array in first.items()})
        for size in _LATENCY_BATCHES
    }
    return Variant(
        precision=precision,
        engine=engine.name,
        engine_version=engine.version,
        size_bytes=size_bytes,
        accuracy=accuracy,
        max_difference=difference,
        latency_ms=latency,
        throughput={size: round(1000.0 * size / value, 1) for size, value in latency.items()},
        passed=difference <= gates.max_difference and reference.accuracy - accuracy <= gates.max_accuracy_drop,
    )


def _accuracy(logits: list[NDArray[np.float32]], classes: NDArray[np.int64]) -> float:
    return float((np.concatenate([batch.argmax(-1) for batch in logits]) == classes).mean())


def _median_ms(engine: Engine, batch: Tensors) -> float:
    """Median time of a call, after one to warm up."""
    engine.infer(batch)
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        engine.infer(batch)
        times.append(1000.0 * (time.perf_counter() - began))
    return round(float(np.median(times)), 3)
