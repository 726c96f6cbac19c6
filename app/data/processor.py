"""How natural input becomes a model's tensors: the one protocol behind training, compiling and serving."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol, Self

from upath import UPath

from app.config import DataConfig
from app.data.examples import Input, Modality
from app.tensors import Tensors, TensorSpec


class Processor(Protocol):
    """Turns inputs into tensors, the same in training and behind the endpoint."""

    modality: ClassVar[Modality]

    @classmethod
    def fit(cls, inputs: Sequence[Input], config: DataConfig) -> Self:
        """A processor made from the training inputs."""
        ...

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The tensors that ``encode`` makes, in the order of the model's arguments."""
        ...

    @property
    def facts(self) -> Mapping[str, int]:
        """What a model factory may want to know, by the name of its argument."""
        ...

    def encode(self, inputs: Sequence[Input]) -> Tensors:
        """One batch. Raises DataError for an input that cannot be read."""
        ...

    def save(self, folder: UPath) -> None:
        """Write everything that ``load`` needs."""
        ...

    @classmethod
    def load(cls, folder: UPath) -> Self:
        """The processor that ``save`` wrote. Raises FileNotFoundError."""
        ...
