"""Data: sources, cleaning, the split and the processors."""

import io
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from pydantic import ValidationError
from upath import UPath

from app.config import CleanConfig, DataConfig, ImageConfig, TokenizerConfig
from app.data.builtin import BUILTIN
from app.data.images import ImageProcessor
from app.data.labelled import LabelledData, LabelledDataset
from app.data.targets import Classes
from app.data.text import TextProcessor
from tests.examples import read_examples
from tests.preparing import data_of, rows_in
from tests.wording import refused

TABLE = pd.DataFrame({"text": ["good one", "bad one", "fine", "poor"] * 5, "label": ["yes", "no", "yes", "no"] * 5})
TABLE["text"] += [f" {index}" for index in range(len(TABLE))]
REVIEWS = DataConfig(source="builtin:reviews")
WRITERS = {
    "csv": lambda path: TABLE.to_csv(path, index=False),
    "jsonl": lambda path: TABLE.to_json(path, orient="records", lines=True),
    "parquet": lambda path: TABLE.to_parquet(path),
}


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> LabelledData:
    return data_of(REVIEWS, TextProcessor, tmp_path_factory.mktemp("reviews"))


def test_reviews_are_cleaned_as_counted(reviews: LabelledData) -> None:
    report = reviews.report
    assert (report.what, report.given, report.kept) == ("examples", 35_124, 17_363)
    assert report.dropped == {"empty": 1, "duplicate": 17_713, "conflicting": 47}
    assert report.examples["empty"] == [""]
    assert len({item for rows in rows_in(reviews).values() for item, _ in rows}) == 17_363
    assert "17,713 exact duplicates" in str(report)


def test_the_split_is_fixed_even_and_does_not_leak(tmp_path: Path) -> None:
    reviews = BUILTIN["reviews"]()
    source = table(tmp_path / "reviews.csv", reviews.inputs[::8], reviews.labels[::8])
    data, again, other_seed = (
        data_of(DataConfig(source=source, seed=seed), TextProcessor, tmp_path / str(number))
        for number, seed in enumerate((0, 0, 1))
    )
    assert data.fingerprint == again.fingerprint
    train, validation = (set(rows) for rows in rows_in(data).values())
    other = set(rows_in(other_seed)["validation"])
    assert len(other & validation) < 0.2 * len(other)
    assert not {item for item, _ in train} & {item for item, _ in validation}
    assert len(validation) == pytest.approx(0.1 * data.report.kept, rel=0.05)
    shares = [Counter(label for _, label in part)["positive"] / len(part) for part in (train, validation)]
    assert shares[0] == pytest.approx(shares[1], abs=0.02)


def test_prepared_data_is_read_as_it_was_written(reviews: LabelledData, tmp_path: Path) -> None:
    reviews.save(UPath(tmp_path))
    loaded = LabelledData.load(UPath(tmp_path), TextProcessor, Classes)
    texts = list(reviews.validation.split.inputs[:5])
    assert loaded.fingerprint == reviews.fingerprint
    assert np.array_equal(loaded.processor.encode(texts)["input_ids"], reviews.processor.encode(texts)["input_ids"])


def table(path: Path, texts: list[str], labels: list[str]) -> str:
    pd.DataFrame({"text": texts, "label": labels}).to_csv(path, index=False)
    return str(path)


def test_a_test_split_is_taken_out_of_training_alone_and_left_on_disk(tmp_path: Path) -> None:
    image = ImageConfig(size=8, channels=1)
    before = data_of(DataConfig(source="builtin:digits", image=image), ImageProcessor)
    data = data_of(DataConfig(source="builtin:digits", image=image, test_fraction=0.2), ImageProcessor)
    rows, rows_before = rows_in(data), rows_in(before)
    assert rows["validation"] == rows_before["validation"], "figures with and without a test split compare"
    assert data.test is not None
    assert len(data.test) == pytest.approx(0.2 * 1_797, rel=0.1)
    assert sorted([*rows["test"], *rows["train"]]) == sorted(rows_before["train"])
    shares = [Counter(label for _, label in rows[split])["0"] / len(rows[split]) for split in ("train", "test")]
    assert shares[0] == pytest.approx(shares[1], abs=0.04)
    assert f"testing the published version on {len(data.test):,}" in data.summary
    data.save(UPath(tmp_path / "with"))
    loaded = LabelledData.load(UPath(tmp_path / "with"), ImageProcessor, Classes)
    assert loaded.test is None
    tested = LabelledData.load_test(UPath(tmp_path / "with"), ImageProcessor, Classes)
    assert isinstance(tested, LabelledDataset)
    assert list(tested.split.inputs) == list(data.test.split.inputs)
    before.save(UPath(tmp_path / "without"))
    assert before.test is None
    assert LabelledData.load_test(UPath(tmp_path / "without"), ImageProcessor, Classes) is None


def test_what_is_in_the_test_source_is_neither_trained_nor_validated_on(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(40)]
    source = table(tmp_path / "all.csv", texts, ["yes", "no"] * 20)
    tests = table(tmp_path / "test.csv", ["text 0 ", "text 1", "other", "other"], ["no", "yes", "yes", "yes"])
    data = data_of(DataConfig(source=source, test_source=tests, validation_fraction=0.25), TextProcessor)
    rows = rows_in(data)
    assert rows["test"] == [("text 0", "no"), ("text 1", "yes"), ("other", "yes")]
    assert {item for item, _ in (*rows["train"], *rows["validation"])} == set(texts[2:])
    assert "2 also in data.test_source" in data.summary


def test_groups_of_the_test_source_are_neither_trained_nor_validated_on(tmp_path: Path) -> None:
    for name, rows, authors in (("all", 60, 12), ("test", 9, 3)):
        lines = [f"{name} {n},{('yes', 'no')[n % 2]},{n % authors}" for n in range(rows)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label,author", *lines, f"{name} alone,yes,"]))
    sources = {"source": str(tmp_path / "all.csv"), "test_source": str(tmp_path / "test.csv")}
    data = data_of(DataConfig(**sources, group_column="author", validation_fraction=0.3), TextProcessor)
    found = rows_in(data)
    seen = {item for item, _ in (*found["train"], *found["validation"])}
    assert seen == {f"all {n}" for n in range(60) if n % 12 > 2} | {"all alone"}
    assert len(found["test"]) == 10
    assert "15 also in data.test_source" in data.summary


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"test_fraction": 0.1, "test_source": "x.csv"}, "both define the test split"),
        ({"test_fraction": 0.6, "validation_fraction": 0.4}, "leaves nothing to train on"),
        ({"test_fraction": 0.0}, "greater than 0"),
    ],
)
def test_a_test_split_that_makes_no_sense_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        DataConfig(source="builtin:reviews", **keys)


@pytest.mark.parametrize(
    ("keys", "rule", "key"),
    [
        ({"test_source": "{folder}/strange.csv"}, "labels.unknown", "data.test_source"),
        ({"test_source": "/nowhere.csv"}, "source.missing", None),
        ({"test_source": "builtin:reviews"}, "source.unknown_set", None),
    ],
)
def test_a_test_split_that_cannot_be_made_is_told(
    tmp_path: Path, keys: dict[str, Any], rule: str, key: str | None
) -> None:
    source = table(tmp_path / "all.csv", [f"text {number}" for number in range(20)], ["yes", "no"] * 10)
    table(tmp_path / "strange.csv", ["a", "b"], ["yes", "maybe"])
    given = {key: value.format(folder=tmp_path) if isinstance(value, str) else value for key, value in keys.items()}
    with refused(rule, key):
        data_of(DataConfig(source=source, **given), TextProcessor)


def test_cleaning_drops_each_example_for_one_reason(tmp_path: Path) -> None:
    given = [("a", "x"), ("a ", "x"), ("", "x"), ("b", ""), ("b", "y"), ("c", "x"), ("c", "y"), ("c", "x")]
    others = [(f"text {number}", "xy"[number % 2]) for number in range(20)]
    texts, labels = map(list, zip(*given, *others, strict=True))
    data = data_of(DataConfig(source=table(tmp_path / "rows.csv", texts, labels)), TextProcessor)
    kept = [row for rows in rows_in(data).values() for row in rows]
    assert sorted(kept) == sorted([("a", "x"), ("b", "y"), *others])
    assert data.report.dropped == {"empty": 1, "unlabelled": 1, "duplicate": 3, "conflicting": 1}


@pytest.mark.parametrize("suffix", WRITERS)
def test_tables_are_read(tmp_path: Path, suffix: str) -> None:
    WRITERS[suffix](tmp_path / f"table.{suffix}")
    examples = read_examples(DataConfig(source=str(tmp_path / f"table.{suffix}")))
    assert examples == list(zip(TABLE["text"], TABLE["label"], strict=True))


def test_an_image_folder_is_read(tmp_path: Path) -> None:
    for label, level in (("dark", 0), ("light", 255)):
        for index in range(4):
            (tmp_path / label).mkdir(exist_ok=True)
            Image.fromarray(np.full((9 + index, 5), level, np.uint8)).save(tmp_path / label / f"{index}.png")
    (tmp_path / "notes.txt").write_text("not an image", encoding="utf-8")
    config = DataConfig(source=str(tmp_path), validation_fraction=0.5, clean=CleanConfig(deduplicate=False))
    data = data_of(config, ImageProcessor)
    batch = data.train.batch(range(4))
    pixels = batch.inputs["pixel_values"]
    assert data.labels == ["dark", "light"]
    assert pixels.shape == (4, 3, 32, 32)
    assert pixels.dtype == np.float32
    assert [pixels[row].mean() for row in range(4)] == [2.0 * label - 1.0 for label in batch.targets]


@pytest.mark.parametrize(
    ("source", "rule", "key"),
    [
        ("builtin:review", "source.unknown_set", None),
        ("/nowhere/data.csv", "source.missing", None),
        ("nosuch://bucket/data.csv", "source.not_opened", None),
        ("{folder}/data.txt", "source.no_files", None),
        ("{folder}/empty.csv", "source.empty", "data.source"),
        ("{folder}/header.csv", "source.empty", "data.source"),
        ("{folder}/other.csv", "columns.missing", "data.columns.label"),
        ("{folder}/one.csv", "labels.too_few", "data.source"),
        ("{folder}/broken.jsonl", "json.invalid", None),
        ("{folder}/folder", "source.no_files", None),
    ],
)
def test_bad_sources_are_refused(tmp_path: Path, source: str, rule: str, key: str | None) -> None:
    files = {
        "data.txt": "text",
        "empty.csv": "",
        "header.csv": "text,label\n",
        "other.csv": "text,target\na,b\n",
        "one.csv": "text,label\na,x\nb,x\n",
        "broken.jsonl": '{"text": ',
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "folder").mkdir()
    with refused(rule, key):
        data_of(DataConfig(source=source.format(folder=tmp_path)), TextProcessor)


def test_another_kind_of_input_is_refused() -> None:
    with refused("source.contents", "data.source"):
        data_of(DataConfig(source="builtin:digits"), TextProcessor)


def test_texts_are_padded_to_buckets_and_cut_at_the_last() -> None:
    config = DataConfig(source="-", buckets=[4, 8], tokenizer=TokenizerConfig(max_piece_length=1))
    processor = TextProcessor.fit(["abc", "bcd", "abcd"] * 2, config)
    short, cut = processor.encode(["ab", "a"]), processor.encode(["abcd" * 9, "a"])
    assert short["input_ids"].shape == (2, 4)
    assert short["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]  # the start token comes first
    assert cut["input_ids"].shape == (2, 8)
    assert cut["attention_mask"].sum(1).tolist() == [8, 2]


def test_an_unreadable_image_is_refused() -> None:
    processor = ImageProcessor.fit([], DataConfig(source="-"))
    with refused("image.unreadable"):
        processor.encode([b"abc"])
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, "PNG")
    with refused("image.unreadable"):
        processor.encode([buffer.getvalue()[:40]])


@pytest.mark.parametrize("side", [8200, 14_000], ids=["for us", "for Pillow"])
def test_a_small_file_that_is_a_huge_image_is_refused(side: int) -> None:
    buffer = io.BytesIO()
    Image.new("1", (side, side)).save(buffer, "PNG")
    with refused("image.too_large"):
        ImageProcessor.fit([], DataConfig(source="-")).encode([buffer.getvalue()])


def test_many_labels_are_split_in_seconds(tmp_path: Path) -> None:
    labels = [f"label {number}" for number in range(20_000)] * 2
    source = table(tmp_path / "labels.csv", [f"text {number}" for number in range(len(labels))], labels)
    began = time.process_time()
    data = data_of(DataConfig(source=source, validation_fraction=0.5), TextProcessor)
    assert time.process_time() - began < 10.0
    assert data.labels == sorted(set(labels))
    rows = rows_in(data)
    assert all(label == labels[int(item.split()[1])] for part in rows.values() for item, label in part)
    assert all(sorted(label for _, label in part) == data.labels for part in rows.values())
