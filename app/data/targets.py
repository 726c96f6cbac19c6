"""The protocol that turns labels into a model's targets, and its outputs into answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.data.classification import load_labels, save_labels

Answer = Mapping[str, Any]
"""What ``predict`` says of one input: an object of JSON."""


class Targets(Protocol):
    """What a model's outputs mean, kept with its weights and its versions."""

    @property
    def labels(self) -> list[str]:
        """The names of the output's columns; empty if they have none."""
        ...

    @property
    def num_outputs(self) -> int:
        """Columns of the model's output. A model factory receives it as ``num_labels``."""
        ...

    def decode(self, outputs: NDArray[np.float32]) -> list[Answer]:
        """Return what ``predict`` answers for each row of ``outputs``."""
        ...

    def save(self, folder: UPath) -> None:
        """Write everything that ``load`` needs."""
        ...

    @classmethod
    def load(cls, folder: UPath) -> Self:
        """Return what ``save`` wrote. Raises FileNotFoundError."""
        ...


@dataclass(frozen=True)
class Classes:
    """Each row has one of several labels. The output has a logit for each, of shape (rows, labels)."""

    labels: list[str]

    @property
    def num_outputs(self) -> int:
        return len(self.labels)

    def decode(self, outputs: NDArray[np.float32]) -> list[Answer]:
        """Return the most likely label of each row, and the probability of each label."""
        return [
            {
                "label": self.labels[int(row.argmax())],
                "scores": {label: round(float(score), 6) for label, score in zip(self.labels, row, strict=True)},
            }
            for row in softmax(outputs)
        ]

    def save(self, folder: UPath) -> None:
        save_labels(self.labels, folder)

    @classmethod
    def load(cls, folder: UPath) -> Self:
        return cls(load_labels(folder))


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the softmax over the last axis. SciPy's would add 0.1 s of import to the start of every replica."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)  # type: ignore[no-any-return]
