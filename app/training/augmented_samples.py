"""Ten training samples as ``train.augment`` changes them, for the run's page."""

import io

import numpy as np
from PIL import Image

from app.data.augmentation import Augmentation
from app.data.classification import LabelledDataset
from app.data.examples import Input
from app.data.processor import Change
from app.reports.augmentation import AugmentedSamples, ShownInput
from app.training.evaluation import shorten, small_png

_SAMPLES, _CHANGES = 10, 3


def augmented_samples(augmentation: Augmentation, dataset: LabelledDataset) -> AugmentedSamples:
    """Return samples from all over the split, each as it is and after several changes."""
    rows = np.unique(np.linspace(0, len(dataset) - 1, min(_SAMPLES, len(dataset)), dtype=int)).tolist()
    inputs, _ = dataset.split.take(rows)
    shown = [
        [_shown(item, change) for change in (None, *(augmentation.of(row, 1, number) for number in range(_CHANGES)))]
        for item, row in zip(inputs, rows, strict=True)
    ]
    return AugmentedSamples(before=[first for first, *_ in shown], after=[changed for _, *changed in shown])


def _shown(item: Input, change: Change | None) -> ShownInput:
    if isinstance(item, str):
        return ShownInput(text=shorten(change(item) if change else item))
    with Image.open(io.BytesIO(item)) as image:
        converted = image.convert("L" if image.mode in ("1", "L") else "RGB")
        return ShownInput(png_base64=small_png(change(converted) if change else converted))
