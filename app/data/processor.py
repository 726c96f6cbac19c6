"""The protocol that turns natural input into a model's tensors, shared by training, compilation and serving."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.config import DataConfig
from app.data.examples import Input, Modality
from app.pretrained import PretrainedFolder, open_pretrained
from app.tensors import Tensors, TensorSpec

Change = Callable[[Any], Any]
"""Changes one input for training: a text, or a decoded ``PIL.Image.Image``."""


class Processor(Protocol):
    """Turns inputs into tensors, the same in training and behind the endpoint."""

    modality: ClassVar[Modality]

    @classmethod
    def fit(cls, inputs: Sequence[Any], config: DataConfig) -> Self:
        """Return a processor fitted on the training inputs."""
        ...

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The tensors that ``encode`` makes, in the order of the model's arguments."""
        ...

    @property
    def facts(self) -> Mapping[str, int]:
        """Properties of the data that a model factory may need, by the name of its argument."""
        ...

    def encode(self, inputs: Sequence[Any]) -> Tensors:
        """Return one batch. Raises DataError for an input that cannot be read.

        Args:
            inputs: each an ``Input``, or a mapping: of values by the column, or of a record's fields by their names.
        """
        ...

    def save(self, folder: UPath) -> None:
        """Write everything that ``load`` needs."""
        ...

    @classmethod
    def load(cls, folder: UPath) -> Self:
        """Return the processor that ``save`` wrote. Raises FileNotFoundError."""
        ...


@runtime_checkable
class PretrainedProcessor(Protocol):
    """A type of processor that can also be read from the folder of a pretrained model."""

    @classmethod
    def from_pretrained(cls, folder: PretrainedFolder, config: DataConfig) -> Processor:
        """Return the folder's own processor. Raises RecipeError if the folder has none, or the data do not suit it."""
        ...


@runtime_checkable
class WeighingProcessor(Protocol):
    """A processor whose inputs may be small but slow to read. The endpoint weighs them first."""

    def weigh(self, item: Any) -> float:
        """Return the cost of reading an input, as a share of one request's limit, without reading it.

        Raises:
            DataError: the input is far larger than the model's input, or cannot be read.
        """
        ...


@runtime_checkable
class PaddingProcessor(Protocol):
    """A processor of texts, for ``train.tokens_per_batch``."""

    def padded_lengths(self, inputs: Iterable[Input]) -> NDArray[np.int32]:
        """Return the number of tokens that each input is padded to alone, of shape (inputs,)."""
        ...


@runtime_checkable
class AugmentingProcessor(Protocol):
    """A processor that changes inputs while it encodes them, for ``train.augment``."""

    def encode_changed(self, inputs: Sequence[Any], changes: Sequence[Change]) -> Tensors:
        """Return one batch, with ``changes[i]`` made to ``inputs[i]``. Raises DataError as ``encode`` does."""
        ...


@runtime_checkable
class GroupingProcessor(Protocol):
    """A processor of samples that fill different tensors. A batch of training has samples of one group only."""

    def measure(self, inputs: Sequence[Any]) -> tuple[NDArray[np.int64], NDArray[np.str_]]:
        """Return the length of each sample and the name of its group, each of shape (samples,)."""
        ...

    def split_media(self, item: Any) -> tuple[str, bytes | None]:
        """Return what a page shows of a sample: its words, and a picture if it has one."""
        ...

    def absent(self, tensors: Tensors) -> frozenset[str]:
        """Return the names of those tensors that no sample of a batch fills."""
        ...


def fit_processor(
    processor_type: type[Processor], inputs: Sequence[Any], config: DataConfig, pretrained: str | None
) -> Processor:
    """Return a processor fitted on inputs, or that of a pretrained model if the type can read it."""
    if pretrained is not None and issubclass(processor_type, PretrainedProcessor):
        return processor_type.from_pretrained(open_pretrained(pretrained), config)
    return processor_type.fit(inputs, config)
