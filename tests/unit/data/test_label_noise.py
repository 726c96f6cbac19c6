"""Labels that are likely wrong: found where planted, counted, shown, and dropped on request."""

import random
from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import pytest

from app.config import load_recipe
from app.data import label_noise
from app.data.builtin import BUILTIN
from app.data.label_noise import FINE, LabelJudge
from app.data.labelled import LabelledData
from app.data.preparation.survey import hashes_of
from app.data.prepared import PreparedData
from app.tasks import prepare
from tests.preparing import recipe_of, write_table
from tests.wording import refused

OTHER = {"positive": "negative", "negative": "positive"}


def planted(path: Path, count: int = 4000) -> set[str]:
    """Write reviews, and return the texts of a twentieth of them, which have the other label."""
    reviews = {str(item).strip(): label for item, label in BUILTIN["reviews"]() if label and str(item).strip()}
    source = random.Random(0)
    rows = source.sample(list(reviews.items()), count)
    flipped = {item for item, _ in rows[: count // 20]}
    source.shuffle(rows)
    write_table(path, [(item, OTHER[label] if item in flipped else label, "") for item, label in rows])
    return flipped


def prepared(source: Path, *overrides: str) -> PreparedData:
    """The data of a recipe."""
    return prepare(recipe_of(source, "data.shards={size: 50KB, window: 200KB, memory: 1MB}", *overrides))


def texts_of(data: PreparedData, split: str) -> Sequence[str]:
    assert isinstance(data, LabelledData)
    part = getattr(data, split).split
    inputs, _ = part.take(range(len(part)))
    return [str(item) for item in inputs]


def test_planted_labels_are_found_and_dropped_from_training_only(tmp_path: Path) -> None:
    flipped = planted(tmp_path / "rows.csv")
    keys = ["data.test_fraction=0.1"]
    before = prepared(tmp_path / "rows.csv", *keys)
    after = prepared(tmp_path / "rows.csv", *keys, "data.clean={label_noise: drop}")
    kept, given = set(texts_of(after, "train")), set(texts_of(before, "train"))
    assert kept < given
    found, wrong = given - kept, given & flipped
    assert len(found & wrong) > 0.5 * len(wrong)  # recall
    assert len(found & wrong) > 0.2 * len(found)  # precision: four times that of random guesses
    assert after.report.dropped == before.report.dropped | {"label_noise": len(found)}
    assert after.report.kept == before.report.kept - len(found)
    for split in ("validation", "test"):
        assert texts_of(after, split) == texts_of(before, split)
    shown = after.report.examples["label_noise"]
    assert len(shown) == 10
    for one in shown:
        label, _, text = one.partition(": ")
        assert label in ("positive, likelier negative", "negative, likelier positive")
        assert any(item.startswith(text) for item in found)


def test_a_report_drops_nothing(tmp_path: Path) -> None:
    planted(tmp_path / "rows.csv", 1000)
    before = prepared(tmp_path / "rows.csv")
    after = prepared(tmp_path / "rows.csv", "data.clean={label_noise: report}")
    assert texts_of(after, "train") == texts_of(before, "train")
    assert after.report.dropped == before.report.dropped
    assert after.report.kept == before.report.kept
    assert len(after.report.examples["label_noise"]) == 10
    assert f"; kept with a label that is likely wrong: {after.report.suspected:,}" in str(after.report)
    assert 30 < after.report.suspected < 200


def test_units_and_their_order_do_not_change_what_is_doubted(tmp_path: Path) -> None:
    planted(tmp_path / "rows.csv", 1000)
    keys = ["data.clean={label_noise: drop}"]
    whole = prepared(tmp_path / "rows.csv", *keys)
    cut = prepare(recipe_of(tmp_path / "rows.csv", *keys))
    assert sorted(texts_of(cut, "train")) == sorted(texts_of(whole, "train"))
    assert cut.report.dropped == whole.report.dropped


def test_spellings_of_a_boolean_are_one_label(tmp_path: Path) -> None:
    words, suspected = [" ".join(words_of(random.Random(number), 8)) for number in range(300)], set[int | None]()
    for spellings in (["True"], ["true", "True"]):
        rows = [
            (f"{('good', 'bad')[number % 2]} {text}", "False" if number % 2 else spellings[-(number % 3 > 0)], "")
            for number, text in enumerate(words)
        ]
        write_table(tmp_path / "rows.csv", rows)
        suspected.add(prepared(tmp_path / "rows.csv", "data.clean={label_noise: report}").report.suspected)
    assert len(suspected) == 1


def words_of(source: random.Random, count: int) -> list[str]:
    return ["".join(source.choices(ascii_lowercase, k=source.randint(3, 7))) for _ in range(count)]


def test_labels_of_rare_classes_are_not_seen_in_good_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_noise, "_FEATURES", 2**12)  # as many weights as these texts need
    source = random.Random(0)
    words, common = [words_of(source, 40) for _ in range(4)], words_of(source, 60)
    true = source.choices(range(4), [0.9, 0.08, 0.015, 0.005], k=4000)
    texts = [
        " ".join(source.choice(words[number] if source.random() < 0.25 else common) for _ in range(12))
        for number in true
    ]
    wrong = {row for row in range(4000) if source.random() < 0.05}
    given = [(number + source.randint(1, 3)) % 4 if row in wrong else number for row, number in enumerate(true)]
    classes, (_, keys) = np.array(given), hashes_of([text] for text in texts)
    suggested = LabelJudge.fit(texts, classes, keys, list("abcd")).suggest(texts, classes, keys)
    doubted = set(np.flatnonzero(suggested != FINE).tolist())
    assert len(doubted & wrong) > 0.6 * len(wrong)
    assert len(doubted & wrong) > 0.6 * len(doubted)


def test_a_label_is_not_dropped_as_a_whole(tmp_path: Path) -> None:
    source = random.Random(0)
    words = {label: words_of(source, 12) for label in "xy"}
    rows = [
        (" ".join(source.choices(words[label], k=10)) + f" {number}", label) for number in range(150) for label in "xy"
    ]
    rows += [(" ".join(source.choices(words["x"], k=60)), "rare") for _ in range(3)]  # the model is sure of x
    write_table(tmp_path / "rows.csv", [(text, label, "") for text, label in rows])
    with refused("labels.all_dropped", "data.clean.label_noise"):
        prepared(tmp_path / "rows.csv", "data.clean={label_noise: drop}", "data.test_fraction=null")


def test_too_few_texts_are_refused(tmp_path: Path) -> None:
    rows = [(f"text {number}", "good", "") for number in range(60)] + [("one", "bad", ""), ("two", "bad", "")]
    write_table(tmp_path / "rows.csv", rows)
    keys = ["data.clean={label_noise: drop}", "data.validation_fraction=0.5", "data.test_fraction=null"]
    with refused("labels.too_few", "data.clean.label_noise"):
        prepared(tmp_path / "rows.csv", *keys)


def test_other_tasks_do_not_read_it() -> None:
    with refused("task.unsupported", "data.clean.label_noise"):
        load_recipe("recipes/digits.yaml", ["data.clean={label_noise: drop}"])
