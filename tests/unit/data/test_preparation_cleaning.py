"""Which rows shards have, and in which split they are."""

import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from app.config import load_recipe
from app.data.preparation.survey import split_keys
from app.tasks import prepare
from tests.preparing import ROWS, WORDS, prepared, recipe_of, rows_in, text, write_table
from tests.wording import refused


def test_a_row_stays_in_its_split_when_the_data_grow(tmp_path: Path) -> None:
    write_table(tmp_path / "some.jsonl", ROWS[:700])
    before = rows_in(prepared(tmp_path / "some.jsonl"))
    write_table(tmp_path / "more.jsonl", ROWS)
    after = rows_in(prepared(tmp_path / "more.jsonl"))
    assert set(before["train"]) <= set(after["train"])
    assert set(before["validation"]) <= set(after["validation"])


def test_rows_of_a_group_are_in_one_split(tmp_path: Path) -> None:
    write_table(tmp_path / "rows.csv", ROWS)
    found = rows_in(prepared(tmp_path / "rows.csv", "data.group_column=author", "data.test_fraction=0.2"))
    author = {item: group for item, _, group in ROWS}
    groups = [{author[item] for item, _ in rows} for rows in found.values()]
    assert len(groups) == 3
    assert sum(map(len, groups)) == len(set().union(*groups)) == 60


def test_rows_without_a_group_are_split_one_by_one(tmp_path: Path) -> None:
    write_table(tmp_path / "rows.csv", [(item, label, "") for item, label, _ in ROWS])
    data = prepared(tmp_path / "rows.csv", "data.group_column=author", "data.test_fraction=0.2")
    assert 180 < data.rows["test"] < 300
    with refused("keys.contradict", "data"):
        recipe_of(tmp_path / "rows.csv", "data.group_column=author", "data.clean={deduplicate: false}")


def test_a_row_is_dropped_for_one_reason(tmp_path: Path) -> None:
    odd = [
        ("  ", "good"),
        (ROWS[3][0], ROWS[3][1]),
        (ROWS[4][0], "good"),
        (f" {ROWS[5][0]} ", ROWS[5][1]),
        (text(-1), ""),
    ]
    write_table(tmp_path / "rows.parquet", [*ROWS[:300], *((*row, "") for row in odd), *ROWS[300:]])
    report = prepared(tmp_path / "rows.parquet").report
    assert (report.given, report.kept) == (len(ROWS) + 5, len(ROWS) - 1)
    assert report.dropped == {"empty": 1, "duplicate": 3, "conflicting": 1, "unlabelled": 1}
    assert report.examples["conflicting"] == [ROWS[4][0]]


def test_texts_of_other_lengths_are_dropped(tmp_path: Path) -> None:
    write_table(tmp_path / "rows.csv", ROWS)
    report = prepared(tmp_path / "rows.csv", "data.clean={min_length: 60, max_length: 120}").report
    assert report.dropped["too_short"] == sum(len(item) < 60 for item, _, _ in ROWS)
    assert report.dropped["too_long"] == sum(len(item) > 120 for item, _, _ in ROWS)
    assert all(len(item) > 120 for item in report.examples["too_long"]) or len(report.examples["too_long"]) == 10


def planted(count: int = 600) -> tuple[list[str], list[str]]:
    """Unlike texts, and copies of a tenth of them in which one word in a hundred is another."""
    source = random.Random(0)
    words = [f"{word}{number}" for word in WORDS for number in range(300)]
    texts = [source.choices(words, k=source.randint(100, 180)) for _ in range(count)]
    copies = []
    for words_of_one in texts[::10]:
        copy = list(words_of_one)
        copy[source.randrange(len(copy))] = "other"
        copies.append(" ".join(copy))
    return [" ".join(one) for one in texts], copies


def test_near_duplicates_are_found_and_nothing_else(tmp_path: Path) -> None:
    texts, copies = planted()
    unlike = ["short", "short one", "全然不同的一句话在这里", "另外一句与它毫不相干的话语"]
    rows = [(item, ("good", "bad")[place % 2], "") for place, item in enumerate([*texts, *unlike, *copies])]
    write_table(tmp_path / "rows.jsonl", rows)
    data = prepared(tmp_path / "rows.jsonl", "data.clean={near_duplicates: 0.8}")
    kept = {item for rows in rows_in(data).values() for item, _ in rows}
    assert {*texts, *unlike} <= kept  # precision
    assert len(kept & set(copies)) <= 0.05 * len(copies)  # recall
    assert data.report.dropped == {"near_duplicate": len(rows) - len(kept)}
    assert len(data.report.examples["near_duplicate"]) == 10
    few_at_a_time = recipe_of(tmp_path / "rows.jsonl", "data.clean={near_duplicates: 0.8}", "data.seed=1")
    shards = few_at_a_time.data.shards.model_copy(update={"memory": 40_000})
    bounded = few_at_a_time.data.model_copy(update={"shards": shards})
    again = prepare(few_at_a_time.model_copy(update={"data": bounded}))
    assert again.report.dropped == data.report.dropped


def test_pictures_that_cannot_be_decoded_are_counted_or_refused(tmp_path: Path) -> None:
    for label, level in (("dark", 0), ("light", 200)):
        (tmp_path / label).mkdir()
        for number in range(150):
            Image.new("L", (8, 8), level + number % 50).resize((8 + number // 50, 8)).save(
                tmp_path / label / f"{number}.png"
            )
    (tmp_path / "dark" / "torn.png").write_bytes(b"\x89PNG nothing")
    Image.new("1", (9000, 9000)).save(tmp_path / "dark" / "vast.png")  # training refuses so many pixels
    shards = "data.shards={size: 5KB, window: 20KB}"
    recipe = load_recipe("recipes/digits.yaml", [f"data.source={tmp_path}", shards])
    data = prepare(recipe)
    assert data.report.dropped == {"unreadable": 2}
    assert data.report.examples["unreadable"] == [
        repr(str(tmp_path / "dark" / name)) for name in ("torn.png", "vast.png")
    ]
    assert data.train.batch([0, 1]).inputs["pixel_values"].shape[0] == 2
    for number in range(9):
        (tmp_path / "dark" / f"torn{number}.png").write_bytes(b"\x89PNG nothing")
    with refused("rows.unreadable", "data.source"):
        prepare(recipe)


def test_each_label_is_in_every_split_and_no_other_row_moves(tmp_path: Path) -> None:
    rows = [(item, f"rare {number // 4}" if number < 40 else label, "") for number, (item, label, _) in enumerate(ROWS)]
    write_table(tmp_path / "rows.csv", rows)
    keys = ["data.test_fraction=0.1", "data.validation_fraction=0.05"]
    found = rows_in(prepared(tmp_path / "rows.csv", *keys))
    labels = [{label for _, label in split} for split in found.values()]
    assert labels[0] == labels[1] == labels[2]
    assert len(labels[0]) == 13
    common = [(item, label, "") for item, label, _ in rows if not label.startswith("rare")]
    write_table(tmp_path / "common.csv", common)
    plain = rows_in(prepared(tmp_path / "common.csv", *keys))
    for split, kept in plain.items():
        assert set(kept) <= set(found[split])


def test_texts_are_dropped_by_language_and_symbols(tmp_path: Path) -> None:
    english = "The river flows past the old stone house and into the valley, where nobody lives any more"
    odd = [
        ("Der Fluss fließt an dem alten Haus vorbei und in das Tal, in dem niemand mehr wohnt", "language"),
        ("这条河流过古老的石头房子，流进山谷，那里再也没有人居住了", None),
        ("=== <<>> *** !!! ??? --- ### $$$ %%% house", "symbols"),
        ("नदी पुराने पत्थर के घर के पास से बहती है और घाटी में जाती है", "language"),
    ]
    rows = [(f"{english} {number}", ("good", "bad")[number % 2], "") for number in range(200)]
    write_table(tmp_path / "rows.csv", [*rows, *((item, "good", "") for item, _ in odd)])
    report = prepared(tmp_path / "rows.csv", "data.clean={languages: [en, zh], max_symbol_share: 0.2}").report
    assert report.dropped == {"language": 2, "symbols": 1}
    assert report.examples["language"] == [item for item, reason in odd if reason == "language"]
    with refused("language.unknown", "data.clean.languages"):
        prepared(tmp_path / "rows.csv", "data.clean={languages: [english]}")


@pytest.mark.parametrize(
    "spellings",
    [
        ["é", "e\u0301"],
        ["1.10", "1.1", "1.100"],
        ["7", "007", "7e0"],
        ["0", "-0.0"],
        ["1e5", "100000"],
        ["true", "TRUE", "True"],
    ],
)
def test_all_spellings_of_a_group_are_in_one_split(spellings: list[str]) -> None:
    others = ["E", "1.11", "70", "1e-99999999999999999999", "9007199254740993", "9007199254740992", "x", "1_0", "nan"]
    keys = split_keys([*spellings, *others], np.zeros(len(spellings) + len(others), np.uint64)).tolist()
    assert len(set(keys[: len(spellings)])) == 1
    assert len(set(keys)) == 1 + len(others)
