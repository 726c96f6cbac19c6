"""Images as normalised arrays, decoded and resized by Pillow."""

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps
from upath import UPath

from app.best_effort import warn
from app.config import DataConfig, ImageConfig
from app.data.examples import Input, Modality
from app.data.pretrained_images import Preprocessing, read_preprocessing, require_same_pixels
from app.errors import DataError, RecipeError
from app.pretrained import IMAGE_FILE, PretrainedFolder
from app.storage import write_atomically
from app.tensors import Tensors, TensorSpec

SETTINGS_FILE = "image.json"
ImageChange = Callable[[Image.Image], Image.Image]
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF", "PPM")
_MAX_PIXELS = 2**26
"""Maximum pixels of one picture, and of all pictures of a request. Decoding takes up to 16 bytes of memory a pixel."""
_MAX_ENLARGEMENT, _MIN_PIXELS = 1024, 2**20
"""Limit on a request's picture as a multiple of the model's pixels, and its lower bound. A camera's picture of 48
million pixels is 958 times one of 224 x 224.
"""
_DEFAULTS = ImageConfig()
_MODES = {1: "L", 3: "RGB"}
"""Pillow's mode by the number of channels."""
_BITS, _PHOTOMETRIC, _TILE_WIDTH, _TILE_HEIGHT = 258, 262, 322, 323
"""Tags of a TIFF file."""
_PNG_BITS = 24
"""Place of the bits per sample in a PNG file."""
_WHITE = {"I;16": 65_535, "I;16B": 65_535, "I": 65_535, "F": 1}
"""The value that is white, in the modes of Pillow with more than 8 bits. 0 is black."""
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes a picture upright, by its EXIF orientation."""
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]
"""Returns an uninitialized array of a shape."""

_allocate: Allocate = np.empty


def encode_png(levels: NDArray[np.uint8]) -> bytes:
    """Return a grey picture of shape (height, width), from 0 (black) to 255 (white), as a PNG file, without loss."""
    buffer = io.BytesIO()
    Image.fromarray(levels).save(buffer, "PNG")
    return buffer.getvalue()


def require_picture(content: bytes) -> None:
    """Decode a picture. Raises DataError if it cannot be decoded, is too large, or has values without a meaning."""
    read_picture(content)


def read_picture(content: Input, config: ImageConfig = _DEFAULTS) -> Image.Image:
    """Return a grey or RGB picture of 8 bits: the first frame, upright, with a background where it is transparent.

    Raises:
        DataError: it cannot be decoded, is too large, or has values without a meaning.
    """
    with _opened(content) as image:
        if getattr(image, "is_animated", False):
            _warn_of_frames()
        image.load()
        _scale_transparent_level(image, content)
        levels, mode = _without_transparency(_in_8_bits(image), config.background), _MODES[config.channels]
        try:
            levels = levels if levels.mode == mode else levels.convert(mode)
        except ValueError as error:
            raise DataError(f"an image has the mode {image.mode}: convert it to RGB").of("image.mode") from error
        # Pillow's function writes the other EXIF tags again, and fails if one of them is damaged.
        turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
        return levels if turn is None else levels.transpose(turn)


@cache
def _warn_of_frames() -> None:
    """Warn once in a process."""
    warn("an image has several frames: only the first frame of such images is read")


def _in_8_bits(image: Image.Image) -> Image.Image:
    """Return a picture of more bits in 8 bits. Raises DataError for values that are not between black and white."""
    if (white := _WHITE.get(image.mode)) is None:
        return image
    tags: Mapping[int, Any] = getattr(image, "tag_v2", {})
    if tags.get(_BITS) == (12,):
        white = 4095
    values = np.asarray(image)
    low, high = values.min(), values.max()
    if not 0 <= low <= high <= white:
        raise DataError(
            f"an image of mode {image.mode} has values from {low:g} to {high:g}: expected 0 (black) to {white:g} "
            "(white), so scale it"
        ).of("image.range")
    if image.mode == "I" and 0 < high < 256:
        raise DataError(
            f"an image of mode I has values up to {high}, and white may be 255 or {white:,}: save it with 8 or 16 bits"
        ).of("image.range")
    levels = image.point(lambda value: value * (255 / white) + 0.5).convert("L")
    # 0 is white in such a file. Pillow knows this for 8 bits alone.
    return ImageOps.invert(levels) if tags.get(_PHOTOMETRIC) == 0 else levels


def _scale_transparent_level(image: Image.Image, content: Input) -> None:
    """Scale the transparent level of a grey PNG, which Pillow leaves in the bits of the file.

    Raises:
        DataError: the file has 16 bits, of which Pillow keeps 8 only.
    """
    level = image.info.get("transparency")
    if image.format != "PNG" or level is None:
        return
    bits = int(content[_PNG_BITS])
    if bits == 16:
        raise DataError(
            "an image has 16 bits and a transparent colour: save it with 8 bits, or with an alpha channel"
        ).of("image.mode")
    if image.mode == "L":
        image.info["transparency"] = level * (255 // (2**bits - 1))


def _without_transparency(image: Image.Image, background: str) -> Image.Image:
    if not image.has_transparency_data:
        return image
    layer = image if image.mode == "RGBA" else image.convert("RGBA")
    canvas = Image.new("RGB", image.size, background)
    canvas.paste(layer, mask=layer)
    return canvas


def allocate_with(allocate: Allocate) -> None:
    """Make batches of pictures allocate their memory with a function, in this process."""
    global _allocate
    _allocate = allocate


def _stack(pictures: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.stack(pictures, out=_allocate((len(pictures), *pictures[0].shape), pictures[0].dtype))


@contextmanager
def _opened(content: Input) -> Iterator[Image.Image]:
    """Open a picture. Errors inside the context, such as in decoding, become a DataError."""
    try:
        assert isinstance(content, bytes)
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            # Opening reads the header only, so nothing is decoded yet.
            for width, height in (image.size, _tile_size(image)):
                if width * height > _MAX_PIXELS:
                    raise Image.DecompressionBombError(f"{width} x {height} pixels")
            # Pillow decodes these in Python, a hundred times more slowly.
            if any(tile.codec_name.startswith("ppm") for tile in image.tile):
                raise DataError("an image is a PPM file in text, or not of 8 or 16 bits: save it as PNG").of(
                    "image.format"
                )
            yield image
    except DataError:
        raise
    except Image.DecompressionBombError as error:  # Pillow's own limit is higher
        raise DataError(f"an image is too large ({error}): scale it down to {_MAX_PIXELS} pixels").of(
            "image.too_large"
        ) from error
    except Exception as error:
        # Pillow's decoders raise many kinds of errors for damaged files.
        raise DataError(f"an image of {len(content)} bytes cannot be read: expected a PNG or JPEG file").of(
            "image.unreadable"
        ) from error


def _tile_size(image: Image.Image) -> tuple[int, int]:
    """Return the size of a TIFF's tiles, which are decoded whole and may be larger than the picture."""
    tags: Mapping[int, Any] = getattr(image, "tag_v2", {})
    return tags.get(_TILE_WIDTH, 0), tags.get(_TILE_HEIGHT, 0)


class _ImageSettings(ImageConfig):
    preprocessing: Preprocessing | None = None


class ImageProcessor:
    """``pixel_values``, float32 of shape (batch, channels, size, size), from -1 (black) to 1 (white).

    A pretrained model has a scale of its own. Its ``preprocessor_config.json`` is kept for transformers to read.
    """

    modality: ClassVar[Modality] = "image"

    def __init__(
        self, config: ImageConfig, preprocessing: Preprocessing | None = None, given: bytes | None = None
    ) -> None:
        """``given`` is the content of the pretrained model's ``preprocessor_config.json``."""
        self._config, self._preprocessing, self._given = config, preprocessing, given

    @classmethod
    def fit(cls, inputs: Sequence[Input], config: DataConfig) -> Self:  # noqa: ARG003
        """Return a processor for the recipe's shape. Nothing is learned from the inputs."""
        return cls(config.image)

    @classmethod
    def from_pretrained(cls, folder: PretrainedFolder, config: DataConfig) -> Self:
        """Return the folder's image processor. Raises RecipeError if it has none, or none that Rayloom can follow."""
        if folder.read_json(IMAGE_FILE) is None:
            raise RecipeError(
                f"{folder} has no image processor: expected {IMAGE_FILE}; write it with save_pretrained of the model's "
                "image processor"
            ).of("image_processor.missing", "model.pretrained")
        shape, preprocessing, theirs = read_preprocessing(folder)
        shape = shape.model_copy(update={"background": config.image.background})
        processor = cls(shape, preprocessing, folder.companions[IMAGE_FILE])
        require_same_pixels(theirs, processor._pixels, shape, folder)
        return processor

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        shape = (-1, self._config.channels, self._config.size, self._config.size)
        return (TensorSpec("pixel_values", np.dtype(np.float32), shape),)

    @property
    def facts(self) -> Mapping[str, int]:
        return {"channels": self._config.channels, "image_size": self._config.size}

    def weigh(self, item: Input) -> float:
        """Return a picture's pixels as a share of one request's limit. Only the picture's header is read.

        Raises:
            DataError: the picture is far larger than the model's input, or cannot be read.
        """
        limit = min(max(_MIN_PIXELS, _MAX_ENLARGEMENT * self._config.size**2), _MAX_PIXELS)
        with _opened(item) as image:
            width, height = max(image.size, _tile_size(image), key=math.prod)
        if width * height > limit:
            raise DataError(
                f"an image has {width} x {height} pixels: expected {limit} at most for a model of "
                f"{self._config.size} x {self._config.size}, scale it down"
            ).of("image.too_large")
        return width * height / _MAX_PIXELS

    def encode(self, inputs: Sequence[Input]) -> Tensors:
        return {"pixel_values": _stack([self._decode(item) for item in inputs])}

    def encode_changed(self, inputs: Sequence[Input], changes: Sequence[ImageChange]) -> Tensors:
        """Return the batch with the changes of ``app.data.augmentation``, which are made before resizing."""
        changed = [self._decode(item, change) for item, change in zip(inputs, changes, strict=True)]
        return {"pixel_values": _stack(changed)}

    def _decode(self, item: Input, change: ImageChange | None = None) -> NDArray[np.float32]:
        """Return one image, float32 of shape (channels, size, size)."""
        picture = read_picture(item, self._config)
        return self._pixels(change(picture) if change else picture)

    def _pixels(self, picture: Image.Image) -> NDArray[np.float32]:
        """Return the tensor of a picture, float32 of shape (channels, size, size)."""
        size, how = self._config.size, self._preprocessing
        resized = how.resize(picture, size) if how else picture.resize((size, size))
        values = np.asarray(resized, np.float32).reshape(size, size, self._config.channels)
        return (how.scale(values) if how else values / 127.5 - 1.0).transpose(2, 0, 1)

    def save(self, folder: UPath) -> None:
        settings = _ImageSettings(**self._config.model_dump(), preprocessing=self._preprocessing)
        write_atomically(folder / SETTINGS_FILE, settings.model_dump_json(exclude_none=True).encode())
        if self._given is not None:
            write_atomically(folder / IMAGE_FILE, self._given)

    @classmethod
    def load(cls, folder: UPath) -> Self:
        settings = _ImageSettings.model_validate_json((folder / SETTINGS_FILE).read_bytes())
        given = (folder / IMAGE_FILE).read_bytes() if settings.preprocessing else None
        shape = ImageConfig.model_validate(settings.model_dump(include=set(ImageConfig.model_fields)))
        return cls(shape, settings.preprocessing, given)
