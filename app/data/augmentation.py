"""Random changes of training samples, drawn from the seed, the epoch, the global batch and the sample's row alone.

So a sample changes in the same way on any number of workers, and in a run that was resumed.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageEnhance, ImageOps
from PIL.Image import Resampling, Transform

from app.config import AugmentConfig, AugmentImageConfig, AugmentTextConfig, RandAugmentConfig, TrainConfig
from app.data.labelled import LabelledDataset
from app.data.prepared import Batch, PreparedData
from app.data.processor import AugmentingProcessor, Change, Processor
from app.errors import RecipeError
from app.storage import to_path

if TYPE_CHECKING:
    from app.data.tensor_augmentation import Mask, Mix

Generator = np.random.Generator
_MASKS, _MIXES = 1, 2
"""Random draws besides the change of an input. Each has its own random numbers."""
_ASPECT = math.log(4 / 3)
"""A part that is cut out is at most so much wider or taller than the image, as a logarithm."""
_MAX_MAGNITUDE = 10.0
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
"""Letters of Thai, Lao, Burmese, Khmer, Japanese and Chinese, which have no spaces between words."""


@dataclass(frozen=True)
class Augmentation:
    """The changes of a run's training samples."""

    seed: int
    change: Callable[[Any, Generator], Any] | None = None
    """Changes an input before it is encoded."""
    mask: "Mask | None" = None
    """Masks encoded inputs."""
    mix: "Mix | None" = None
    """Mixes encoded inputs with those of their partners, and the targets alike."""

    def of(self, row: int, epoch: int, batch: int) -> Change:
        """Return the change of a sample in a global batch of an epoch, in which balanced sampling may repeat it."""
        change = self.change
        assert change is not None
        return lambda item: change(item, self._generator(epoch, batch, row))

    def batch(
        self, dataset: LabelledDataset, indices: Sequence[int], partners: Sequence[int], epoch: int, number: int
    ) -> Batch:
        """Return samples of a global batch as training sees them. Raises DataError for one that cannot be read.

        Args:
            dataset: the training split.
            indices: the rows of the samples.
            partners: the row that each of them is mixed with, if samples are mixed.
            epoch: number of the epoch.
            number: number of the global batch in the epoch.
        """
        # A partner among the samples is read once.
        rows = list(dict.fromkeys([*indices, *partners])) if self.mix else list(indices)
        inputs, values = dataset.split.take(rows)
        if self.change:
            assert isinstance(dataset.processor, AugmentingProcessor)
            tensors = dataset.processor.encode_changed(inputs, [self.of(row, epoch, number) for row in rows])
        else:
            tensors = dataset.processor.encode(inputs)
        batch = dataset.to_batch(tensors, values)
        if self.mask:
            masked = self.mask(batch.inputs, [self._generator(epoch, number, row, _MASKS) for row in rows])
            batch = replace(batch, inputs=masked)
        if not self.mix:
            return batch
        places = {row: place for place, row in enumerate(rows)}
        generators = [self._generator(epoch, number, row, _MIXES) for row in indices]
        return self.mix(batch, [places[row] for row in indices], [places[row] for row in partners], generators)

    def _generator(self, *numbers: int) -> Generator:
        # NumPy takes no negative seeds.
        return np.random.default_rng((self.seed % 2**64, *numbers))


def augmentation_of(train: TrainConfig, data: PreparedData) -> Augmentation | None:
    """Return the changes of training samples that ``train.augment`` describes; None if it describes none.

    Raises:
        RecipeError: the inputs cannot be masked or mixed, the processor changes none, or the synonyms cannot be read.
    """
    config = train.augment or AugmentConfig()
    if config == AugmentConfig():
        return None
    assert isinstance(data.train, LabelledDataset)  # recipes of other tasks are refused
    processor, targets = data.train.processor, data.train.targets
    mask = mix = None
    if config.audio or config.mix:
        from app.data.tensor_augmentation import Mask, Mix  # most runs change inputs alone

        mask = Mask.of(config.audio, processor.inputs) if config.audio else None
        mix = Mix.of(config.mix, processor.inputs, targets.num_outputs) if config.mix else None
    return Augmentation(train.seed, _change_of(config, processor), mask, mix)


def _change_of(config: AugmentConfig, processor: Processor) -> Callable[[Any, Generator], Any] | None:
    """Return the change of inputs before they are encoded, if there is one. Raises RecipeError as above."""
    if config.text is None and config.image is None:
        return None
    if not isinstance(processor, AugmentingProcessor):
        raise RecipeError(
            f"train.augment needs a processor that changes inputs: {type(processor).__name__} has no encode_changed"
        ).of("processor.no_encode_changed", "train.augment")
    if config.text:
        return TextAugmentation(config.text)
    assert config.image
    return partial(change_image, config.image)


class TextAugmentation:
    """Changes texts by a list of synonyms, by leaving words out, and by swapping neighbours."""

    def __init__(self, config: AugmentTextConfig) -> None:
        """Raises RecipeError if the synonyms cannot be read."""
        self._config = config
        groups = _read_synonyms(config.synonyms) if config.synonyms else []
        spelling: dict[str, str] = {}
        others = defaultdict[str, list[str]](list)
        for word, other in (pair for group in groups for pair in permutations(group, 2)):
            others[spelling.setdefault(word.lower(), word)].append(other)
        # The longest first: a word may begin with another one.
        words = sorted(others, key=len, reverse=True)
        self._others = [others[word] for word in words]
        # A group for each word, because a match says which word it is by no other means: some letters, such as İ and ſ,
        # match one that their lower case does not.
        self._pattern = re.compile("|".join(f"({_whole_word(word)})" for word in words) or "(?!)", re.IGNORECASE)

    def __call__(self, text: str, generator: Generator) -> str:
        """Return the changed text."""
        text = self._pattern.sub(partial(self._replaced, generator), text)
        space = " " if " " in text.strip() else ""
        words = text.split() if space else list(text)
        words = _swapped(words, self._config.swap, generator)
        return space.join(_thinned(words, self._config.drop, generator))

    def _replaced(self, generator: Generator, found: re.Match[str]) -> str:
        if generator.random() >= self._config.synonym_share:
            return found[0]
        assert found.lastindex is not None
        return str(generator.choice(self._others[found.lastindex - 1]))


def _read_synonyms(location: str) -> list[list[str]]:
    try:
        lines = to_path(location).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise RecipeError(f"train.augment.text.synonyms {location!r} cannot be read: {error}").of(
            "file.unreadable", "train.augment.text.synonyms"
        ) from error
    groups = [[word.strip() for word in line.split(",") if word.strip()] for line in lines if line.strip()]
    if short := next((number for number, group in enumerate(groups, 1) if len(set(group)) < 2), None):
        raise RecipeError(
            f"train.augment.text.synonyms {location!r} has one word only in its group {short}: give two or more, "
            "separated by commas"
        ).of("synonyms.one_word", "train.augment.text.synonyms")
    return groups


def _whole_word(word: str) -> str:
    """Return a pattern for a word. In scripts without spaces it has no boundaries."""
    return re.escape(word) if _UNSPACED.search(word) else rf"(?<!\w){re.escape(word)}(?!\w)"


def _swapped(words: list[str], share: float, generator: Generator) -> list[str]:
    if share:
        for place in np.flatnonzero(generator.random(max(0, len(words) - 1)) < share):
            words[place : place + 2] = words[place + 1], words[place]
    return words


def _thinned(words: list[str], share: float, generator: Generator) -> list[str]:
    if not share or not words:
        return words
    draws = generator.random(len(words))
    draws[draws.argmax()] = 1.0  # one stays, whatever is drawn
    return [word for word, draw in zip(words, draws, strict=True) if draw >= share]


def change_image(config: AugmentImageConfig, image: Image.Image, generator: Generator) -> Image.Image:
    """Return a changed image, grey or RGB as the given one."""
    if config.crop is not None:
        image = _cropped(image, config.crop, generator)
    if config.flip and generator.random() < config.flip:
        image = ImageOps.mirror(image)
    if config.color:
        for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
            image = enhance(image).enhance(1.0 + generator.uniform(-config.color, config.color))
    if config.rand_augment is not None:
        image = _rand_augmented(image, config.rand_augment, generator)
    return image


def _cropped(image: Image.Image, min_share: float, generator: Generator) -> Image.Image:
    """Return a part of at least this share of the area, of another aspect, from a place of its own."""
    share, aspect = generator.uniform(min_share, 1.0), math.exp(generator.uniform(-_ASPECT, _ASPECT))
    width = min(image.width, max(1, round(image.width * math.sqrt(share * aspect))))
    height = min(image.height, max(1, round(image.height * math.sqrt(share / aspect))))
    left, top = (int(generator.integers(room + 1)) for room in (image.width - width, image.height - height))
    return image.crop((left, top, left + width, top + height))


def _rand_augmented(image: Image.Image, config: RandAugmentConfig, generator: Generator) -> Image.Image:
    """Apply operations of RandAugment (Cubuk et al. 2019, arXiv:1909.13719), each in a direction of its own."""
    strength = config.magnitude / _MAX_MAGNITUDE
    for number in generator.integers(len(_OPERATIONS), size=config.operations):
        sign = 1.0 if generator.random() < 0.5 else -1.0
        image = _OPERATIONS[number](image, strength, sign)
    return image


def _moved(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    return image.transform(image.size, Transform.AFFINE, matrix, Resampling.BILINEAR)


def _enhanced(kind: Callable[[Image.Image], Any], image: Image.Image, strength: float, sign: float) -> Image.Image:
    changed: Image.Image = kind(image).enhance(1.0 + 0.9 * strength * sign)
    return changed


# The strongest changes are those of the paper's implementation: 30 degrees, 0.3 of shear, 0.45 of the width.
_OPERATIONS: tuple[Callable[[Image.Image, float, float], Image.Image], ...] = (
    lambda image, strength, sign: image,  # noqa: ARG005
    lambda image, strength, sign: ImageOps.autocontrast(image),  # noqa: ARG005
    lambda image, strength, sign: ImageOps.equalize(image),  # noqa: ARG005
    lambda image, strength, sign: image.rotate(30.0 * strength * sign, Resampling.BILINEAR),
    lambda image, strength, sign: ImageOps.posterize(image, 8 - round(4 * strength)),  # noqa: ARG005
    lambda image, strength, sign: ImageOps.solarize(image, 256 - round(256 * strength)),  # noqa: ARG005
    lambda image, strength, sign: _moved(image, (1, 0.3 * strength * sign, 0, 0, 1, 0)),
    lambda image, strength, sign: _moved(image, (1, 0, 0, 0.3 * strength * sign, 1, 0)),
    lambda image, strength, sign: _moved(image, (1, 0, 0.45 * strength * sign * image.width, 0, 1, 0)),
    lambda image, strength, sign: _moved(image, (1, 0, 0, 0, 1, 0.45 * strength * sign * image.height)),
    *(
        partial(_enhanced, kind)
        for kind in (ImageEnhance.Color, ImageEnhance.Contrast, ImageEnhance.Brightness, ImageEnhance.Sharpness)
    ),
)
