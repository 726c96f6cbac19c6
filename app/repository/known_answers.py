"""Rows and their logits, published with a version to test other builds of its engine before they serve."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from app.engines.base import Engine
from app.tensors import OUTPUT, Tensors

ANSWERS_FILE = "answers.npz"
_INPUT = "input:"


@dataclass(frozen=True)
class KnownAnswers:
    """A few real inputs, and PyTorch's logits for them, of shape (rows, labels)."""

    inputs: Tensors
    logits: NDArray[np.float32]

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read them from a version's files."""
        with np.load(folder / ANSWERS_FILE) as arrays:
            names = [name for name in arrays.files if name != OUTPUT]
            return cls({name.removeprefix(_INPUT): arrays[name] for name in names}, arrays[OUTPUT])

    def save(self, folder: Path) -> None:
        """Write them into a version's folder."""
        inputs = {f"{_INPUT}{name}": array for name, array in self.inputs.items()}
        arrays: dict[str, Any] = {OUTPUT: self.logits, **inputs}
        np.savez(folder / ANSWERS_FILE, **arrays)

    def difference(self, engine: Engine) -> float:
        """Return the largest absolute difference between the engine's logits and PyTorch's; NaN if any is NaN."""
        return float(np.abs(engine.infer(self.inputs)[OUTPUT] - self.logits).max())
