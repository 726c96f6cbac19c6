"""Raw examples, as they leave a source and as they stand in a split."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Modality = Literal["text", "image"]
Input = str | bytes
"""A text; or an image, as the content of a PNG or JPEG file."""


@dataclass(frozen=True)
class Examples:
    """Inputs with the label of each, in the order of the source."""

    modality: Modality
    inputs: list[Input]
    labels: list[str]

    def __len__(self) -> int:
        return len(self.inputs)

    def __iter__(self) -> Iterator[tuple[Input, str]]:
        return zip(self.inputs, self.labels, strict=True)


@dataclass(frozen=True)
class Split:
    """Inputs with the class of each, an index into the labels."""

    inputs: list[Input]
    classes: list[int]

    def __len__(self) -> int:
        return len(self.inputs)
