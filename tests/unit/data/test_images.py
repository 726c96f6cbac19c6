"""Pictures as people have them: of many bits, transparent, turned, of several frames, and of formats with traps."""

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError
from upath import UPath

from app.config import DataConfig, ImageConfig, Recipe
from app.data.images import ImageProcessor, read_picture
from app.pretrained import IMAGE_FILE, PretrainedFolder
from tests.wording import refused

Levels = NDArray[np.uint8]
LEVELS = np.arange(0, 256, 17, dtype=np.uint8).reshape(4, 4)


def encoded(picture: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return buffer.getvalue()


def levels_of(content: bytes, background: Literal["white", "black", "grey"] = "white") -> Levels:
    """Return the grey levels that a model of 4 x 4 pixels gets."""
    processor = ImageProcessor(ImageConfig(size=4, channels=1, background=background))
    (values,) = processor.encode([content])["pixel_values"]
    return np.rint((values[0] + 1.0) * 127.5).astype(np.uint8)


def png(bits: int, colours: int, pixels: bytes, transparent: bytes) -> bytes:
    """Return a PNG of one row of 4 pixels, one of which is transparent."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 4, 1, bits, colours, 0, 0, 0)
    chunks = (b"IHDR", header), (b"tRNS", transparent), (b"IDAT", zlib.compress(b"\0" + pixels)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks)


def tiff(pixels: bytes, bits: int, *, zero_is: int = 1, edge: int = 4, kind: int = 1, tile: int | None = None) -> bytes:
    """Return a grey TIFF, compressed by zlib. ``zero_is``: 0 for white, 1 for black. ``kind``: 1 unsigned, 3 float."""
    data = zlib.compress(pixels)
    place, size = (273, 279) if tile is None else (324, 325)
    tags = {256: edge, 257: edge, 258: bits, 259: 8, 262: zero_is, 277: 1, size: len(data), 339: kind, place: 0}
    tags |= {278: edge} if tile is None else {322: tile, 323: tile}
    tags[place] = 8 + 2 + 12 * len(tags) + 4
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items()))
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + struct.pack("<I", 0) + data


MANY_BITS = {
    "PNG of 16 bits": encoded(Image.fromarray(LEVELS.astype(np.uint16) * 257)),
    "TIFF of 16 bits": encoded(Image.fromarray(LEVELS.astype(np.uint16) * 257), "TIFF"),
    "TIFF of 16 bits, big endian": encoded(Image.fromarray(LEVELS.astype(">u2") * 257), "TIFF"),
    "TIFF of 16 bits, 0 is white": tiff((65_535 - LEVELS.astype("<u2") * 257).tobytes(), 16, zero_is=0),
    "TIFF of 32 bits": encoded(Image.fromarray(LEVELS.astype(np.int32) * 257), "TIFF"),
    "TIFF of floats": encoded(Image.fromarray(LEVELS.astype(np.float32) / 255), "TIFF"),
    "PGM of 16 bits": b"P5 4 4 65535\n" + (LEVELS.astype(">u2") * 257).tobytes(),
    "PFM": b"Pf 4 4 -1.0\n" + (LEVELS[::-1].astype("<f4") / 255).tobytes(),
}


@pytest.mark.parametrize("name", MANY_BITS)
def test_pictures_of_many_bits_are_scaled(name: str) -> None:
    assert levels_of(MANY_BITS[name]).tolist() == LEVELS.tolist()


def test_a_tiff_of_12_bits_is_scaled() -> None:
    # Two pixels of 12 bits are three bytes.
    black, white = b"\0\0\0" * 2, b"\xff\xff\xff" * 2
    assert levels_of(tiff(black + white + black + white, 12)).tolist() == [[0] * 4, [255] * 4] * 2


@pytest.mark.parametrize(
    "picture",
    [
        np.full((4, 4), 255, np.float32),
        np.array([[0, np.nan]], np.float32),
        np.full((4, 4), 70_000, np.int32),
        np.full((4, 4), -1, np.int32),
        LEVELS.astype(np.int32),
    ],
)
def test_values_without_a_meaning_are_refused(picture: NDArray[Any]) -> None:
    with refused("image.range"):
        levels_of(encoded(Image.fromarray(picture), "TIFF"))


def test_a_mode_that_has_no_grey_is_refused_by_its_name() -> None:
    with refused("image.mode"):
        levels_of(encoded(Image.new("LAB", (4, 4)), "TIFF"))


def transparent_pictures() -> dict[str, bytes]:
    """Pictures whose left half is transparent black, and whose right half is opaque black."""
    alpha = np.repeat([[0, 0, 255, 255]], 4, 0).astype(np.uint8)
    rgba = Image.fromarray(np.dstack([np.zeros((4, 4, 3), np.uint8), alpha]))
    palette = Image.fromarray((alpha // 255).astype(np.uint8), "L").convert("P")
    palette.putpalette([0] * 6)
    pictures = {"RGBA": encoded(rgba), "LA": encoded(rgba.convert("LA")), "WebP": encoded(rgba, "WEBP", lossless=True)}
    pictures |= {f"palette, {form}": encoded(palette, form, transparency=0) for form in ("PNG", "GIF")}
    return pictures


TRANSPARENT = transparent_pictures()


@pytest.mark.parametrize("name", TRANSPARENT)
def test_what_is_transparent_shows_the_background(name: str) -> None:
    assert levels_of(TRANSPARENT[name]).tolist() == [[255, 255, 0, 0]] * 4
    assert levels_of(TRANSPARENT[name], "grey").tolist() == [[128, 128, 0, 0]] * 4
    assert levels_of(TRANSPARENT[name], "black").tolist() == [[0] * 4] * 4


@pytest.mark.parametrize(("bits", "pixels"), [(1, b"\x50"), (2, b"\x33"), (4, b"\x0f\x0f"), (8, b"\0\xff\0\xff")])
def test_a_transparent_level_of_few_bits_shows_the_background(bits: int, pixels: bytes) -> None:
    transparent = struct.pack(">H", 2**bits - 1)
    assert levels_of(png(bits, 0, pixels, transparent), "grey")[0].tolist() == [0, 128, 0, 128]


def test_a_transparent_colour_of_16_bits_is_refused() -> None:
    with refused("image.mode"):
        levels_of(png(16, 2, b"\x12\x34" * 12, b"\x12\x34" * 3))


def test_the_background_is_kept_with_the_model(tmp_path: Path) -> None:
    ImageProcessor(ImageConfig(size=4, background="grey")).save(UPath(tmp_path))
    (values,) = ImageProcessor.load(UPath(tmp_path)).encode([TRANSPARENT["RGBA"]])["pixel_values"]
    assert values[0, 0, 0] == np.float32(128) / 127.5 - 1.0
    (tmp_path / "image.json").write_text('{"size": 4, "channels": 3}')
    (values,) = ImageProcessor.load(UPath(tmp_path)).encode([TRANSPARENT["RGBA"]])["pixel_values"]
    assert values[0, 0, 0] == 1.0


def test_a_pretrained_model_leaves_the_background_to_the_recipe() -> None:
    def recipe(**image: Any) -> Recipe:
        model = {"factory": "a:b", "pretrained": "/models/vit"}
        given = {"name": "r", "task": "image-classification", "data": {"source": "-", "image": image}, "model": model}
        return Recipe.model_validate(given)

    assert recipe(background="black").data.image.background == "black"
    with pytest.raises(ValidationError, match=r"data\.image is what model\.pretrained brings"):
        recipe(background="black", size=8)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_turned_picture_is_made_upright(form: str) -> None:
    upright = Image.fromarray(np.repeat(np.repeat(LEVELS[:3, :2] // 2, 16, 0), 16, 1)).convert("RGB")
    turns = (None, 0, 3, 1, 5, 2, 6, 4)
    for orientation, turn in enumerate(turns, 1):
        exif = Image.Exif()
        exif[0x112] = orientation
        stored = upright if turn is None else upright.transpose(Image.Transpose(turn))
        options = {"quality": 100} if form == "JPEG" else {"lossless": True} if form == "WEBP" else {}
        picture = read_picture(encoded(stored, form, exif=exif, **options))
        assert picture.size == upright.size, orientation
        np.testing.assert_allclose(np.asarray(picture, int), np.asarray(upright, int), atol=4)


def test_damaged_exif_does_not_make_a_picture_unreadable() -> None:
    exif = Image.Exif()
    exif[0x112], exif[0x10F] = 6, "Maker"
    content = encoded(Image.new("RGB", (8, 4)), "JPEG", exif=exif)
    # The text is said to be a number.
    damaged = content.replace(b"\x0f\x01\x02\0", b"\x0f\x01\x0c\0").replace(b"\x01\x0f\0\x02", b"\x01\x0f\0\x0c")
    assert damaged != content
    assert read_picture(damaged).size == (4, 8)


def test_the_first_frame_is_read_and_that_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    frames = [Image.fromarray(LEVELS), Image.fromarray(LEVELS[::-1].copy()), Image.new("L", (4, 4))]
    for form in ("GIF", "TIFF", "PNG"):
        content = encoded(frames[0], form, save_all=True, append_images=frames[1:])
        assert levels_of(content).tolist() == LEVELS.tolist(), form
    assert "warning: an image has several frames: only the first frame of such images is read" in capfd.readouterr().err


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP", "PPM"])
def test_formats_are_told_by_their_content_and_truncated_files_are_refused(form: str) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    content = encoded(picture, form)
    assert read_picture(content).size == (64, 64)
    for end in (len(content) // 2, len(content) - 32):
        with refused("image.unreadable"):
            read_picture(content[:end])


def test_a_tiff_whose_pixels_end_early_is_refused() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8).tobytes()
    content = tiff(noise, 8, edge=64)
    assert read_picture(content).size == (64, 64)
    for end in (len(content) // 2, len(content) - 8):
        with refused("image.unreadable"):
            read_picture(content[:end])


def test_tiles_count_as_pixels() -> None:
    processor = ImageProcessor(ImageConfig(size=8))
    small, large = (tiff(bytes(4096**2), 8, edge=8, tile=tile) for tile in (1024, 4096))
    assert processor.weigh(small) == 1024**2 / 2**26
    with refused("image.too_large"):
        processor.weigh(large)
    with refused("image.too_large"):
        processor.encode([tiff(b"", 8, edge=8, tile=65_536)])


@pytest.mark.parametrize("content", [b"P2 4 4 255\n" + b"0 " * 16, b"P5 4 4 100\n" + bytes(16)])
def test_a_ppm_that_would_be_read_slowly_is_refused(content: bytes) -> None:
    with refused("image.format"):
        ImageProcessor(ImageConfig(size=8)).weigh(content)


@pytest.mark.parametrize("std", [[0.5, 0.0, 0.5], [0.5, float("nan"), 0.5], [0.5, 0.5], [-1.0, 1.0, 1.0]])
def test_a_pretrained_deviation_that_cannot_divide_is_refused(std: list[float], tmp_path: Path) -> None:
    given = {"image_processor_type": "ViTImageProcessor", "size": {"height": 4, "width": 4}}
    given |= {"image_mean": [0.5] * 3, "image_std": std}
    (tmp_path / IMAGE_FILE).write_text(json.dumps(given))
    with refused("pretrained.image_std", "model.pretrained"):
        ImageProcessor.from_pretrained(PretrainedFolder(str(tmp_path), tmp_path), DataConfig(source="-"))
