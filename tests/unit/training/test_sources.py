"""Several sources: rows by weight, each read evenly, and what is measured of each."""

from collections import Counter
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from upath import UPath

from app.config import DataConfig, Recipe, load_recipe
from app.data.origins import Origins
from app.runs import Run
from app.tasks import load_prepared, prepare
from app.training.data.mixture import Mixture
from app.training.data.order import SampleOrder
from app.training.data.passes import Passes
from app.training.data.recipe_order import order_of
from app.training.records import EpochRecord
from app.training.run import prepare_run
from app.training.session import train
from app.training.worker import start_worker
from tests.helpers import ROOT, records_of
from tests.orders import batches_of, in_memory
from tests.wording import refused

SHARDS = "data.shards={size: 4096, window: 12KB}"
SIZES, BATCH = [600, 300, 100], 20
ORIGINS = np.repeat([0, 1, 2], SIZES).astype(np.int16)
LENGTHS = np.random.default_rng(0).integers(1, 100, sum(SIZES))


def mixed(shares: list[float], lengths: Any = LENGTHS) -> SampleOrder:
    mixture = Mixture(["a", "b", "c"], np.array(shares), Origins(ORIGINS, ORIGINS), len(ORIGINS))
    return in_memory(lengths, BATCH, seed=5, periods=[((1, 0), mixture)])


def seen_in(order: SampleOrder, *epochs: int) -> list[int]:
    return np.concatenate(batches_of(order, *epochs)).tolist()


def write_source(folder: Path, name: str, rows: int, text: str = "text", label: str = "label") -> Path:
    lines = [f"{name} {'w ' * (n % 9)}{n},{'xy'[n % 2]}" for n in range(rows)]
    (folder / f"{name}.csv").write_text("\n".join([f"{text},{label}", *lines]), encoding="utf-8")
    return folder / f"{name}.csv"


def recipe_of(folder: Path, sources: str, *overrides: str) -> Recipe:
    keys = ["data.test_fraction=null", "train.workers=1", "train.linear_baseline=false", "train.epochs=2", "alerts=[]"]
    model = ["model.args={layers: 1, width: 16, heads: 2}", f"storage={folder / 'storage'}", "tune=null"]
    given = ["data.source=null", f"data.sources={sources}", "train.global_batch_size=16", *overrides]
    return load_recipe(ROOT / "recipes/reviews.yaml", [*keys, *model, *given])


def two_sources(folder: Path, weights: tuple[float, float] | None = None) -> str:
    """Write two sources, the second one with other columns, and return the key."""
    big, small = write_source(folder, "big", 300), write_source(folder, "small", 60, "review", "stars")
    first, second = (f", weight: {weight}" for weight in weights) if weights else ("", "")
    columns = "columns: {input: review, label: stars}"
    return f"[{{source: {big}{first}}}, {{source: {small}, name: little, {columns}{second}}}]"


def test_rows_of_each_source_are_exactly_by_weight() -> None:
    order = mixed([0.5, 0.2, 0.3])
    for epoch in (1, 2, 3):
        rows = seen_in(order, epoch)
        assert np.bincount(ORIGINS[rows]).tolist() == [500, 200, 300]
    equal = mixed([0.5, 0.2, 0.3], np.ones(1000, int))
    # Without lengths to sort by, each batch has its share.
    assert {tuple(np.bincount(ORIGINS[equal.batch(1, number)])) for number in range(50)} == {(10, 4, 6)}


def test_each_source_is_read_evenly_over_the_epochs() -> None:
    order = mixed([0.5, 0.2, 0.3])
    counts = Counter(seen_in(order, 1, 2, 3))
    for place, times in enumerate(([2, 3], [2], [9])):  # 1,500 of 600, 600 of 300 and 900 of 100 rows
        assert sorted({counts[row] for row in np.flatnonzero(place == ORIGINS).tolist()}) == times
    natural = Counter(seen_in(mixed([0.6, 0.3, 0.1]), 1))
    assert set(natural.values()) == {1}
    assert len(natural) == sum(SIZES)


def test_temperature_raises_the_share_of_small_sources(tmp_path: Path) -> None:
    shares = []
    for temperature in (1.0, 2.0, 1e9):
        recipe = recipe_of(tmp_path, two_sources(tmp_path), f"data.temperature={temperature}")
        mixture = Mixture.of(recipe.data, prepare(recipe))
        assert mixture is not None
        assert mixture.names == ["big", "little"]
        shares.append(float(mixture.shares[1]))
    size = 60 / 300
    assert shares == pytest.approx([size / (1 + size), size**0.5 / (1 + size**0.5), 0.5], abs=0.02)


def test_a_run_measures_each_source(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, two_sources(tmp_path, (1.0, 3.0)), SHARDS)
    plan, data = prepare_run(Run.start("train", recipe))
    data.save(UPath(tmp_path / "data"))
    folder = tmp_path / "run"
    kept = load_prepared(recipe, UPath(tmp_path / "data"))
    ending = train(plan, kept, start_worker(recipe.train), UPath(folder))
    record = ending.records[-1]
    steps = ending.records[0].step
    assert record.source_samples == {"big": steps * 4, "little": steps * 12}
    origins = data.origins  # type: ignore[attr-defined]
    shares = np.bincount(origins.validation) / len(origins.validation)
    parts = record.metrics["val_loss_big"], record.metrics["val_loss_little"]
    assert record.val_loss == pytest.approx(float(shares @ parts), rel=1e-5)
    written = [EpochRecord.model_validate(line) for line in records_of(folder) if "val_loss" in line]
    assert written[-1].source_samples == record.source_samples
    assert written[-1].metrics.keys() >= {"val_loss_big", "val_loss_little"}


def test_blocks_of_documents_have_one_source_each(tmp_path: Path) -> None:
    for name, count in (("prose", 40), ("code", 10)):
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number}.txt").write_text(f"{name} {number} " * 50, encoding="utf-8")
    keys = [f"data.sources=[{{source: {tmp_path}/prose}}, {{source: {tmp_path}/code, name: c}}]", "data.source=null"]
    keys += ["data.tokenizer={kind: bytes}", "data.block_length=32", f"storage={tmp_path / 'storage'}"]
    recipe = load_recipe(ROOT / "recipes/stdlib_gpt.yaml", keys)
    data = prepare(recipe)
    for origins, split in ((data.origins.train, data.train), (data.origins.validation, data.validation)):  # type: ignore[attr-defined]
        assert len(origins) == len(split)
        texts = [data.tokenizer.decode(ids.tolist()) for ids in split.batch(range(len(split))).inputs["input_ids"]]  # type: ignore[attr-defined]
        assert [("code" in text, "prose" in text) for text in texts] == [(bool(place), not place) for place in origins]
    data.save(UPath(tmp_path / "saved"))
    assert np.array_equal(load_prepared(recipe, UPath(tmp_path / "saved")).origins.train, data.origins.train)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("sources", "keys", "rule"),
    [
        ("[{source: a.csv}, {source: b/a.csv}]", [], "names.twice"),
        ("[{source: a.csv, weight: 1}, {source: b.csv}]", [], "weights.some"),
        ("[{source: a.csv, weight: 1}]", ["data.temperature=2.0"], "keys.contradict"),
        ("[{source: a.csv}]", ["data.source=c.csv"], "keys.contradict"),
        ("[]", ["data.source=c.csv", "data.temperature=2.0"], "keys.contradict"),
    ],
)
def test_wrong_keys_are_refused(tmp_path: Path, sources: str, keys: list[str], rule: str) -> None:
    with refused(rule, "data"):
        recipe_of(tmp_path, sources, *keys)


def test_a_source_that_cannot_be_read_or_has_nothing_is_named(tmp_path: Path) -> None:
    big = write_source(tmp_path, "big", 100)
    with refused("source.missing"):
        prepare(recipe_of(tmp_path, f"[{{source: {big}}}, {{source: {tmp_path}/nowhere.csv}}]"))
    other = write_source(tmp_path, "other", 100, text="words")
    with refused("columns.missing", "data.columns.input"):
        prepare(recipe_of(tmp_path, f"[{{source: {big}}}, {{source: {other}}}]"))
    copied = tmp_path / "copied.csv"
    copied.write_bytes(big.read_bytes())
    with refused("split.empty", "data.sources"):
        prepare(recipe_of(tmp_path, f"[{{source: {big}}}, {{source: {copied}}}]"))
    rare = recipe_of(tmp_path, two_sources(tmp_path, (1.0, 1e-6)))
    with refused("source.never_drawn", "data.sources"):
        prepare_run(Run.start("train", rare))


def sharded_recipe(folder: Path, *overrides: str) -> Recipe:
    return recipe_of(folder, two_sources(folder, (3.0, 1.0)), SHARDS, *overrides)


def test_windows_of_shards_have_the_same_part_of_each_source(tmp_path: Path) -> None:
    recipe = sharded_recipe(tmp_path, "data.shards.window=3KB")
    data = prepare(recipe)
    mixture = Mixture.of(recipe.data, data)
    assert mixture is not None
    texts = [text.split()[0] for text in data.train.split.inputs]  # type: ignore[attr-defined]
    assert [mixture.names[place] for place in mixture.origins.train] == [{"small": "little"}.get(t, t) for t in texts]
    order = order_of(recipe, data)
    batches = order.num_batches(1)
    counts = Counter[int]()
    starts = order.periods[0].starts(1).tolist()
    assert len(starts) > 3
    for epoch, (first, last) in product((1, 2, 3, 4), pairwise(starts)):
        rows = np.concatenate([order.batch(epoch, number) for number in range(first, last)])
        assert np.bincount(mixture.origins.train[rows]).tolist() == [12 * (last - first), 4 * (last - first)]
        counts.update(rows.tolist())
    for place in (0, 1):
        seen = [counts[row] for row in np.flatnonzero(mixture.origins.train == place).tolist()]
        assert max(seen) - min(seen) <= 1
    assert order.source_samples(2, range(batches)) == {"big": 12 * batches, "little": 4 * batches}


def test_weights_change_no_shards(tmp_path: Path) -> None:
    sources = two_sources(tmp_path, (3.0, 1.0))
    recipes = [recipe_of(tmp_path, given, SHARDS) for given in (sources, sources.replace("weight: 3.0", "weight: 1.0"))]
    first, other = (prepare(recipe).reference.location for recipe in recipes)  # type: ignore[attr-defined]
    assert first == other


def test_a_stored_recipe_has_its_sources(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, two_sources(tmp_path))
    assert DataConfig.model_validate_json(recipe.data.model_dump_json()) == recipe.data
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


@pytest.mark.parametrize("sizes", [[5], [1, 4, 1, 3, 1], [1] * 6])
def test_rows_are_the_same_however_few_are_read_at_a_time(sizes: list[int]) -> None:
    """A source with a small share gives one row to each window."""
    samples: Any = SimpleNamespace(shard_rows=sizes, first_rows=np.cumsum([0, *sizes]))
    passes = Passes(samples, np.arange(len(sizes)), (3, 0), sum(sizes) - 1)
    count = 3 * (sum(sizes) - 1)
    whole = passes.rows(0, count).tolist()
    for step in (1, 2, 3):
        parts = [passes.rows(first, min(first + step, count)) for first in range(0, count, step)]
        assert np.concatenate(parts).tolist() == whole
    assert len(set(whole[: sum(sizes) - 1])) == sum(sizes) - 1
