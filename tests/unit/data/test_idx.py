"""IDX files: read as they were written, and refused when they are anything else."""

import gzip
import io
import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from app.config import DataConfig
from app.data import builtin
from app.data.images import ImageProcessor
from tests.examples import read_examples
from tests.preparing import data_of, rows_in
from tests.wording import refused

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
PICTURES = np.random.default_rng(0).integers(0, 256, (20, 5, 4), np.uint8)
NUMBERS = np.arange(20, dtype=np.uint8) % 10


def idx(array: NDArray[np.uint8]) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


SET = {IMAGES: idx(PICTURES), LABELS: idx(NUMBERS)}
PACKED = {f"{name}.gz": gzip.compress(content) for name, content in SET.items()}


def write(folder: Path, files: dict[str, bytes]) -> DataConfig:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return DataConfig(source=str(folder))


@pytest.mark.parametrize("files", [SET, PACKED, {**SET, **dict.fromkeys(PACKED, b"")}], ids=["plain", "gzip", "both"])
def test_pictures_and_labels_are_read_without_loss(tmp_path: Path, files: dict[str, bytes]) -> None:
    examples = read_examples(
        write(tmp_path, {**files, "t10k-images-idx3-ubyte": b"the test set is left alone"}), "image"
    )
    assert [label for _, label in examples] == [str(number) for number in NUMBERS]
    decoded = [np.asarray(Image.open(io.BytesIO(content))) for content, _ in examples]
    assert np.array_equal(decoded, PICTURES)


@pytest.mark.parametrize(
    ("files", "rule"),
    [
        ({IMAGES: SET[IMAGES]}, "file.missing"),
        ({LABELS: SET[LABELS]}, "file.missing"),
        ({**SET, IMAGES: b""}, "idx.magic"),
        ({**SET, IMAGES: SET[LABELS]}, "idx.magic"),
        ({**SET, LABELS: b"\0\0\x0d\1" + SET[LABELS][4:]}, "idx.magic"),
        ({**SET, IMAGES: PACKED[f"{IMAGES}.gz"]}, "idx.magic"),
        ({**SET, IMAGES: SET[IMAGES][:15]}, "file.torn"),
        ({**SET, IMAGES: SET[IMAGES][:-1]}, "file.torn"),
        ({**SET, LABELS: SET[LABELS] + b"\0"}, "file.torn"),
        ({**SET, LABELS: idx(NUMBERS[:19])}, "idx.counts"),
        ({**SET, IMAGES: idx(PICTURES[:, :0])}, "image.empty"),
        ({IMAGES: idx(PICTURES[:0]), LABELS: idx(NUMBERS[:0])}, "source.empty"),
        ({**PACKED, f"{IMAGES}.gz": b"not gzip"}, "file.unreadable"),
        ({**PACKED, f"{IMAGES}.gz": PACKED[f"{IMAGES}.gz"][:-9]}, "file.unreadable"),
        ({**PACKED, f"{LABELS}.gz": PACKED[f"{LABELS}.gz"][:10] + b"\xff" * 20}, "file.unreadable"),
        ({**PACKED, f"{LABELS}.gz": PACKED[f"{LABELS}.gz"][:-8] + bytes(8)}, "file.unreadable"),
    ],
)
def test_files_that_are_no_idx_set_are_refused(tmp_path: Path, files: dict[str, bytes], rule: str) -> None:
    with refused(rule, "data.source" if rule == "source.empty" else None):
        data_of(write(tmp_path, files), ImageProcessor)


def test_fashion_has_the_names_of_its_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "FASHION_FOLDER", str(tmp_path))
    write(tmp_path, PACKED)
    data = data_of(DataConfig(source="builtin:fashion", validation_fraction=0.5), ImageProcessor)
    assert data.labels == sorted(data.labels)
    assert len(data.train) == len(data.validation) == 10  # each has a picture of each label
    labels = [label for _, label in read_examples(DataConfig(source="builtin:fashion"), "image")]
    assert labels[:3] == ["T-shirt/top", "Trouser", "Pullover"]
    assert labels[9] == "Ankle boot"


def test_the_test_files_are_the_test_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "FASHION_FOLDER", str(tmp_path))
    names = {IMAGES: "t10k-images-idx3-ubyte", LABELS: "t10k-labels-idx1-ubyte"}
    others = {names[IMAGES]: idx(255 - PICTURES[:4]), names[LABELS]: idx(NUMBERS[:4])}
    write(tmp_path, {**SET, **others})
    for source in ("builtin:fashion", str(tmp_path)):
        data = data_of(DataConfig(source=source, test_source=source, validation_fraction=0.5), ImageProcessor)
        assert data.rows == {"train": 10, "validation": 10, "test": 4}
        labels = [label for _, label in read_examples(DataConfig(source=source), "image")]
        assert [label for _, label in rows_in(data)["test"]] == labels[:4]


def test_a_label_that_fashion_has_not_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "FASHION_FOLDER", str(tmp_path))
    write(tmp_path, {**SET, LABELS: idx(np.full(20, 10, np.uint8))})
    with refused("labels.unknown"):
        read_examples(DataConfig(source="builtin:fashion"), "image")


def test_fashion_says_how_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "FASHION_FOLDER", str(tmp_path / "missing"))
    with refused("source.not_installed"):
        read_examples(DataConfig(source="builtin:fashion"), "image")
