"""What the outputs of an embedding model mean: a vector for each text, of which only the direction counts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from upath import UPath

from app.data.targets import Answer
from app.storage import write_atomically

VECTORS_FILE = "vectors.json"


class _Size(BaseModel):
    dimensions: int


@dataclass(frozen=True)
class Vectors:
    """Each row has a vector. The output is that vector, of shape (rows, dimensions)."""

    labels: ClassVar[list[str]] = []
    dimensions: int

    @property
    def num_outputs(self) -> int:
        return self.dimensions

    @property
    def facts(self) -> Mapping[str, int]:
        """What a model factory may need."""
        return {"dimensions": self.dimensions}

    def decode(self, outputs: NDArray[np.float32]) -> list[Answer]:
        """Return the vector of each row, scaled to length 1."""
        norms = np.linalg.norm(outputs, axis=1, keepdims=True)
        return [{"embedding": row} for row in (outputs / np.maximum(norms, 1e-12)).tolist()]

    def save(self, folder: UPath) -> None:
        write_atomically(folder / VECTORS_FILE, _Size(dimensions=self.dimensions).model_dump_json().encode())

    @classmethod
    def load(cls, folder: UPath) -> Self:
        return cls(_Size.model_validate_json((folder / VECTORS_FILE).read_bytes()).dimensions)
