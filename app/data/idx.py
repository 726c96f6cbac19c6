"""IDX files: the format of MNIST (LeCun, Cortes and Burges, yann.lecun.com/exdb/mnist) and of the sets made like it.

A file is four bytes, 0, 0, the type of an element and the number of dimensions; the size of each dimension, an unsigned
32-bit number, the highest byte first; and the elements, the last dimension fastest.
"""

import gzip
import math
import struct
import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.data.examples import Examples
from app.data.images import encode_png
from app.errors import DataError

_UNSIGNED_BYTE = 0x08


class IdxFiles(NamedTuple):
    """The file names of pictures and labels."""

    images: str
    labels: str


TRAIN_FILES = IdxFiles("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
TEST_FILES = IdxFiles("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
"""For ``data.test_source``. Model selection never uses them."""


def holds_idx(folder: UPath, files: IdxFiles) -> bool:
    """Return whether the folder has one of the files."""
    return any(_find(folder, name) for name in files)


def find_idx_files(folder: UPath, files: IdxFiles) -> list[UPath]:
    """Return the two files; none if the folder has neither. Raises DataError if one of them is missing."""
    return [_require(folder, name, files) for name in files] if holds_idx(folder, files) else []


def read_idx_folder(folder: UPath, files: IdxFiles) -> Examples:
    """Return the grey pictures of the files, plain or in gzip, each with its number as the label.

    Raises:
        DataError: a file is missing, damaged or of another format, or the two differ in length.
    """
    images_path, labels_path = (_require(folder, name, files) for name in files)
    images, labels = read_idx(images_path, dimensions=3), read_idx(labels_path, dimensions=1)
    if len(images) != len(labels):
        raise DataError(
            f"{str(images_path)!r} has {len(images):,} pictures, {str(labels_path)!r} has {len(labels):,} labels: "
            "expected one label for each picture"
        ).of("idx.counts")
    if len(images) and not images[0].size:
        height, width = images[0].shape
        raise DataError(f"{str(images_path)!r} has pictures of {height} x {width} pixels: expected 1 x 1 or more").of(
            "image.empty"
        )
    return Examples("image", [encode_png(image) for image in images], [str(label) for label in labels])


def read_idx(path: UPath, dimensions: int) -> NDArray[np.uint8]:
    """Return the unsigned bytes of one file as an array of this number of ``dimensions``.

    Raises:
        DataError: the file cannot be read or unpacked, has another type or number of dimensions, or its length
            contradicts its header.
    """
    content = _read(path)
    magic, header_size = bytes([0, 0, _UNSIGNED_BYTE, dimensions]), 4 + 4 * dimensions
    if content[:4] != magic:
        raise DataError(
            f"{str(path)!r} begins with the bytes {content[:4].hex(' ') or '(none)'}: expected {magic.hex(' ')}, "
            f"the magic number of IDX with unsigned bytes in {dimensions} dimensions"
        ).of("idx.magic")
    if len(content) < header_size:
        raise DataError(
            f"{str(path)!r} has {len(content)} bytes: expected a header of {header_size}; it is cut short"
        ).of("file.torn")
    shape = struct.unpack(f">{dimensions}I", content[4:header_size])
    expected = header_size + math.prod(shape)
    if len(content) != expected:
        raise DataError(
            f"{str(path)!r} holds {len(content):,} bytes: expected {expected:,}, because its header says "
            f"{' x '.join(map(str, shape))}; fetch it again"
        ).of("file.torn")
    return np.frombuffer(content, np.uint8, offset=header_size).reshape(shape)


def _find(folder: UPath, name: str) -> UPath | None:
    """Return the file of this name, or the one in gzip, or None."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _require(folder: UPath, name: str, expected: IdxFiles) -> UPath:
    if (path := _find(folder, name)) is None:
        raise DataError(
            f"{str(folder)!r} has neither {name} nor {name}.gz: expected both {' and '.join(expected)}, "
            "plain or in gzip"
        ).of("file.missing")
    return path


def _read(path: UPath) -> bytes:
    """Return the content, unpacked."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        # gzip raises the last two for damaged files.
        raise DataError(f"{str(path)!r} cannot be read ({error}): expected a whole file; fetch it again").of(
            "file.unreadable"
        ) from error
