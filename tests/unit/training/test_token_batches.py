"""Batches that are filled up to a budget of padded tokens."""

from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from upath import UPath

from app.config import Recipe, load_recipe
from app.data.labelled import LabelledData
from app.storage import to_path
from app.tasks import load_prepared, prepare
from app.training.activity import Activity
from app.training.data.feed import Feed
from app.training.data.order import SampleOrder
from app.training.data.recipe_order import count_steps, order_of
from app.training.data.rules import batch_sizes
from app.training.plan import TrainingPlan
from app.training.session import train
from app.training.teacher import TaughtDataset
from app.training.worker import Worker, start_worker
from tests.helpers import ROOT
from tests.orders import batches_of, in_memory
from tests.wording import refused

REVIEWS, BUDGET = ROOT / "recipes/reviews.yaml", 2048
TOKENS = ["train.global_batch_size=null", f"train.tokens_per_batch={BUDGET}"]
LENGTHS = (np.random.default_rng(0).lognormal(3.3, 0.8, 3001).astype(np.int32) + 1).clip(max=256)


def token_order() -> SampleOrder:
    return in_memory(LENGTHS, None, budget=BUDGET, padded_lengths=LENGTHS)


def write_texts(folder: Path, count: int = 400) -> str:
    """Write texts of one to sixty words of three letters, of two classes."""
    generator = np.random.default_rng(1)
    rows = ["text,label"]
    for number in range(count):
        words = [f"{n:03d}" for n in generator.integers(1000, size=generator.integers(1, 60))]
        rows.append(f"{number} {' '.join(words)},{'ab'[number % 2]}")
    (folder / "texts.csv").write_text("\n".join(rows), encoding="utf-8")
    return f"data.source={folder / 'texts.csv'}"


def recipe_of(folder: Path, *overrides: str) -> Recipe:
    small = ["data.test_fraction=null", "train.workers=1", "train.linear_baseline=false", "train.epochs=2"]
    model = ["model.args={layers: 1, width: 16, heads: 2}", f"storage={folder / 'storage'}", "tune=null", "alerts=[]"]
    return load_recipe(REVIEWS, [write_texts(folder), *TOKENS, *small, *model, *overrides])


def test_an_epoch_has_every_sample_once_in_batches_within_the_budget() -> None:
    order = token_order()
    found = []
    for epoch in (1, 2):
        batches = batches_of(order, epoch)
        assert Counter(np.concatenate(batches).tolist()) == Counter(range(len(LENGTHS)))
        assert max(len(batch) * LENGTHS[batch].max() for batch in batches) <= BUDGET
        assert min(map(len, batches)) == order.min_samples(epoch) >= BUDGET // 256 // 2
        assert [len(batch) for batch in batches] == [order.batch_size(epoch, n) for n in range(len(batches))]
        found.append({tuple(sorted(batch.tolist())) for batch in batches})
    # Only the few samples of the rarest lengths meet each other again.
    assert len(found[0] & found[1]) < 0.05 * len(found[0])


def test_most_of_a_batch_is_no_padding() -> None:
    order = token_order()
    batches = batches_of(order, 1)
    padded = sum(len(batch) * int(LENGTHS[batch].max()) for batch in batches)
    assert LENGTHS.sum() / padded > 0.9
    assert padded / (len(batches) * BUDGET) > 0.85
    longest = [LENGTHS[batch].max() for batch in batches]
    assert abs(np.corrcoef(np.arange(len(longest)), longest)[0, 1]) < 0.3


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [
        ([2, 4, 8], [2, 4, 8]),
        ([1, 4, 8], [2, 4, 7]),  # a batch of long samples is filled up with shorter ones
        ([1, 0, 1], [2]),
        ([0, 0, 9], [5, 4]),  # eight and one would be a batch too small
        ([3, 5, 0], [2, 2, 4]),
        ([2, 1, 0], [2, 1]),
    ],
)
def test_batch_sizes_by_hand(counts: list[int], sizes: list[int]) -> None:
    assert batch_sizes(np.array(counts), np.array([8, 4, 2]), budget=16) == sizes


def test_every_sample_has_the_same_weight_on_any_number_of_workers(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "train.workers=2", "train.plan={micro_batch: 512}")
    data = prepare(recipe)
    order = order_of(recipe, data)
    for number in range(3):
        total, weights = np.zeros(len(data.train)), []
        for rank in (0, 1):
            layout = recipe.train.layout(2)
            assert (layout.gradient_accumulation, layout.micro_batch) == (2, 512)
            with closing(
                Feed(data, recipe.train, layout, Worker(rank, 2, torch.device("cpu")), Activity(), order)
            ) as feed:
                parts = [part for part, _ in feed._parts(1, number)]
                batches = list(feed.train(1, [number]))
            lengths = data.train.padded_lengths
            assert lengths is not None
            assert [len(batch.targets) for batch in batches] == [len(part) for part in parts]
            assert all(len(part) * lengths[part].max() <= 512 + 2 * lengths[part].max() for part in parts)
            for part, batch in zip(parts, batches, strict=True):
                assert batch.weight is not None
                total[part] += batch.weight / len(part)
                weights.append(batch.weight)
        assert np.allclose(total[order.batch(1, number)], total.sum() / order.batch_size(1, number))
        assert sum(weights) == pytest.approx(4.0)


def test_steps_are_counted_before_the_run_and_trained(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    data, worker = prepare(recipe), start_worker(recipe.train)
    order = order_of(recipe, data)
    ending = train(TrainingPlan.of(recipe, data), data, worker, UPath(tmp_path / "run"))
    assert ending.step == count_steps(recipe, order) == order.num_batches(1) + order.num_batches(2)
    assert [record.step for record in ending.records] == [order.num_batches(1), ending.step]


def test_samples_of_a_teacher_are_validated(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    data, worker = prepare(recipe), start_worker(recipe.train)
    assert isinstance(data, LabelledData)
    # Validation asks no teacher.
    taught: Any = TaughtDataset.of(data.train, "teacher/1", UPath(tmp_path))
    order = order_of(recipe, data)
    with closing(
        Feed(replace(data, train=taught), recipe.train, recipe.train.layout(1), worker, Activity(), order)
    ) as feed:
        assert sum(len(batch.targets) for batch in feed.validation()) == len(data.validation)


def test_lengths_are_kept_with_the_data(tmp_path: Path) -> None:
    for key in ([], ["data.shards={size: 5KB, window: 15KB}"]):
        recipe = recipe_of(tmp_path, *key)
        data = prepare(recipe)
        order = order_of(recipe, data)
        folder = to_path(tmp_path / f"saved{len(key)}")
        data.save(folder)
        kept: Any = load_prepared(recipe, folder).train
        assert "padded_lengths" in vars(kept)
        again = order_of(recipe, load_prepared(recipe, folder))
        assert np.array_equal(order.batch(2, 3), again.batch(2, 3))
        inputs = data.train.batch(order.batch(1, 0).tolist()).inputs["input_ids"]
        assert inputs.shape[1] == kept.padded_lengths[order.batch(1, 0)].max()


@pytest.mark.parametrize(
    ("keys", "rule", "key"),
    [
        (["train.tokens_per_batch=512"], "keys.contradict", "train"),
        (["train.global_batch_size=null"], "recipe.missing", "train"),
        ([*TOKENS, "train.workers=2", "train.plan={tensor: 2}"], "plan.cannot_run", "train.plan"),
    ],
)
def test_wrong_keys_are_refused(keys: list[str], rule: str, key: str) -> None:
    with refused(rule, key):
        load_recipe(REVIEWS, keys)


def test_a_budget_that_is_too_small_and_samples_without_tokens_are_refused(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "train.tokens_per_batch=200", "train.workers=[1, 4]")
    with refused("batch.too_small", "train.tokens_per_batch"):
        order_of(recipe, prepare(recipe))
    with refused("task.unsupported", "train.tokens_per_batch"):
        load_recipe(ROOT / "recipes/digits.yaml", TOKENS)
