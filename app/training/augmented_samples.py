"""Ten training samples as ``train.augment`` changes them, for the run's page."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from app.data.augmentation import Augmentation
from app.data.labelled import LabelledDataset
from app.data.prepared import Batch
from app.tasks.judgement import spread
from app.telemetry.augmentation import AugmentedSamples, ShownInput
from app.training.data.ranks import partners_of
from app.training.evaluation import shorten, small_png

_SAMPLES, _CHANGES = 10, 3
_PLAIN = 0.995
"""A sample that keeps more of itself than this is shown without a caption."""

Levels = tuple[float, float]
"""The values that are shown as black and as white."""


def augmented_samples(augmentation: Augmentation, dataset: LabelledDataset) -> AugmentedSamples:
    """Return samples from all over the split, each as it is and after several changes.

    Texts are shown as words, and other inputs as the tensors that the model gets.
    """
    rows = spread(len(dataset), _SAMPLES)
    if dataset.processor.modality == "text":
        return _changed_texts(augmentation, dataset, rows)
    partners = partners_of(np.array(rows), _SAMPLES).tolist()
    plain = dataset.batch(rows)
    (first, *_) = plain.inputs.values()
    levels = float(first.min()), float(first.max())
    # Each number of a batch draws other changes.
    batches = [augmentation.batch(dataset, rows, partners, 1, number) for number in range(_CHANGES)]
    changed = [list(_shown(batch, dataset.targets.labels, levels)) for batch in batches]
    return AugmentedSamples(
        before=list(_shown(plain, dataset.targets.labels, levels)),
        after=[list(forms) for forms in zip(*changed, strict=True)],
    )


def _changed_texts(augmentation: Augmentation, dataset: LabelledDataset, rows: list[int]) -> AugmentedSamples:
    texts, _ = dataset.split.take(rows)
    changed = [
        [augmentation.of(row, 1, number)(text) for number in range(_CHANGES)]
        for text, row in zip(texts, rows, strict=True)
    ]
    return AugmentedSamples(
        before=[ShownInput(text=shorten(str(text))) for text in texts],
        after=[[ShownInput(text=shorten(text)) for text in forms] for forms in changed],
    )


def _shown(batch: Batch, labels: list[str], levels: Levels) -> Iterator[ShownInput]:
    """Yield the first input of each sample, with its labels if it has several."""
    (first, *_) = batch.inputs.values()
    for values, target in zip(first, batch.targets, strict=True):
        caption = _labels_of(target, labels) if batch.targets.dtype == np.float32 else ""
        if values.ndim < 2:
            numbers = shorten(", ".join(f"{value:.3g}" for value in values))
            yield ShownInput(text=f"{numbers} ({caption})" if caption else numbers)
        else:
            yield ShownInput(png_base64=small_png(_picture(values, levels)), caption=caption)


def _labels_of(shares: NDArray[np.float32], labels: list[str]) -> str:
    """Return the labels of a mixed sample with their shares, the largest first."""
    if shares.ndim != 1 or len(shares) != len(labels) or shares.max() > _PLAIN:
        return ""
    return ", ".join(f"{shares[index]:.0%} {labels[index]}" for index in np.argsort(-shares) if shares[index] > 0.0)


def _picture(values: NDArray[np.float32], levels: Levels) -> Image.Image:
    """Return a tensor of shape (channels, height, width), or a spectrogram (bins, frames), as a picture."""
    low, high = levels
    pixels = (np.clip((values - low) / ((high - low) or 1.0), 0.0, 1.0) * 255.0).astype(np.uint8)
    if pixels.ndim == 3 and len(pixels) == 3:
        return Image.fromarray(pixels.transpose(1, 2, 0))
    # The lowest frequency of a spectrogram is at the bottom.
    return Image.fromarray(pixels[::-1] if pixels.ndim == 2 else pixels.reshape(-1, *pixels.shape[-2:])[0])
