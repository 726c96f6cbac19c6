"""Rows and their right answers, published with a version to test other builds of its engine before they serve."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from app.engines.base import Engine
from app.tensors import Tensors

ANSWERS_FILE = "answers.npz"
_INPUT, _OUTPUT, _MAGNITUDE = "input:", "output:", "magnitude:"


@dataclass(frozen=True)
class KnownAnswers:
    """A few real inputs, and the right outputs for them."""

    inputs: Tensors
    outputs: Tensors
    magnitudes: Tensors
    """The magnitude of each column of the float outputs, over all rows that they were taken from."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read them from a version's files."""
        with np.load(folder / ANSWERS_FILE) as arrays:
            read = {name: _strings(arrays[name]) for name in arrays.files}

        def part(prefix: str) -> Tensors:
            return {name.removeprefix(prefix): array for name, array in read.items() if name.startswith(prefix)}

        return cls(part(_INPUT), part(_OUTPUT), part(_MAGNITUDE))

    def save(self, folder: Path) -> None:
        """Write them into a version's folder."""
        arrays: dict[str, Any] = {f"{_INPUT}{name}": _plain(array) for name, array in self.inputs.items()}
        arrays |= {f"{_OUTPUT}{name}": _plain(array) for name, array in self.outputs.items()}
        arrays |= {f"{_MAGNITUDE}{name}": array for name, array in self.magnitudes.items()}
        np.savez(folder / ANSWERS_FILE, **arrays)

    def difference(self, engine: Engine, differing_rows: float = 0.0) -> float:
        """Return the largest difference from a right number, as a share of its column's magnitude; NaN if any is NaN.

        Args:
            differing_rows: the share of rows that may differ in an output of whole numbers, BOOL or strings. The
                difference is infinite if more do.
        """
        given = engine.run(self.inputs)
        differences, rows = [0.0], len(next(iter(self.inputs.values())))
        differing = np.zeros(rows, np.bool_)
        for name, right in self.outputs.items():
            if right.dtype.kind == "f":
                difference = np.abs(given[name].astype(np.float64) - right.astype(np.float64))
                differences.append((difference / self.magnitudes[name]).max(initial=0.0))
            else:
                differing |= (given[name] != right).reshape(rows, -1).any(axis=1)
        # Rounded up: among a few rows, even a small share may be one row.
        if differing.sum() > math.ceil(differing_rows * rows):
            return math.inf
        return float(np.max(differences))  # unlike max, it propagates NaN


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array that is saved without pickle: strings have a fixed width."""
    return (
        np.array([_text(item) for item in array.flat], np.str_).reshape(array.shape) if array.dtype.hasobject else array
    )


def _text(item: str | bytes) -> str:
    return item.decode() if isinstance(item, bytes) else item


def _strings(array: NDArray[Any]) -> NDArray[Any]:
    """Undo ``_plain``."""
    return array.astype(np.object_) if array.dtype.kind == "U" else array
