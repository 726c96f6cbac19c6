"""What every engine is."""

from dataclasses import dataclass
from typing import Protocol

from app.tensors import Tensors, TensorSpec


@dataclass(frozen=True)
class Signature:
    """The tensors that a model takes and gives."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class Engine(Protocol):
    """A compiled model in memory."""

    name: str
    version: str

    @property
    def signature(self) -> Signature:
        """What ``infer`` takes and gives."""
        ...

    def infer(self, inputs: Tensors) -> Tensors:
        """Run one batch; safe to call from several threads.

        Raises:
            RequestError: an input is missing, not known, or of the wrong dtype or shape.
        """
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...
