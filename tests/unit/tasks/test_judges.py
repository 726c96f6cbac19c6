"""Judges of tasks beside texts and tables: planted models at chance, no better than a simple one, and good."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from app.config import Recipe, load_recipe
from app.data.images import encode_png
from app.data.labelled import LabelledData
from app.data.pairs import PairData
from app.data.prepared import IGNORED, PreparedData
from app.tasks import find_task, prepare
from app.tasks.judgement import Judge, Predictions
from app.telemetry.judgement import Judgement
from tests.helpers import ROOT

VOCABULARY = "abcdefgh"
FIRST = 65
"""The token of its first letter."""


def recipe_of(folder: Path, recipe: str, rows: str, *keys: str) -> Recipe:
    """Return a recipe of the repository with other rows."""
    file = folder / "rows.jsonl"
    file.write_text(rows, encoding="utf-8")
    given = [f"data.source={file}", f"storage={folder}", "tune=null", *keys]
    return load_recipe(str(ROOT / f"recipes/{recipe}.yaml"), given)


def judge_of(recipe: Recipe, data: PreparedData) -> Judge:
    judge = find_task(recipe.task).judge(recipe, data)
    assert judge
    return judge


def walk(random: np.random.Generator, length: int) -> str:
    """Return letters of which each mostly gives the next one."""
    steps = np.where(random.random(length) < 0.9, 1, random.integers(len(VOCABULARY), size=length))
    return "".join(VOCABULARY[place] for place in np.cumsum(steps) % len(VOCABULARY))


def documents(folder: Path) -> tuple[Judge, Any]:
    random = np.random.default_rng(0)
    rows = "\n".join(json.dumps({"text": walk(random, 400)}) for _ in range(60))
    recipe = recipe_of(folder, "stdlib_gpt", rows, "data.tokenizer={kind: bytes}", "data.block_length=16")
    data = prepare(recipe)
    return judge_of(recipe, data), data


def say(data: Any, share: Sequence[float], certainty: float) -> Iterator[Predictions]:
    """Yield logits of a model that expects the next letter with a certainty, or else the shares of all letters."""
    for first in range(0, len(data), 32):
        batch = data.batch(range(first, min(first + 32, len(data))))
        inputs = torch.from_numpy(batch.inputs["input_ids"])
        expected = functional.one_hot((inputs - FIRST + 1) % 8 + FIRST, 257) * certainty
        yield Predictions(torch.log(expected + (1 - certainty) * torch.tensor(share)), torch.from_numpy(batch.targets))


def test_a_language_model_is_compared_with_the_unigram_model(tmp_path: Path) -> None:
    judge, data = documents(tmp_path)
    held, learned = data.validation, data.train
    counts = 1.0 + np.bincount(learned.batch(range(len(learned))).targets.ravel(), minlength=257)
    share = (counts / counts.sum()).astype(np.float32)
    targets = held.batch(range(len(held))).targets
    unigram = float(np.exp(-np.log(share[targets]).mean()))

    def judged(certainty: float, trained: float = 0.0) -> Judgement:
        made = list(say(held, share, certainty))
        total = torch.stack([judge.metric.sums(part.outputs, part.targets).double() for part in made]).sum(0)
        of_training = say(learned, share, trained) if trained else ()
        return judge.judge("validation", held, judge.metric.value(total), made, of_training)

    chance = judged(0.0)
    assert chance.trivial
    assert chance.trivial.value == pytest.approx(unigram, rel=1e-6)
    assert chance.value == pytest.approx(unigram, rel=1e-4)
    assert chance.findings == ["chance"]
    assert f"not significantly better than the unigram model {unigram:.3f}" in chance.verdict
    good = judged(0.85, trained=0.85)
    assert good.findings == []
    assert good.low < good.value < good.high < unigram
    assert good.is_above_baselines
    # In perplexity it loses a fifth of its gain, in nats more than a third.
    overfit = judged(0.3, trained=0.9)
    assert overfit.findings == ["overfit"]


def test_tokens_that_do_not_count_are_in_no_unigram_model(tmp_path: Path) -> None:
    judge, data = documents(tmp_path)
    batch = type(data.train).batch
    masked = {id(data.train): 0, id(data.validation): 1}

    class Masked:
        """Blocks of which every other target does not count."""

        def __init__(self, blocks: Any) -> None:
            self.blocks, self.shards, self.places = blocks, blocks.shards, masked[id(blocks)]

        def __len__(self) -> int:
            return len(self.blocks)

        def batch(self, indices: Sequence[int]) -> Any:
            found = batch(self.blocks, indices)
            targets = found.targets.copy()
            targets[:, ::2] = IGNORED
            return type(found)(found.inputs, targets)

    held: Any = Masked(data.validation)
    found = judge.judge("validation", held, 3.0, ())
    counts = 1.0 + np.bincount(data.train.batch(range(len(data.train))).targets.ravel(), minlength=257)
    counted = data.validation.batch(range(len(data.validation))).targets[:, 1::2]
    assert found.trivial
    assert found.trivial.value == pytest.approx(float(np.exp(-np.log((counts / counts.sum())[counted]).mean())))
    assert math.isnan(found.low)


def tagged(folder: Path) -> tuple[Judge, LabelledData]:
    """Return texts in which a city is one only after "to", and "rome" is always one."""
    random, rows = np.random.default_rng(0), []
    for number in range(800):
        is_place = bool(random.random() < 0.5)
        words = [f"w{number}", "to" if is_place else "by", "paris", "and", "rome" if number % 3 else "home"]
        tags = ["O", "O", "B-city" if is_place else "O", "O", "B-city" if number % 3 else "O"]
        rows.append(json.dumps({"tokens": words, "tags": tags}))
    recipe = recipe_of(folder, "python_tokens", "\n".join(rows), "data.buckets=[16]", "data.clean.near_duplicates=null")
    data = prepare(recipe)
    assert isinstance(data, LabelledData)
    return judge_of(recipe, data), data


def test_a_tagger_is_compared_with_one_tag_for_all_and_one_for_each_word(tmp_path: Path) -> None:
    judge, data = tagged(tmp_path)
    rows = range(len(data.validation))
    targets = torch.from_numpy(data.validation.batch(rows).targets)
    words = [str(text).split() for text in data.validation.split.take(rows)[0]]

    def judged(chosen: Sequence[Sequence[int]]) -> Judgement:
        outputs = torch.zeros(*targets.shape, data.targets.num_outputs)
        for row, tags in enumerate(chosen):
            outputs[row][targets[row] != IGNORED] = functional.one_hot(torch.tensor(tags), 3).float()
        value = judge.metric.of(outputs, targets)
        return judge.judge("validation", data.validation, value, [Predictions(outputs, targets)])

    nothing = judged([[0] * 5 for _ in words])
    assert nothing.findings == ["chance"]
    assert "not significantly better than the most frequent tag O 0.000" in nothing.verdict
    by_word = judged([[0, 0, 0, 0, int(text[4] == "rome")] for text in words])
    assert by_word.findings == ["linear"]
    assert "not significantly better than the most frequent tag of each word" in by_word.verdict
    good = judged([[0, 0, int(text[1] == "to"), 0, int(text[4] == "rome")] for text in words])
    assert good.value == 1.0
    assert good.findings == []
    assert good.linear
    assert 0.5 < good.linear.value < 0.95


@pytest.mark.parametrize("shares_words", [True, False])
def test_an_embedding_is_compared_with_what_two_texts_share(tmp_path: Path, shares_words: bool) -> None:
    random = np.random.default_rng(0)
    names = ["".join(random.choice(list("abcdefghijk"), 8)) for _ in range(900)]
    others = names if shares_words else ["".join(random.choice(list("uvwxyz"), 8)) for _ in range(900)]
    rows = [{"anchor": f"{one}?", "positive": f"{other}."} for one, other in zip(names, others, strict=True)]
    recipe = recipe_of(tmp_path, "docstrings", "\n".join(map(json.dumps, rows)), "data.clean.min_length=1")
    data = prepare(recipe)
    assert isinstance(data, PairData)
    judge, pairs = judge_of(recipe, data), len(data.validation.pairs)
    chance, good = (judge.judge("validation", data.validation, value, ()) for value in (1 / pairs, 0.97))
    assert (chance.rows, chance.findings[0]) == (pairs, "chance")
    assert "not significantly better than a random order 0.01" in chance.verdict
    assert good.linear
    assert good.linear.value == pytest.approx(1.0 if shares_words else 0.0, abs=0.05)
    assert good.findings == (["linear"] if shares_words else [])
    assert ("not significantly better than the baseline of character n-grams" in good.verdict) == shares_words


def pictures(random: np.random.Generator, count: int, is_linear: bool) -> tuple[list[bytes], list[str]]:
    """Return pictures of two spots: whether the first is bright, or whether both are alike."""
    spots = random.integers(2, size=(count, 2))
    levels = random.integers(60, size=(count, 8, 8)) + 60
    levels[:, :4, :4] += 100 * spots[:, 0, None, None]
    levels[:, 4:, 4:] += 100 * spots[:, 1, None, None]
    labels = spots[:, 0] if is_linear else spots[:, 0] ^ spots[:, 1]
    return [encode_png(picture.astype(np.uint8)) for picture in levels], [f"label{label}" for label in labels]


@pytest.mark.parametrize("is_linear", [True, False])
def test_a_model_of_pictures_is_compared_with_a_linear_one(tmp_path: Path, is_linear: bool) -> None:
    for number, (content, label) in enumerate(zip(*pictures(np.random.default_rng(0), 1200, is_linear), strict=True)):
        (tmp_path / "images" / label).mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / label / f"{number}.png").write_bytes(content)
    keys = [f"data.source={tmp_path / 'images'}", f"storage={tmp_path}", "tune=null"]
    recipe = load_recipe(str(ROOT / "recipes/digits.yaml"), keys)
    data = prepare(recipe)
    assert isinstance(data, LabelledData)
    judge, held = judge_of(recipe, data), data.validation
    targets = torch.tensor(held.split.classes)

    def judged(outputs: Tensor) -> Judgement:
        return judge.judge("validation", held, judge.metric.of(outputs, targets), [Predictions(outputs, targets)])

    right, constant = functional.one_hot(targets, 2).float(), torch.tensor([[1.0, 0.0]]).expand(len(targets), 2)
    good = judged(right)
    assert good.linear
    assert good.linear.value == pytest.approx(1.0 if is_linear else 0.5, abs=0.1)
    assert good.findings == (["linear"] if is_linear else [])
    assert judged(constant).findings[0] == "chance"
