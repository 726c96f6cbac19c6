"""Token classification: reading tags and spans, first tokens, entities, and their F1 over batches."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from upath import UPath

from app.config import load_recipe
from app.data.builtin import BUILTIN_SPANS
from app.data.labelled import LabelledData, LabelledDataset
from app.data.prepared import IGNORED
from app.data.tags import Tags, Word, first_tokens, spans_of
from app.data.text import TextProcessor
from app.models.factory import blueprint_of
from app.models.pretrained import match_weights
from app.tasks import find_served_task, load_prepared, prepare
from app.tasks.objective import objective_of
from app.tasks.tagging import EntityF1
from tests.preparing import first_losses, read_fewer_files
from tests.pretrained import write_encoder
from tests.wording import refused

MODEL = {"factory": "app.models.text:token_classifier", "args": {"layers": 1, "width": 8, "heads": 2}}
CITIES = ("New York", "Rome", "San Marino")


def tokens(row: int) -> dict[str, Any]:
    city = CITIES[row % 3].split()
    tags = ["B-city", "I-city"][: len(city)]
    return {"tokens": ["train", str(row), "to", *city, "leaves"], "tags": ["O", "number", "O", *tags, "O"]}


def spans(row: int) -> dict[str, Any]:
    city = CITIES[row % 3]
    return {"text": f"Fly to {city}, gate {row}.", "spans": [{"start": 7, "end": 7 + len(city), "label": "city"}]}


def write_recipe(folder: Path, rows: Sequence[dict[str, Any]], **data: Any) -> str:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    given = {"source": str(folder / "rows.jsonl"), "buckets": [8, 16], **data}
    content = {"name": "cities", "task": "token-classification", "model": MODEL, "data": given}
    (folder / "recipe.yaml").write_text(json.dumps(content), encoding="utf-8")
    return str(folder / "recipe.yaml")


def prepared(folder: Path, rows: Sequence[dict[str, Any]], *overrides: str, **data: Any) -> LabelledData:
    found = prepare(load_recipe(write_recipe(folder, rows, **data), list(overrides)))
    assert isinstance(found, LabelledData)
    return found


def rows_of(split: LabelledDataset) -> list[tuple[str, list[int]]]:
    return [(str(text), classes) for text, classes in zip(*split.split.take(range(len(split))), strict=True)]


@pytest.mark.parametrize("kind", [tokens, spans])
def test_rows_of_either_kind_are_read_split_and_saved(tmp_path: Path, kind: Any) -> None:
    data = prepared(tmp_path, [*map(kind, range(20)), kind(3)], test_fraction=0.2)
    assert data.report.dropped == {"duplicate": 1}
    assert sum(data.rows.values()) == data.report.kept == 20
    tags = data.targets
    assert isinstance(tags, Tags)
    assert tags.words == ("spaces" if kind is tokens else "letters")
    assert data.labels[:3] == ["O", "B-city", "I-city"]
    assert data.test is not None
    for text, classes in [*rows_of(data.train), *rows_of(data.validation), *rows_of(data.test)]:
        words = tags.words_of(text)
        assert len(words) == len(classes)
        (found,) = [
            (words[first].start, words[last].end)
            for first, last in spans_of([tag if tag < 3 else 0 for tag in classes])
        ]
        assert text[slice(*found)] in CITIES
    data.save(UPath(tmp_path / "data"))
    recipe = load_recipe(str(tmp_path / "recipe.yaml"))
    again = load_prepared(recipe, UPath(tmp_path / "data"))
    assert again.fingerprint == data.fingerprint
    test: Any = find_served_task(recipe.task).load_test(recipe, UPath(tmp_path / "data"))
    assert rows_of(test) == rows_of(data.test)


@pytest.mark.parametrize("kind", [tokens, spans])
def test_one_shard_and_many_give_the_same_split_batches_and_losses(tmp_path: Path, kind: Any) -> None:
    rows, found = list(map(kind, range(900))), []
    for size, is_cut in (("32MB", False), ("5KB", True)):
        data = prepared(tmp_path, rows, f"data.shards.size={size}", test_fraction=0.1)
        index = data.reference.index
        units = {shard.name.split("-")[1] for shards in index.splits.values() for shard in shards}
        assert (len(units) > 2, len(index.splits["train"]) > 4) == (is_cut, is_cut)
        assert data.test is not None
        splits = [rows_of(split) for split in (data.train, data.validation, data.test)]
        batches = [data.train.batch(range(first, first + 50)) for first in range(0, 700, 50)]
        assert data.train.num_targets is not None
        content = [array.tobytes() for batch in batches for array in (*batch.inputs.values(), batch.targets)]
        recipe = load_recipe(str(tmp_path / "recipe.yaml"))
        found.append((splits, data.train.num_targets.tolist(), content, first_losses(recipe, data)))
    assert found[0] == found[1]


def test_a_text_is_in_one_split_with_those_of_its_group(tmp_path: Path) -> None:
    rows = [tokens(row) | {"page": row // 20} for row in range(400)]
    (tmp_path / "test.jsonl").write_text(json.dumps(tokens(7) | {"tags": ["O"] * len(tokens(7)["tags"])} | {"page": 0}))
    data = prepared(tmp_path, rows, test_source=str(tmp_path / "test.jsonl"), group_column="page")
    assert data.report.dropped == {"in_test": 20}, "all texts of the page that is tested"
    assert data.test is not None
    assert [text for text, _ in rows_of(data.test)] == [" ".join(tokens(7)["tokens"])]
    pages = [{int(text.split()[1]) // 20 for text, _ in rows_of(split)} for split in (data.train, data.validation)]
    assert pages[0] | pages[1] == set(range(1, 20))
    assert not pages[0] & pages[1]


def test_sources_are_mixed_if_their_words_are_split_alike(tmp_path: Path) -> None:
    for name, kind in (("a", tokens), ("b", tokens), ("c", spans)):
        lines = [json.dumps(kind(row + 100 * (name == "b"))) for row in range(100)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))

    def both(*names: str) -> LabelledData:
        return prepared(
            tmp_path, [], source=None, sources=[{"source": str(tmp_path / f"{name}.jsonl")} for name in names]
        )

    data = both("a", "b")
    assert data.origins is not None
    assert set(data.origins.train.tolist()) == {0, 1}
    with refused("sources.differ", "data.sources"):
        both("a", "c")


def test_only_the_first_token_of_a_word_counts_and_no_word_that_is_cut_off(tmp_path: Path) -> None:
    data = prepared(tmp_path, list(map(tokens, range(30))), "data.tokenizer.max_piece_length=1", "data.buckets=[8]")
    batch, tags = data.train.batch(range(len(data.train))), data.targets
    assert isinstance(tags, Tags)
    assert isinstance(data.processor, TextProcessor)
    assert data.train.num_targets is not None
    for row, (text, classes) in enumerate(rows_of(data.train)):
        offsets = data.processor.offsets(text)
        read = [word for word in tags.words_of(text) if word.start < offsets[-1][1]]
        assert len(read) < len(classes)
        places = np.flatnonzero(batch.targets[row] != IGNORED)
        assert [offsets[place][0] for place in places] == [word.start for word in read]
        assert batch.targets[row][places].tolist() == classes[: len(read)]
        assert data.train.num_targets[row] == len(read)


def test_words_that_share_a_token_or_have_none() -> None:
    words = [Word(0, 2), Word(2, 4), Word(5, 7), Word(8, 9)]
    assert first_tokens(words, [(0, 0), (0, 4), (4, 6), (6, 7), (0, 0)]) == [1, None, 2, None]


@pytest.mark.parametrize(
    ("rows", "rule", "key"),
    [
        ([{"tokens": ["a", "b"], "tags": ["O"]}], "tags.count", None),
        ([{"tokens": ["a b"], "tags": ["O"]}], "token.white_space", None),
        ([{"tokens": ["a"], "tags": "O"}], "cell.not_a_list", "data.columns.tags"),
        ([{"tokens": ["a"]}], "columns.missing", "data.columns.tags"),
        ([{"tokens": [f"a{row}"], "tags": ["O"]} for row in range(30)], "tags.none", "data.source"),
        ([{"words": ["a"]}], "columns.missing", "data.columns"),
        ([{"text": "a b", "spans": [{"start": 0, "end": 9, "label": "x"}]}], "span.outside", None),
        ([{"text": "a b", "spans": [{"start": 1, "end": 2, "label": "x"}]}], "span.words", None),
        ([{"text": "ab", "spans": [{"start": s, "end": 2, "label": "x"} for s in (0, 1)]}], "span.words", None),
        ([{"text": "a", "spans": [{"start": 0}]}], "span.shape", None),
        ([tokens(0)], "split.empty", "data.source"),
    ],
)
def test_rows_that_cannot_be_read_are_refused_with_their_line(
    tmp_path: Path, rows: list[dict[str, Any]], rule: str, key: str | None
) -> None:
    with refused(rule, key):
        prepared(tmp_path, rows)


def test_keys_of_other_tasks_are_refused(tmp_path: Path) -> None:
    with refused("task.unsupported", "data.columns.label"):
        prepared(tmp_path, [tokens(0)], "data.columns.label=kind")


LABELS = Tags(["city", "number"], "spaces").labels


def by_hand(rows: Sequence[Sequence[int]]) -> set[tuple[int, int, int, str]]:
    """Entities as conlleval finds them, from the names of the tags."""
    found = set()
    for row, tags in enumerate(rows):
        first, kind = 0, ""
        for place, name in enumerate([*(LABELS[tag] for tag in tags), "O"]):
            prefix, _, this = name.partition("-")
            if kind and (prefix != "I" or this != kind):
                found.add((row, first, place, kind))
                kind = ""
            if prefix != "O" and not kind:
                first, kind = place, this
    return found


def test_the_f1_counts_whole_entities_and_adds_up_over_batches() -> None:
    generator = np.random.default_rng(4)
    true, given = (generator.choice(5, (60, 9), p=[0.3, 0.2, 0.25, 0.15, 0.1]) for _ in range(2))
    given = np.where(generator.random(given.shape) < 0.8, true, given)
    expected, found = by_hand(true.tolist()), by_hand(given.tolist())
    assert 20 < len(expected & found) < len(expected)
    # Each second token is no word's first, and says something else.
    targets, outputs = torch.full((60, 18), IGNORED), torch.randn(60, 18, 5)
    targets[:, ::2] = torch.from_numpy(true)
    outputs[:, ::2] = torch.nn.functional.one_hot(torch.from_numpy(given), 5) * 9.0
    metric = EntityF1()
    sums = torch.stack([metric.sums(outputs[rows], targets[rows]) for rows in (slice(7), slice(7, 60), slice(0))]).sum(
        0
    )
    assert sums.tolist() == [len(expected & found), len(found), len(expected)]
    assert metric.value(sums) == pytest.approx(2 * len(expected & found) / (len(found) + len(expected)))


def test_the_loss_and_the_accuracy_count_words_alone(tmp_path: Path) -> None:
    data = prepared(tmp_path, list(map(tokens, range(20))))
    recipe = load_recipe(str(tmp_path / "recipe.yaml"))
    objective = objective_of(find_served_task(recipe.task), recipe.train, data)
    targets = torch.from_numpy(data.train.batch(range(6)).targets)
    outputs = torch.randn(*targets.shape, len(data.labels))
    loss = objective.mean(outputs, targets)
    noisy = torch.where((targets == IGNORED)[..., None], torch.randn_like(outputs), outputs)
    assert objective.mean(noisy, targets) == loss
    found = objective.values(objective.sums(outputs, targets))
    assert found["val_loss"] == pytest.approx(float(loss), rel=1e-6)
    words = targets != IGNORED
    assert found["val_accuracy"] == pytest.approx(float((outputs.argmax(-1) == targets)[words].double().mean()))


def test_entities_are_told_with_their_characters(tmp_path: Path) -> None:
    tags = Tags(["city", "number"], "letters")
    text, offsets = "To New York, 7 am!", [(0, 0), (0, 2), (3, 6), (7, 9), (9, 11), (11, 12), (13, 14)]
    logits = np.full((7, 5), -9.0, np.float32)
    for token, tag in enumerate([2, 0, 1, 2, 3, 0, 3]):  # tokens 0 and 4 begin no word
        logits[token, tag] = 9.0
    answer = tags.entities(text, logits, offsets)
    found = [(e["label"], e["start"], e["end"], e["text"]) for e in answer["entities"]]
    assert found == [("city", 3, 11, "New York"), ("number", 13, 14, "7")]
    assert answer["cut_at"] == 15
    assert all(entity["score"] > 0.99 for entity in answer["entities"])


def test_a_pretrained_encoder_gets_a_head_for_tokens(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "encoder")
    overrides = ["model.factory=null", f"model.pretrained={folder}", "model.args={}"]
    data = prepared(tmp_path, list(map(spans, range(20))), *overrides)
    recipe = load_recipe(str(tmp_path / "recipe.yaml"), overrides)
    model = blueprint_of(recipe.model, data.facts).model
    assert set(match_weights(model, str(folder)).fresh) == {"classifier.weight", "classifier.bias"}
    batch = data.train.batch([0, 1])
    output = model(**{name: torch.from_numpy(array) for name, array in batch.inputs.items()})
    assert output.logits.shape == (*batch.targets.shape, 3)


@pytest.mark.parametrize("one_in", [20, pytest.param(1, marks=pytest.mark.slow)])
def test_lines_of_code_have_the_spans_of_their_tokens(one_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read_fewer_files("_python_lines", one_in, monkeypatch)
    lines = list(BUILTIN_SPANS["python"]())
    assert len(lines) > 2000 / one_in
    kept = dict(lines)
    for text, found in list(kept.items())[:300]:
        for start, end, label in found:
            if label == "COMMENT":
                assert text[start] == "#"
            if label == "STRING":
                assert text[end - 1] in "'\""
