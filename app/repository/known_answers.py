"""Rows with their logits, kept with a version: another build of its engine is asked for these before it serves."""

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
    """Real inputs of a few rows, and PyTorch's logits of them, of shape (rows, labels)."""

    inputs: Tensors
    logits: NDArray[np.float32]

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Of a version's files."""
        with np.load(folder / ANSWERS_FILE) as arrays:
            names = [name for name in arrays.files if name != OUTPUT]
            return cls({name.removeprefix(_INPUT): arrays[name] for name in names}, arrays[OUTPUT])

    def save(self, folder: Path) -> None:
        """Write them among a version's files."""
        inputs = {f"{_INPUT}{name}": array for name, array in self.inputs.items()}
        arrays: dict[str, Any] = {OUTPUT: self.logits, **inputs}
        np.savez(folder / ANSWERS_FILE, **arrays)

    def difference(self, engine: Engine) -> float:
        """The largest of a logit that the engine gives from PyTorch's, absolute; NaN if one is no number."""
        return float(np.abs(engine.infer(self.inputs)[OUTPUT] - self.logits).max())
