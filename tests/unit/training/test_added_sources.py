"""A resumed run with other weights or an added source: samples that were read are not repeated."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from upath import UPath

from app.artifacts import DATA
from app.config import Recipe, load_recipe
from app.data.origins import Origins
from app.runs import Run
from app.tasks import load_prepared, prepare
from app.training.data.mixture import Mixture, recorded_periods
from app.training.data.order import SampleOrder
from app.training.data.ranks import DataRank
from app.training.data.recipe_order import count_steps, order_of
from app.training.difficulty import recorded_difficulty
from app.training.plan import TrainingPlan
from app.training.records import Ending
from app.training.resume import start_or_resume
from app.training.run import open_run, prepare_run
from app.training.session import train
from app.training.stop_request import StopRequest
from app.training.worker import start_worker
from tests.helpers import ROOT
from tests.orders import in_memory
from tests.unit.training.test_sources import recipe_of, write_source
from tests.wording import refused

SIZES, BATCH = [600, 300, 100], 20
ORIGINS = np.repeat([0, 1, 2], SIZES).astype(np.int16)
LENGTHS = np.random.default_rng(0).integers(1, 100, sum(SIZES))
SHARDS = "data.shards={size: 4096, window: 12KB}"
Places = list[tuple[int, int]]


def mixed(window_rows: int, *periods: tuple[tuple[int, int], list[float]]) -> SampleOrder:
    """Return an order over the first few of three sources, with these shares from each of these batches on."""
    origins = Origins(ORIGINS, ORIGINS)
    mixtures = [
        (start, Mixture(["a", "b", "c"][: len(shares)], np.array(shares), origins, window_rows))
        for start, shares in periods
    ]
    return in_memory(LENGTHS, BATCH, seed=5, periods=mixtures)


def places_of(order: SampleOrder, epochs: int) -> Places:
    return [(epoch, number) for epoch in range(1, epochs + 1) for number in range(order.num_batches(epoch))]


def times_read(order: SampleOrder, places: Places) -> Counter[int]:
    return Counter(row for at in places for row in order.batch(*at).tolist())


@pytest.mark.parametrize(
    "periods",
    [
        [((1, 0), [0.5, 0.5]), ((2, 17), [0.5, 0.2, 0.3])],
        [((1, 0), [0.7, 0.3]), ((2, 0), [0.2, 0.8])],
        [((1, 0), [0.5, 0.5]), ((1, 9), [0.1, 0.9]), ((1, 30), [0.6, 0.4]), ((3, 5), [0.4, 0.3, 0.3])],
    ],
    ids=["one-more-source", "other-weights", "several-times"],
)
@pytest.mark.parametrize("window_rows", [1000, 130])
def test_every_source_goes_on_where_it_was(
    window_rows: int, periods: list[tuple[tuple[int, int], list[float]]]
) -> None:
    order, places = mixed(window_rows, *periods), places_of(mixed(window_rows, *periods), 5)
    before = mixed(window_rows, *periods[:-1])
    start, shares = periods[-1]
    assert all(np.array_equal(order.batch(*at), before.batch(*at)) for at in places if at < start)
    seen = times_read(order, places)
    for place in range(len(shares)):
        times = [seen[row] for row in np.flatnonzero(place == ORIGINS).tolist()]
        assert max(times) - min(times) <= 1
    samples = [order.source_samples(epoch, range(order.num_batches(epoch))) for epoch in (4, 5)]
    total = order.num_batches(4) * BATCH
    assert samples == [dict(zip("abc", (round(share * total) for share in shares), strict=False))] * 2
    # The current epoch keeps its length, and later ones cover all sources.
    assert order.num_batches(start[0]) == before.num_batches(start[0])
    assert order.num_batches(5) == sum(SIZES[: len(shares)]) // BATCH


def write_sources(folder: Path, weights: Sequence[float]) -> str:
    """Write sources of 300, 60 and 120 rows, and return the key for as many as there are weights."""
    files = [write_source(folder, name, rows) for name, rows in (("big", 300), ("small", 60), ("late", 120))]
    given = [f"{{source: {file}, weight: {weight}}}" for file, weight in zip(files, weights, strict=False)]
    return f"[{', '.join(given)}]"


def started(recipe: Recipe) -> tuple[Run, Any]:
    run = start_or_resume("train", recipe)
    plan, data = prepare_run(run)
    open_run(run, plan, data)
    return run, load_prepared(run.recipe, run.folder / DATA)


def trained(run: Run, data: Any, stops: bool = False) -> Ending:
    """Train to the end, or to the first checkpoint."""
    try:
        poll = (lambda: StopRequest.STOP) if stops else None
        plan = TrainingPlan.of(run.recipe, data, recorded_periods(run.folder))
        return train(plan, data, start_worker(run.recipe.train), run.folder, poll_stop_request=poll)
    finally:
        run.until_result.close()


@pytest.mark.parametrize("keys", [[], [SHARDS]], ids=["memory", "shards"])
def test_weights_may_change_in_a_run(tmp_path: Path, keys: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    every = [*keys, "train.checkpoint.every_steps=5"]
    run, data = started(recipe_of(tmp_path, write_sources(tmp_path, (3.0, 1.0)), *every))
    step = trained(run, data, stops=True).step
    recipe = recipe_of(tmp_path, write_sources(tmp_path, (1.0, 1.0)), *every, f"train.resume={run.run_id}")
    run, data = started(recipe)
    assert f"data.sources from batch {step} of epoch 1 on: big 50.0%, small 50.0%" in capsys.readouterr().out
    records = trained(run, data).records
    batches = records[0].step
    parts = {"big": step * 12 + (batches - step) * 8, "small": step * 4 + (batches - step) * 8}
    assert sum(records[0].source_samples.values()) == batches * 16
    # A window under way has the sources in any of its batches.
    assert all(abs(count - parts[name]) <= 16 for name, count in records[0].source_samples.items())
    assert records[1].source_samples == {"big": batches * 8, "small": batches * 8}
    order = order_of(run.recipe, data, periods=recorded_periods(run.folder))
    assert records[-1].step == count_steps(run.recipe, order)


def order_in(run: Run, data: Any) -> SampleOrder:
    """The order in which the run reads its samples from now on."""
    hard = recorded_difficulty(run.recipe, data, run.folder) if run.recipe.train.curriculum else None
    return order_of(run.recipe, data, hard, recorded_periods(run.folder))


@pytest.mark.parametrize("keys", [[], ["train.curriculum={epochs: 2}"]], ids=["shuffled", "curriculum"])
def test_a_source_may_be_added_to_a_run_on_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: list[str]
) -> None:
    every = [*keys, SHARDS, "train.checkpoint.every_steps=5", "train.epochs=3"]
    run, data = started(recipe_of(tmp_path, write_sources(tmp_path, (3.0, 1.0)), *every))
    before = order_in(run, data)
    step, labels = trained(run, data, stops=True).step, data.labels
    recipe = recipe_of(tmp_path, write_sources(tmp_path, (2.0, 1.0, 1.0)), *every, f"train.resume={run.run_id}")
    run, data = started(recipe)
    assert (
        f"data.sources from batch {step} of epoch 1 on: big 50.0%, small 25.0%, late 25.0%" in capsys.readouterr().out
    )
    assert (data.labels, len(data.train)) == (labels, len(prepare(recipe).train))
    records = trained(run, data).records

    order = order_in(run, data)
    places, origins = places_of(order, 3), data.origins.train
    assert records[-1].step == len(places)
    batches = records[0].step
    seen = records[0].source_samples
    assert (seen["late"], sum(seen.values())) == ((batches - step) * 4, batches * 16)
    assert abs(seen["small"] - batches * 4) <= 16
    assert {"val_loss_big", "val_loss_small", "val_loss_late"} <= records[-1].metrics.keys()
    assert all(np.array_equal(order.batch(*at), before.batch(*at)) for at in places if at < (1, step))
    seen_rows = times_read(order, places)
    for place in range(3):
        times = [seen_rows[row] for row in np.flatnonzero(origins == place).tolist()]
        assert max(times) - min(times) <= 1
    again = order_in(run, data)
    for at in ((1, step), (2, 3)):
        shares = [again.share(*at, DataRank(rank, 4)) for rank in range(4)]
        assert sorted(np.concatenate(shares)) == sorted(order.batch(*at))
    assert [period.start for period in recorded_periods(run.folder)] == [(1, 0), (1, step)]


@pytest.mark.parametrize("tokenizer", ["{kind: bytes}", "{kind: bpe, vocab_size: 300}"])
def test_documents_may_be_added_if_the_tokenizer_stays(tmp_path: Path, tokenizer: str) -> None:
    names = ("prose", "code", "letters")
    for name in names:
        (tmp_path / name).mkdir()
        for number in range(30):
            text = f"{name} {number} {'abc' * number} " * 60
            (tmp_path / name / f"{number}.txt").write_text(text, encoding="utf-8")
    found: list[Any] = []
    for count in (2, 3):
        given = ", ".join(f"{{source: {tmp_path}/{name}}}" for name in names[:count])
        keys = [f"data.sources=[{given}]", "data.source=null", f"data.tokenizer={tokenizer}", SHARDS]
        keys += ["data.block_length=32", f"storage={tmp_path / 'storage'}"]
        found.append(prepare(load_recipe(ROOT / "recipes/stdlib_gpt.yaml", keys)))
    data, prepared = found
    if "bpe" in tokenizer:
        with refused("sources.fixed", "data.sources"):
            data.grown(prepared)
        return
    grown = data.grown(prepared)
    rows = range(len(data.train))
    assert np.array_equal(grown.train.batch(rows).inputs["input_ids"], data.train.batch(rows).inputs["input_ids"])
    assert np.bincount(grown.origins.train).tolist()[:2] == np.bincount(data.origins.train).tolist()


def test_what_cannot_be_added_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    every = ["train.checkpoint.every_steps=5"]
    run, data = started(recipe_of(tmp_path, write_sources(tmp_path, (3.0, 1.0)), *every))
    trained(run, data, stops=True)
    more = write_sources(tmp_path, (2.0, 1.0, 1.0))
    resumed = [*every, f"train.resume={run.run_id}"]
    with refused("resume.differs", "train.resume"):
        start_or_resume("train", recipe_of(tmp_path, f"[{{source: {tmp_path}/big.csv}}]", *resumed))
    lines = (tmp_path / "late.csv").read_text(encoding="utf-8")
    (tmp_path / "late.csv").write_text(lines.replace(",x", ",z"), encoding="utf-8")
    with refused("labels.unknown"):
        prepare_run(start_or_resume("train", recipe_of(tmp_path, more, *resumed)))
    (tmp_path / "late.csv").write_text(lines, encoding="utf-8")
    big = (tmp_path / "big.csv").read_text(encoding="utf-8")
    (tmp_path / "big.csv").write_text(big.replace("big w", "huge w"), encoding="utf-8")
    with refused("source.changed", "data.sources"):
        prepare_run(start_or_resume("train", recipe_of(tmp_path, more, *resumed)))
    assert [period.names for period in recorded_periods(run.folder)] == [["big", "small"]]
    assert not (UPath(run.folder) / DATA / "grown").exists()


def test_a_run_that_another_job_has_trained_on_since_it_was_planned_is_refused(tmp_path: Path) -> None:
    every = "train.checkpoint.every_steps=5"
    run, data = started(recipe_of(tmp_path, write_sources(tmp_path, (3.0, 1.0)), every))
    trained(run, data, stops=True)
    resume = f"train.resume={run.run_id}"
    late = start_or_resume("train", recipe_of(tmp_path, write_sources(tmp_path, (1.0, 1.0)), every, resume))
    plan, prepared = prepare_run(late)
    run, data = started(recipe_of(tmp_path, write_sources(tmp_path, (3.0, 1.0)), every, resume))
    trained(run, data, stops=True)
    before = (run.folder / "config.yaml").read_bytes()
    with late.until_result, refused("run.went_on"):
        open_run(late, plan, prepared)
    assert (run.folder / "config.yaml").read_bytes() == before
