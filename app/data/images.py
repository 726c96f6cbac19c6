"""Images as normalised arrays, decoded and resized by Pillow."""

import io
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from upath import UPath

from app.config import DataConfig, ImageConfig
from app.data.examples import Input, Modality
from app.errors import DataError
from app.storage import write_atomically
from app.tensors import Tensors, TensorSpec

SETTINGS_FILE = "image.json"
FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
_MAX_PIXELS = 2**26
"""Decoding takes eight bytes of memory per pixel, however small the file is."""


def encode_png(levels: NDArray[np.uint8]) -> bytes:
    """Return a grey picture of shape (height, width), from 0 (black) to 255 (white), as a PNG file, without loss."""
    buffer = io.BytesIO()
    Image.fromarray(levels).save(buffer, "PNG")
    return buffer.getvalue()


class ImageProcessor:
    """``pixel_values``, float32 of shape (batch, channels, size, size), from -1 (black) to 1 (white)."""

    modality: ClassVar[Modality] = "image"

    def __init__(self, config: ImageConfig) -> None:
        self._config = config

    @classmethod
    def fit(cls, inputs: Sequence[Input], config: DataConfig) -> Self:  # noqa: ARG003
        """Return a processor for the recipe's shape. Nothing is learned from the inputs."""
        return cls(config.image)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        shape = (-1, self._config.channels, self._config.size, self._config.size)
        return (TensorSpec("pixel_values", np.dtype(np.float32), shape),)

    @property
    def facts(self) -> Mapping[str, int]:
        return {"channels": self._config.channels, "image_size": self._config.size}

    def encode(self, inputs: Sequence[Input]) -> Tensors:
        return {"pixel_values": np.stack([self._decode(item) for item in inputs])}

    def _decode(self, item: Input) -> NDArray[np.float32]:
        """Return one image, float32 of shape (channels, size, size)."""
        size = (self._config.size, self._config.size)
        try:
            assert isinstance(item, bytes)
            with Image.open(io.BytesIO(item), formats=FORMATS) as image:
                # Opening reads the header only, so nothing is decoded yet.
                if image.width * image.height > _MAX_PIXELS:
                    raise Image.DecompressionBombError(f"{image.width} x {image.height} pixels")
                pixels = image.convert("L" if self._config.channels == 1 else "RGB").resize(size)
        except Image.DecompressionBombError as error:  # Pillow's own limit is higher
            raise DataError(f"an image is too large ({error}): scale it down to {_MAX_PIXELS} pixels") from error
        except Exception as error:
            # Pillow's decoders raise many kinds of errors for damaged files.
            raise DataError(f"an image of {len(item)} bytes cannot be read: expected a PNG or JPEG file") from error
        values = np.asarray(pixels, np.float32).reshape(*size, self._config.channels) / 127.5 - 1.0
        return values.transpose(2, 0, 1)

    def save(self, folder: UPath) -> None:
        write_atomically(folder / SETTINGS_FILE, self._config.model_dump_json().encode())

    @classmethod
    def load(cls, folder: UPath) -> Self:
        return cls(ImageConfig.model_validate_json((folder / SETTINGS_FILE).read_bytes()))
