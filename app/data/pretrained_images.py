"""The image processor of a pretrained model, followed step by step or refused by its name."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import BaseModel

from app.config import ImageConfig
from app.errors import RecipeError, first_line
from app.pretrained import IMAGE_FILE, PretrainedFolder

_LEVIT_ENLARGEMENT = 256 / 224
_SQUASHED_FROM = 384
"""The edge from which ConvNeXt's processor resizes to the square and cuts nothing out."""

_TOLERANCE = 1e-3
"""A level of 255 is at least ten times as much after scaling. Sums in another order are far less."""

_ADVICE = "give a model with another image processor, or a task with a processor of your own"

_PROBES = ((1.5, 1.0), (1.0, 1.3), (0.4, 0.3))
"""Width and height of the pictures that both processors read, as a share of the model's size."""


class Preprocessing(BaseModel):
    """How a pretrained model's images are resized and scaled."""

    shortest_edge: int | None = None
    """The image is resized to this shortest edge, and its center is cut out. None: it is resized to the square."""
    resized: int | None = None
    """The square that the image is resized to before its center is cut out. None: it is as large as the model's."""
    resample: int = int(Image.Resampling.BICUBIC)
    """Pillow's number of the filter."""
    factor: float = 1.0 / 255.0
    mean: list[float]
    std: list[float]
    """By channel, after ``factor``."""
    is_bgr: bool = False
    """Whether the channels are in the order blue, green, red."""

    def resize(self, image: Image.Image, size: int) -> Image.Image:
        """Return a square picture of ``size``. What a small picture lacks is black."""
        if self.shortest_edge is None:
            edge = self.resized or size
            resized = image.resize((edge, edge), self.resample)
        else:
            short, long = sorted(image.size)
            other = int(self.shortest_edge * long / short)
            wide = image.width >= image.height
            sizes = (other, self.shortest_edge) if wide else (self.shortest_edge, other)
            resized = image.resize(sizes, self.resample)
        left, top = (resized.width - size) // 2, (resized.height - size) // 2
        return resized.crop((left, top, left + size, top + size))

    def scale(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the scaled values of a picture of shape (height, width, channels)."""
        ordered = values[..., ::-1] if self.is_bgr else values
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        scaled: NDArray[np.float32] = (ordered * np.float32(self.factor) - mean) / std
        return scaled


def read_preprocessing(folder: PretrainedFolder) -> tuple[ImageConfig, Preprocessing, Any]:
    """Return the shape and the preprocessing of a folder's image processor, and transformers' processor.

    Raises:
        RecipeError: transformers does not have the processor, or it makes no square images.
    """
    theirs = _theirs(folder)
    edge, resized, final = _sizes(theirs)
    if not getattr(theirs, "do_resize", False) or final is None or final[0] != final[1]:
        raise RecipeError(
            f"{folder}: {_name_of(theirs)} in {IMAGE_FILE} makes images of size {_given(theirs, 'size')}, crop_size "
            f"{_given(theirs, 'crop_size')}: expected do_resize, and a square of one height and width; " + _ADVICE
        ).of("image_processor.not_square", "model.pretrained")
    factor, mean, std = _scale(theirs, folder)
    return (
        ImageConfig(size=final[0], channels=1 if len(mean) == 1 else 3),
        Preprocessing(
            shortest_edge=edge,
            resized=resized,
            resample=int(Image.Resampling.BILINEAR if theirs.resample is None else theirs.resample),
            factor=factor,
            mean=mean,
            std=std,
            is_bgr=bool(getattr(theirs, "do_flip_channel_order", False)),
        ),
        theirs,
    )


def require_same_pixels(
    theirs: Any, ours: Callable[[Image.Image], NDArray[np.float32]], shape: ImageConfig, folder: PretrainedFolder
) -> None:
    """Raise RecipeError if ``ours`` makes other pixels of a picture than transformers' processor.

    A processor may have keys that are not known here. Pictures of several shapes show what they change.
    """
    generator = np.random.default_rng(0)
    for shares in _PROBES:
        width, height = (max(1, round(share * shape.size)) for share in shares)
        levels = generator.integers(0, 256, (height, width, shape.channels), dtype=np.uint8)
        picture = Image.fromarray(levels if shape.channels > 1 else levels[..., 0])
        try:
            expected = np.asarray(theirs(picture, return_tensors="np")["pixel_values"])[0]
            given = ours(picture)
            same = given.shape == expected.shape and np.allclose(given, expected, rtol=_TOLERANCE, atol=_TOLERANCE)
        except Exception as error:  # of many classes
            raise RecipeError(
                f"{folder}: {_name_of(theirs)} cannot read a picture ({first_line(error)}): correct {IMAGE_FILE}, or "
                + _ADVICE
            ).of("image_processor.fails", "model.pretrained") from error
        if not same:
            raise RecipeError(
                f"{folder}: {_name_of(theirs)} prepares a picture of {width} x {height} pixels in a way that Rayloom "
                f"does not follow: {_ADVICE}"
            ).of("image_processor.differs", "model.pretrained")


def _theirs(folder: PretrainedFolder) -> Any:
    """Return transformers' processor, which knows the keys that the file leaves out."""
    from transformers import AutoImageProcessor

    try:
        # Pillow's, because the pixels behind the endpoint are Pillow's.
        return AutoImageProcessor.from_pretrained(
            folder.path, backend="pil", local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of many classes
        name = (folder.read_json(IMAGE_FILE) or {}).get("image_processor_type", "its image processor")
        raise RecipeError(
            f"{folder}: {name} in {IMAGE_FILE} cannot be made by transformers with Pillow ({first_line(error)}): "
            + _ADVICE
        ).of("image_processor.not_created", "model.pretrained") from error


def _sizes(theirs: Any) -> tuple[int | None, int | None, tuple[int, int] | None]:
    """Return the shortest edge or the square that an image is resized to, and the size that is left of it."""
    size, kind = _given(theirs, "size"), _name_of(theirs)
    share: Any = getattr(theirs, "crop_pct", None)
    crop = _given(theirs, "crop_size") if getattr(theirs, "do_center_crop", False) else {}
    edge = size.get("shortest_edge")
    if kind.startswith("ConvNext") and edge is not None:
        # ResNets have this processor, too.
        if edge >= _SQUASHED_FROM:
            return None, None, (edge, edge)
        assert share is not None
        return int(edge / share), None, (edge, edge)
    if kind.startswith("Levit") and edge is not None:
        edge = int(_LEVIT_ENLARGEMENT * edge)
    elif share is not None and (given := edge or size.get("height")):
        edge = int(given / share)
    final = crop or size
    if "height" not in final or (edge is None and size.get("height") != size.get("width")):
        return None, None, None
    resized = None if edge is not None else size.get("height")
    return edge, resized, (final["height"], final["width"])


def _scale(theirs: Any, folder: PretrainedFolder) -> tuple[float, list[float], list[float]]:
    """Return the factor of levels, and the mean and the deviation by channel.

    Raises:
        RecipeError: a deviation is not positive, or there is another number of them.
    """
    mean, std = _by_channel(theirs, "image_mean", 0.0), _by_channel(theirs, "image_std", 1.0)
    if len(std) != len(mean) or not all(0.0 < value < math.inf for value in std):
        raise RecipeError(
            f"{folder}: {IMAGE_FILE} has image_std {std}: expected a positive number for each of image_mean {mean}"
        ).of("pretrained.image_std", "model.pretrained")
    factor = theirs.rescale_factor if theirs.do_rescale else 1.0
    again = std if getattr(theirs, "include_top", False) else [1.0] * len(std)
    if not theirs.do_normalize:
        mean, std = [0.0] * len(mean), [1.0] * len(std)
    offset = 1.0 if theirs.do_rescale and getattr(theirs, "rescale_offset", False) else 0.0
    # EfficientNet subtracts 1 before and divides by the deviation twice.
    return factor, [value + offset for value in mean], [one * other for one, other in zip(std, again, strict=True)]


def _by_channel(theirs: Any, name: str, absent: float) -> list[float]:
    """Return a number for each channel. One number is for all three, and a list of one is of grey pictures."""
    given = getattr(theirs, name, None)
    if given is None or isinstance(given, int | float):
        return [absent if given is None else float(given)] * 3
    return [float(value) for value in given]


def _given(theirs: Any, name: str) -> Mapping[str, int]:
    """Return the keys of a size that are set. Some processors have a number of their own meaning."""
    size = getattr(theirs, name, None)
    return {} if size is None or isinstance(size, int) else {key: value for key, value in dict(size).items() if value}


def _name_of(theirs: Any) -> str:
    return type(theirs).__name__.removesuffix("Pil")
