"""Image processors of transformers: each makes the same pixels here as there, or is refused by its name."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from upath import UPath

from app.config import DataConfig
from app.data.images import ImageProcessor
from app.errors import RecipeError
from app.pretrained import IMAGE_FILE, PretrainedFolder

INSTALLED = [name for kinds in IMAGE_PROCESSOR_MAPPING_NAMES.values() for name in kinds.values()]
FAMILIES = sorted({name.removesuffix("Pil") for name in INSTALLED})
FOLLOWED = (
    "BeitImageProcessor", "BitImageProcessor", "CLIPImageProcessor", "ConvNextImageProcessor", "DPTImageProcessor",
    "DeiTImageProcessor", "EfficientNetImageProcessor", "LevitImageProcessor", "MobileNetV1ImageProcessor",
    "MobileNetV2ImageProcessor", "MobileViTImageProcessor", "PoolFormerImageProcessor", "PvtImageProcessor",
    "SegformerImageProcessor", "SiglipImageProcessor", "ViTImageProcessor",
)  # fmt: skip
"""Families that have to be followed with the settings that they have by default."""
QUICK = {*FOLLOWED, *FAMILIES[::5]}

SETTINGS: list[dict[str, Any]] = [
    {},
    {"size": 24},  # as older files have it
    {"size": {"height": 24, "width": 24}, "do_center_crop": False, "do_rescale": False},
    {"size": {"shortest_edge": 30}, "do_center_crop": True, "crop_size": 24},
    {"size": {"height": 30, "width": 30}, "do_center_crop": True, "crop_size": {"height": 24, "width": 24}},
    {"size": {"shortest_edge": 20}, "do_center_crop": True, "crop_size": 24, "resample": 2},  # padded
    {"do_normalize": False, "rescale_factor": 1 / 127.5},
    {"image_mean": 0.4, "image_std": [0.2, 0.3, 0.4], "do_flip_channel_order": True, "rescale_offset": True},
    {"size": {"height": 24, "width": 32}},
    {"size": {"longest_edge": 32}},
    {"do_pad": True, "pad_size": {"height": 500, "width": 500}},
    {"crop_pct": 0.8, "size": {"shortest_edge": 32}},
]


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    generator = np.random.default_rng(1)
    files = []
    for width, height in ((41, 29), (26, 50), (13, 11), (400, 300)):
        buffer = io.BytesIO()
        Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(buffer, "PNG")
        files.append(buffer.getvalue())
    return files


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_a_processor_makes_the_pixels_of_transformers_or_is_refused(
    family: str, pictures: list[bytes], tmp_path: Path
) -> None:
    followed, refused = 0, []
    for index, settings in enumerate(SETTINGS):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / IMAGE_FILE).write_text(json.dumps({"image_processor_type": family, **settings}), encoding="utf-8")
        (folder / "config.json").write_text('{"model_type": "vit"}', encoding="utf-8")
        try:
            ours = ImageProcessor.from_pretrained(PretrainedFolder(str(folder), folder), DataConfig(source="-"))
        except RecipeError as error:
            refused.append(str(error))
            continue
        followed += 1
        ours.save(UPath(folder / "saved"))
        theirs = AutoImageProcessor.from_pretrained(folder, backend="pil")
        loaded = ImageProcessor.load(UPath(folder / "saved"))
        for content in pictures:
            expected = theirs(Image.open(io.BytesIO(content)), return_tensors="np")["pixel_values"]
            for one in (ours, loaded):
                np.testing.assert_allclose(one.encode([content])["pixel_values"], expected, atol=1e-4, rtol=1e-4)
    assert followed >= (family in FOLLOWED)
    advice = "give a model with another image processor, or a task with a processor of your own"
    assert [told for told in refused if family not in told or ("image_std" not in told and advice not in told)] == []
