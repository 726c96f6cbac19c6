"""Changes of encoded samples: masks on spectrograms, and two samples mixed into one with a target of both labels.

SpecAugment: Park et al. 2019, arXiv:1904.08779. mixup: Zhang et al. 2018, arXiv:1710.09412. CutMix: Yun et al. 2019,
arXiv:1905.04899.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from app.config import AugmentAudioConfig, MixConfig
from app.data.prepared import Batch
from app.errors import RecipeError
from app.tensors import Tensors, TensorSpec

Generators = Sequence[np.random.Generator]
Floats = NDArray[np.float32]
_PICTURE_DIMENSIONS = 4
_SPECTROGRAM_DIMENSIONS = 3


@dataclass(frozen=True)
class Mask:
    """Masks spectrograms: float inputs of shape (batch, …, bins, frames)."""

    config: AugmentAudioConfig
    names: list[str]
    """The inputs that are spectrograms."""

    @classmethod
    def of(cls, config: AugmentAudioConfig, inputs: Sequence[TensorSpec]) -> Self:
        """Return the masks for a processor's inputs. Raises RecipeError if none is a spectrogram."""
        names = [spec.name for spec in inputs if _is_float(spec) and len(spec.shape) >= _SPECTROGRAM_DIMENSIONS]
        if not names:
            raise RecipeError(
                f"train.augment.audio masks spectrograms, and the task's inputs are {_described(inputs)}: expected "
                "float32 of shape (batch, …, bins, frames)"
            ).of("augment.inputs", "train.augment.audio")
        return cls(config, names)

    def __call__(self, tensors: Tensors, generators: Generators) -> Tensors:
        """Return the tensors of a batch with masks, drawn from a generator for each row."""
        masked = {name: tensors[name].copy() for name in self.names}
        for spectrograms in masked.values():
            for spectrogram, generator in zip(spectrograms, generators, strict=True):
                mean = spectrogram.mean()
                for _ in range(self.config.masks):
                    spectrogram[..., :, _stretch(spectrogram.shape[-1], self.config.time_mask, generator)] = mean
                    spectrogram[..., _stretch(spectrogram.shape[-2], self.config.frequency_mask, generator), :] = mean
        return {**tensors, **masked}


def _stretch(size: int, max_share: float, generator: np.random.Generator) -> slice:
    """Return a random stretch of ``size`` places that covers at most this share of them."""
    width = int(generator.integers(int(max_share * size) + 1))
    start = int(generator.integers(size - width + 1))
    return slice(start, start + width)


@dataclass(frozen=True)
class Mix:
    """Mixes each sample of a batch with its partner. Targets become the shares of the labels."""

    config: MixConfig
    num_labels: int

    @classmethod
    def of(cls, config: MixConfig, inputs: Sequence[TensorSpec], num_labels: int) -> Self:
        """Return the mix of a processor's inputs. Raises RecipeError if they cannot be mixed."""
        if not all(map(_is_float, inputs)):
            raise RecipeError(
                f"train.augment.mix blends numbers, and the task's inputs are {_described(inputs)}: leave it out"
            ).of("augment.inputs", "train.augment.mix")
        if config.cutmix is not None and [len(spec.shape) for spec in inputs] != [_PICTURE_DIMENSIONS]:
            raise RecipeError(
                f"train.augment.mix.cutmix is for images, and the task's inputs are {_described(inputs)}: expected "
                "one of shape (batch, channels, height, width); set mixup instead"
            ).of("augment.inputs", "train.augment.mix.cutmix")
        return cls(config, num_labels)

    def __call__(self, batch: Batch, places: Sequence[int], partners: Sequence[int], generators: Generators) -> Batch:
        """Return the samples at ``places`` of a batch, mixed with those at ``partners``.

        Targets are float32 of shape (samples, labels), and add up to 1 in each row.
        """
        mixed = {name: tensor[list(places)] for name, tensor in batch.inputs.items()}
        targets = np.zeros((len(places), self.num_labels), np.float32)
        for row, (place, partner, generator) in enumerate(zip(places, partners, generators, strict=True)):
            others = {name: tensor[partner] for name, tensor in batch.inputs.items()}
            kept = self._mix({name: tensor[row] for name, tensor in mixed.items()}, others, generator)
            targets[row, batch.targets[place]] += kept
            targets[row, batch.targets[partner]] += 1.0 - kept
        return replace(batch, inputs=mixed, targets=targets)

    def _mix(self, own: Tensors, others: Tensors, generator: np.random.Generator) -> float:
        """Mix a sample's tensors with others in place. Return the share that it keeps."""
        if generator.random() >= self.config.share:
            return 1.0
        kinds = [
            (alpha, blend) for alpha, blend in ((self.config.mixup, _blend), (self.config.cutmix, _paste)) if alpha
        ]
        alpha, blend = kinds[int(generator.integers(len(kinds)))]
        return blend(own, others, float(generator.beta(alpha, alpha)), generator)


def _blend(own: Tensors, others: Tensors, kept: float, _generator: np.random.Generator) -> float:
    for name, tensor in own.items():
        tensor[...] = np.float32(kept) * tensor + np.float32(1.0 - kept) * others[name]
    return kept


def _paste(own: Tensors, others: Tensors, kept: float, generator: np.random.Generator) -> float:
    """Paste a rectangle of another image. Return the share of the area that is kept.

    A rectangle that would reach over the edge is cut off there, so more than ``kept`` may be left.
    """
    ((name, image),) = own.items()
    rows, columns = (_window(size, math.sqrt(1.0 - kept), generator.random()) for size in image.shape[-2:])
    image[:, rows, columns] = others[name][:, rows, columns]
    covered = (rows.stop - rows.start) * (columns.stop - columns.start)
    return 1.0 - float(covered) / float(image.shape[-2] * image.shape[-1])


def _window(size: int, share: float, place: float) -> slice:
    """Return the part of ``size`` pixels that has this share of them around a place, and lies within."""
    center, half = place * size, share * size / 2.0
    return slice(max(0, round(center - half)), min(size, round(center + half)))


def _is_float(spec: TensorSpec) -> bool:
    return bool(np.issubdtype(spec.dtype, np.floating))


def _described(inputs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{spec.name} {spec.dtype} of {len(spec.shape)} dimensions" for spec in inputs)
