"""The benchmark of data: its texts and pictures, and the goals that follow from what readers and batches took."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from app.data.builtin import BUILTIN
from benchmarks.data import pictures
from benchmarks.data.batches import BUDGET, RANDOM, Trained, page
from benchmarks.data.corpus import write_corpus
from benchmarks.data.readers import Reading, Share
from benchmarks.machine import Conditions


def test_texts_are_as_large_as_asked_the_same_each_time_and_all_different(tmp_path: Path) -> None:
    files = write_corpus(tmp_path / "a", 10)
    again = write_corpus(tmp_path / "b", 10)
    tables = [pq.read_table(file) for file in files]
    assert all(table.equals(pq.read_table(other)) for table, other in zip(tables, again, strict=True))
    texts = [text for table in tables for text in table["text"].to_pylist()]
    assert sum(map(len, texts)) == pytest.approx(10e6, rel=0.2)
    assert len(set(texts)) == len(texts)


def test_a_reading_is_as_slow_as_its_slowest_process() -> None:
    def share(wall_s: float, first_batch_s: float) -> Share:
        return Share(10_000, 10_000_000, wall_s, 1.0, first_batch_s, 100, cpu_s=2.0, peak_bytes=5)

    reading = Reading([share(5.0, 2.0), share(10.0, 3.0)])
    assert (reading.rate, reading.megabytes, reading.rows_per_cpu_s) == (2000, 2.0, 5000)
    assert (reading.first_batch_s, reading.seek_s) == (3.0, 2.0)
    assert reading.steady_rate == pytest.approx(9900 / 3 + 9900 / 7)


def test_batches_are_compared_by_useful_tokens_and_validation() -> None:
    def ran(rate: float, accuracies: tuple[float, ...]) -> list[Trained]:
        return [Trained(int(rate * 10), 10.0, 5, 0.5, accuracy) for accuracy in accuracies]

    runs = {RANDOM: ran(100, (0.9, 0.91)), BUDGET: ran(160, (0.88, 0.89))}
    text = page(runs, "recipes/reviews.yaml", 1, Conditions())
    assert "| useful tokens a second, relative to random batches | ≥ 1.5 | 1.600 (1.600 to 1.600) | reached |" in text
    assert "| loss of val_accuracy | ≤ 0.01 | +0.0200 (+0.0200 to +0.0200) | **missed** |" in text


def test_pictures_are_jpegs_in_folders_of_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = BUILTIN["digits"]()  # 60,000 pictures of Fashion-MNIST take ten seconds to read
    slashed = replace(digits, labels=[f"{label}/top" for label in digits.labels])
    monkeypatch.setitem(BUILTIN, "fashion", lambda: slashed)
    num_bytes = pictures.write_pictures(tmp_path, 60)
    files = sorted(tmp_path.glob("*/*.jpg"))
    contents = {file.read_bytes() for file in files}
    assert (len(contents), sum(map(len, contents))) == (60, num_bytes)
    assert len({file.parent for file in files}) == 10
    with Image.open(files[0]) as image:
        assert image.size == (224, 224)
