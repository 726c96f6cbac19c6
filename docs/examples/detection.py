"""Object detection as a task of one's own: which things are in a picture, and where.

The picture is divided into a grid. Each cell says whether the centre of an object lies in it, with its label and box.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from torch import Tensor, nn
from torch.nn import functional
from upath import UPath

from app.config import DataConfig
from app.data.images import ImageProcessor
from app.data.targets import LabelRule, load_labels, save_labels
from app.errors import DataError
from app.tasks import Metric, ServedTask

GRID = 4
"""Cells along each side."""
_BOX = slice(1, 5)
"""Of a cell's output: after the logit of an object the box, then a logit for each label."""


class Box(BaseModel):
    """An object in a picture. Places and sizes are shares of the picture's."""

    label: str
    x: float
    """Of the centre, from the left."""
    y: float
    """Of the centre, from the top."""
    width: float
    height: float


@dataclass(frozen=True)
class Boxes:
    """Each picture has any number of boxes. The output is a grid of cells in one row of numbers."""

    rule: ClassVar[LabelRule] = LabelRule()
    labels: list[str]

    @classmethod
    def fit(cls, labels: Mapping[str, int], config: DataConfig) -> Self:
        found = sorted({box.label for given in labels for box in _parse(given, config.source)})
        if not found:
            raise DataError(f"data.source {config.source!r} has no boxes: expected some in some pictures")
        return cls(found)

    @property
    def num_outputs(self) -> int:
        return GRID * GRID * (5 + len(self.labels))

    @property
    def facts(self) -> Mapping[str, int]:
        """Numbers that ``net`` receives by the names of its arguments."""
        return {"num_labels": self.num_outputs}

    def read(self, labels: Sequence[str], config: DataConfig, key: str = "source") -> list[str]:
        for given in labels:
            for box in _parse(given, getattr(config, key)):
                if box.label not in self.labels:
                    raise DataError(f"data.{key} has the label {box.label!r}: expected {', '.join(self.labels)}")
        return list(labels)

    def fitted(self, values: Sequence[str], counts: Sequence[int]) -> Self:  # noqa: ARG002
        return self

    def batch(self, values: Sequence[str]) -> NDArray[np.float32]:
        """Return 1 where a cell has an object, its box and its class, of shape (pictures, cells, 6)."""
        targets = np.zeros((len(values), GRID, GRID, 6), np.float32)
        for row, value in enumerate(values):
            for box in _parse(value, "data"):
                column, line = (min(int(place * GRID), GRID - 1) for place in (box.x, box.y))
                place = box.x * GRID - column, box.y * GRID - line, box.width, box.height
                targets[row, line, column] = 1.0, *place, self.labels.index(box.label)
        return targets.reshape(len(values), GRID * GRID, 6)

    def decode(self, outputs: NDArray[np.float32]) -> list[Mapping[str, Any]]:
        """Return the boxes of each picture, the most certain first."""
        cells = torch.from_numpy(outputs).unflatten(1, (GRID * GRID, -1))  # type: ignore[no-untyped-call]
        return [{"boxes": [box | {"score": score} for score, box in self._boxes(picture)]} for picture in cells]

    def _boxes(self, cells: Tensor) -> list[tuple[float, dict[str, Any]]]:
        scores, places = torch.sigmoid(cells[:, 0]), torch.sigmoid(cells[:, _BOX]).tolist()
        labels = cells[:, _BOX.stop :].argmax(-1).tolist()
        found = []
        for cell in (scores > 0.5).nonzero()[:, 0].tolist():
            x, y, width, height = places[cell]
            line, column = divmod(cell, GRID)
            box = Box(
                label=self.labels[labels[cell]], x=(column + x) / GRID, y=(line + y) / GRID, width=width, height=height
            )
            found.append((round(float(scores[cell]), 6), box.model_dump()))
        return sorted(found, key=lambda pair: -pair[0])

    def save(self, folder: UPath) -> None:
        save_labels(self.labels, folder)

    @classmethod
    def load(cls, folder: UPath) -> Self:
        return cls(load_labels(folder))


class FoundF1(Metric):
    """F1 of objects found in the right cell, with the right label and a box that overlaps by half (IoU)."""

    name, size = "found_f1", 3

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the numbers of right, of given and of true objects."""
        cells = _cells(outputs)
        given, true = cells[..., 0] > 0, targets[..., 0] > 0.5
        same = cells[..., _BOX.stop :].argmax(-1) == targets[..., 5].long()
        near = _overlap(torch.sigmoid(cells[..., _BOX]), targets[..., _BOX]) >= 0.5
        return torch.stack([(given & true & same & near).sum(), given.sum(), true.sum()])

    def value(self, sums: Tensor) -> float:
        right, given, true = sums.tolist()
        return float(2.0 * right / (given + true)) if given + true else 1.0


class Detection(ServedTask):
    """Pictures with boxes, which a jsonl file lists: ``{"image": "a.png", "boxes": [{"label": …, "x": …}]}``."""

    processor, targets, metrics = ImageProcessor, Boxes, (FoundF1(),)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over the cells: object or not, and for objects the box and the label."""
        cells, true = _cells(outputs), targets[..., 0]
        presence = functional.binary_cross_entropy_with_logits(cells[..., 0], true, reduction="none")
        boxes = functional.l1_loss(torch.sigmoid(cells[..., _BOX]), targets[..., _BOX], reduction="none").sum(-1)
        labels = functional.cross_entropy(cells[..., _BOX.stop :].mT, targets[..., 5].long(), reduction="none")
        return (presence + true * (2.0 * boxes + labels)).mean(-1)


def net(num_labels: int, channels: int, width: int = 32) -> nn.Module:
    """Return a convolutional network that halves the picture three times, from 8 x 8 pixels a cell."""
    layers: list[nn.Module] = []
    for level in range(3):
        before, after = width * level or channels, width * (level + 1)
        layers += [nn.Conv2d(before, after, 3, 2, 1), nn.ReLU(), nn.Conv2d(after, after, 3, 1, 1), nn.ReLU()]
    return _Grid(nn.Sequential(*layers, nn.Conv2d(3 * width, num_labels // GRID**2, 1)))


class _Grid(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the cells of each picture, line by line, in one row: (pictures, outputs)."""
        return self.layers(pixel_values).permute(0, 2, 3, 1).flatten(1)  # type: ignore[no-any-return]


def _cells(outputs: Tensor) -> Tensor:
    """Return outputs of shape (pictures, cells, 5 + labels)."""
    return outputs.reshape(len(outputs), GRID * GRID, outputs.shape[1] // GRID**2)


def _overlap(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the intersection over union of boxes whose centres are in cells, of shape (…, 4)."""

    def corners(boxes: Tensor) -> tuple[Tensor, Tensor]:
        centres, halves = boxes[..., :2] / GRID, boxes[..., 2:] / 2
        return centres - halves, centres + halves

    (first, last), (other_first, other_last) = corners(ours), corners(theirs)
    shared = (torch.minimum(last, other_last) - torch.maximum(first, other_first)).clamp(min=0).prod(-1)
    return shared / (ours[..., 2:].prod(-1) + theirs[..., 2:].prod(-1) - shared).clamp(min=1e-9)


def _parse(given: str, source: str) -> list[Box]:
    try:
        return [Box.model_validate(box) for box in json.loads(given)]
    except ValidationError as error:
        raise DataError(
            f"{source!r} has the boxes {given}: expected a label, x, y, width and height, as shares of the picture"
        ) from error
