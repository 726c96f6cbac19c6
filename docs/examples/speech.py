"""Speech as a task of one's own: which word is in a recording.

Audio clips become log-mel spectrograms, as fields of kind ``audio`` do.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from app.config import Recipe
from app.data.audio import AudioProcessor, require_recording
from app.data.examples import Examples, Input
from app.data.in_memory import prepare_examples
from app.data.labelled import LabelledData
from app.data.targets import Outputs
from app.errors import DataError
from app.storage import to_path
from app.tasks import Metric
from app.tasks.classification import Classification
from app.tasks.metrics import Accuracy


@dataclass(frozen=True)
class AverageRecall(Metric):
    """Mean over the labels of the share of their recordings that are recognized. Rare words count as much as others."""

    name = "average_recall"
    num_labels: int = 0

    def bind(self, targets: Outputs) -> Self:
        """Return the metric for these labels."""
        return type(self)(targets.num_outputs)

    @property
    def size(self) -> int:  # type: ignore[override]
        """Two sums for each label."""
        return 2 * self.num_labels

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the recognized recordings of each label, then all of each."""
        right = targets[outputs.argmax(-1) == targets]
        return torch.cat([part.bincount(minlength=self.num_labels) for part in (right, targets)])

    def value(self, sums: Tensor) -> float:
        right, given = sums.chunk(2)
        return float((right[given > 0] / given[given > 0]).mean())


class Speech(Classification):
    """Recordings with one word each, in a folder for each word: ``recordings/yes/a.wav``."""

    processor, metrics = AudioProcessor, (AverageRecall(), Accuracy())

    def prepare(self, recipe: Recipe) -> LabelledData:
        return prepare_examples(_read_folder(recipe.data.source), recipe.data, self.processor, self.targets)


def _read_folder(source: str) -> Examples:
    """Return the recordings of a folder, with the names of their folders as labels."""
    files = sorted(to_path(source).glob("*/*.wav"), key=str)
    if not files:
        raise DataError(f"data.source {source!r} has no recordings: expected LABEL/NAME.wav")
    contents: list[Input] = []
    for file in files:
        contents.append(content := file.read_bytes())
        try:
            require_recording(content)
        except DataError as error:
            raise DataError(f"data.source {source!r}, {file.parent.name}/{file.name}: {error}") from error
    return Examples("audio", contents, [file.parent.name for file in files])
