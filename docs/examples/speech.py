"""Speech as a task of one's own: which word is in a recording.

Audio clips become log-mel spectrograms, as fields of kind ``audio`` do.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from app.data.audio import AudioProcessor
from app.data.targets import Outputs
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
