"""The sample of labelled rows of a split that judges read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.data.examples import Modality
from app.data.labelled import LabelledDataset
from app.data.targets import Targets
from app.tasks.judgement.base import places_of, spread

_MAX_ROWS: dict[Modality, int] = {"text": 20_000, "row": 20_000, "image": 4_000}
"""Maximum number of rows whose inputs are read, by modality. Other inputs are not read."""
_MAX_CONSTANT_ROWS, _MAX_OUTPUTS = 200_000, 2**22
"""Maximum number of rows that constant answers are measured on, and of output values for them."""
_MAX_CHARACTERS, _SAMPLED = 8_000_000, 1_000
"""Maximum characters that are read, and the number of texts whose lengths estimate the total."""
_MAX_PIXELS, _MAX_PICTURE_BYTES, _MEASURED = 2**26, 2**26, 16
"""Maximum pixels that are encoded and bytes that are decoded, and the number of pictures that estimate them."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a split, evenly spaced."""

    inputs: Sequence[Any]
    values: Sequence[Any]
    dataset: LabelledDataset

    @property
    def targets(self) -> Targets:
        return self.dataset.targets

    def spread(self, count: int) -> "Rows":
        """Return at most ``count`` of the rows."""
        places = spread(len(self.values), count)
        return Rows([self.inputs[place] for place in places], [self.values[place] for place in places], self.dataset)


def rows_of(dataset: LabelledDataset) -> Rows:
    """Return the rows whose inputs are read: none if nothing reads them."""
    if (count := _MAX_ROWS.get(dataset.processor.modality)) is None:
        return Rows([], [], dataset)
    if dataset.processor.modality == "image":
        count = min(count, _num_pictures(dataset))
    return Rows(*dataset.split.take(places_of(dataset, _num_texts(dataset, count))), dataset)


def num_texts(dataset: LabelledDataset) -> int:
    """Return how many of a split's texts are read."""
    return _num_texts(dataset, _MAX_ROWS["text"])


def _num_texts(dataset: LabelledDataset, count: int) -> int:
    """Return ``count``, or fewer if rows have many characters."""
    sample = places_of(dataset, _SAMPLED)
    characters = sum(int(dataset.lengths[place]) for place in sample)
    return max(1, min(count, _MAX_CHARACTERS * len(sample) // characters)) if characters else count


def _num_pictures(dataset: LabelledDataset) -> int:
    """Return how many pictures can be read in a few seconds."""
    measured, _ = dataset.split.take(places_of(dataset, _MEASURED))
    pixels = sum(tensor[0].size for tensor in dataset.processor.encode(measured[:1]).values())
    num_bytes = sum(len(picture) for picture in measured) / len(measured)
    return max(1, int(min(_MAX_PIXELS / pixels, _MAX_PICTURE_BYTES / num_bytes)))


def values_of(dataset: LabelledDataset) -> tuple[Sequence[Any], int]:
    """Return the values of some rows, and the number of rows that they were sampled from."""
    split, num_outputs = dataset.split, dataset.targets.num_outputs
    count = min(_MAX_CONSTANT_ROWS, max(1, _MAX_OUTPUTS // num_outputs))
    is_counted = split.shards is None or split.shards.has_class_counts
    if dataset.targets.rule.kept_as != "class" or not is_counted:
        return split.values(places_of(dataset, count)), len(dataset)
    totals = np.cumsum(split.class_counts(num_outputs))
    values: list[int] = totals.searchsorted(spread(len(dataset), count), side="right").tolist()
    # Not a random sample, because each class keeps its share of the rows.
    return values, len(values)
