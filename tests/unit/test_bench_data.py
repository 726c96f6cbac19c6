"""The benchmark of data: its texts, and the goals that follow from what readers took."""

from pathlib import Path

import pyarrow.parquet as pq
from PIL import Image

from benchmarks.data import pictures
from benchmarks.data.__main__ import _reading_goals
from benchmarks.data.batches import BUDGET, GROUPED, RANDOM, Trained, page
from benchmarks.data.corpus import write_texts
from benchmarks.data.readers import Share


def test_texts_are_as_large_as_asked_and_the_same_each_time(tmp_path: Path) -> None:
    rows = write_texts(tmp_path / "a.parquet", 1)
    assert write_texts(tmp_path / "b.parquet", 1) == rows
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.equals(pq.read_table(tmp_path / "b.parquet"))
    assert table.num_rows == rows
    assert sum(map(len, table["text"].to_pylist())) >= 1e6


def test_goals_follow_from_the_slowest_process_and_the_best_other() -> None:
    def shares(rows: int, wall_s: float, peak: int = 100_000_000) -> list[Share]:
        return [Share(rows, rows * 2000, wall_s, 1.0, 1.0, peak), Share(rows, rows * 2000, wall_s / 2, 1.0, 0.5, peak)]

    found = {
        ("Rayloom", "10 MB, cold"): shares(60_000, 2.0),
        ("Rayloom", "90 MB, cold"): shares(60_000, 2.0, 120_000_000),
        ("Rayloom", "from the middle on"): shares(10, 0.1),
        ("datasets", "10 MB"): shares(20_000, 2.0),
        ("Ray Data", "10 MB"): shares(10_000, 2.0),
    }
    goals = {goal.what: goal for goal in _reading_goals(found, 10, 90)}
    assert goals["rows/s, cold, to the best other"].reached == "3.0"
    assert goals["rows/s, cold, to the best other"].verdict == "reached"
    assert goals["90 MB, cold"].reached == "60,000 and 120"
    assert goals["the same, to that of 10 MB"].verdict == "**missed**"


def test_batches_are_compared_by_useful_tokens_and_validation() -> None:
    def ran(rate: float, accuracy: float) -> list[Trained]:
        return [Trained(int(rate * 10), 10.0, 5, 0.5, accuracy)] * 2

    text = page({RANDOM: ran(100, 0.9), GROUPED: ran(150, 0.9), BUDGET: ran(160, 0.88)}, "recipes/reviews.yaml")
    assert "| useful tokens/s, to random batches | ≥ 1.5 | 1.60 | reached |" in text
    assert "| the same, to batches sorted in groups | – | 1.07 | – |" in text
    assert "| val_accuracy below that of random | ≤ 0.01 | +0.0200 | **missed** |" in text


def test_pictures_are_jpegs_in_folders_of_labels_and_the_goal_is_a_share_of_decoding(tmp_path: Path) -> None:
    num_bytes = pictures.write_pictures(tmp_path, 20)
    files = sorted(tmp_path.glob("*/*.jpg"))
    assert len(files) == 20
    assert len({file.parent for file in files}) == 10
    assert sum(file.stat().st_size for file in files) == num_bytes
    with Image.open(files[0]) as image:
        assert image.size == (224, 224)
    assert "| 0.95 | reached |" in pictures.page([90.0, 95.0, 99.0], [100.0], 20, num_bytes, cores=2)
    assert "| 0.80 | **missed** |" in pictures.page([80.0], [100.0], 20, num_bytes, cores=2)
