"""Cascades: the rule, what it promises, and which stage answers which row."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from upath import UPath

from app.config import CascadeConfig, ImageConfig, load_recipe
from app.data.classification import LabelledDataset
from app.data.examples import Split
from app.data.images import ImageProcessor, encode_png
from app.engines.base import PooledEngine, Signature
from app.errors import DataError, RayloomError, RecipeError, StorageError
from app.repository.manifest import Manifest
from app.repository.repository import Repository
from app.serving.cascade.calibration import calibrate, required_right_answers
from app.serving.cascade.cascade import Cascade, Stage
from app.serving.cascade.interface import Interface
from app.serving.cascade.rule import CascadeRule, max_probability
from app.serving.cascade.versions import calibrated, find_version
from app.serving.model import LoadedModel
from app.tensors import OUTPUT, Tensor, Tensors, TensorSpec
from tests.helpers import ROOT
from tests.publishing import CARD, files_in

REVIEWS = ROOT / "recipes/reviews.yaml"
Logits = NDArray[np.float64]


def logits_of(right: NDArray[np.bool_]) -> Logits:
    """Of two labels, the first being right: the earlier a row, the surer the answer."""
    sureness = np.linspace(9.0, 1.0, len(right))
    return np.stack([np.where(right, sureness, 0.0), np.where(right, 0.0, sureness)], axis=1)


def first_label(num_rows: int) -> NDArray[np.int64]:
    return np.zeros(num_rows, np.int64)


def rows_right(num_rows: int, *wrong: slice) -> NDArray[np.bool_]:
    right = np.ones(num_rows, np.bool_)
    for each in wrong:
        right[each] = False
    return right


def noisy(rng: np.random.Generator, num_rows: int, noises: tuple[float, ...]) -> list[Logits]:
    """Stages that see the same evidence for the first of two labels through noise of their own."""
    evidence = rng.normal(1.9, 1.55, num_rows)
    seen = [evidence + noise * rng.normal(size=num_rows) for noise in noises]
    return [np.stack([each, -each], axis=1) for each in seen]


def test_rows_go_early_as_far_as_nothing_is_lost() -> None:
    small, large = logits_of(rows_right(1000, slice(600, None))), logits_of(rows_right(1000))
    rule = calibrate([small, large], first_label(1000), costs=[1.0, 10.0], floor=0.99)
    assert rule.thresholds == (max_probability(small)[599],)
    assert rule.expected_shares == (0.6, 0.4)
    assert rule.expected_accuracy == 1.0
    assert rule.expected_compute == pytest.approx(1 / 10 + 0.4)
    assert (rule.samples, rule.floor, rule.used) == (1000, 0.99, [0, 1])


@pytest.mark.parametrize(
    ("lost", "gained", "share"),
    # With nothing gained v is 9.9, so that z is (10 - lost) / 3.146: 1.907 with 4, 1.589 with 5, and 1.645 is needed.
    # With one gained v is 11.19 and z is 6 / 3.345 = 1.794 with 5 lost, 5 / 3.34 = 1.497 with 6.
    [(4, 0, 0.5), (5, 0, 0.0), (5, 1, 0.5), (6, 1, 0.0)],
)
def test_so_many_may_be_lost_and_not_one_more(lost: int, gained: int, share: float) -> None:
    num_rows = 1000 + gained
    small = rows_right(num_rows, slice(lost), slice(int(0.525 * num_rows), None))
    large = rows_right(num_rows, slice(20, 20 + gained))
    rule = calibrate([logits_of(small), logits_of(large)], first_label(num_rows), costs=[1.0, 10.0], floor=0.99)
    assert rule.expected_shares[0] == pytest.approx(share, abs=1e-3)
    assert rule.expected_accuracy == pytest.approx((1000 - lost + gained) / 1000 if share else 1.0)


@pytest.mark.parametrize("costs", [[1.0, 10.0], [9.0, 10.0]])
def test_a_rule_that_saves_nothing_sends_every_row_to_the_last_stage(costs: list[float]) -> None:
    """Since the first stage is wrong where it is sure, or since asking it costs more than it saves."""
    wrong = slice(0, 1000) if costs[0] == 1.0 else slice(100, None)
    stages = [logits_of(rows_right(1000, wrong)), logits_of(rows_right(1000))]
    rule = calibrate(stages, first_label(1000), costs, floor=0.99)
    assert (rule.thresholds, rule.used, rule.expected_shares) == ((None,), [1], (0.0, 1.0))
    assert (rule.expected_accuracy, rule.expected_compute) == (1.0, 1.0)
    assert "no threshold saves anything" in str(rule)


def test_a_stage_that_does_not_pay_is_not_run() -> None:
    useless, good = logits_of(rows_right(1000, slice(None))), logits_of(rows_right(1000))
    rule = calibrate([useless, good, good], first_label(1000), costs=[1.0, 2.0, 10.0], floor=0.99)
    assert rule.thresholds == (None, max_probability(good).min())
    assert rule.expected_shares == (0.0, 1.0, 0.0)
    assert rule.expected_compute == pytest.approx(0.2)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_calibrated_is_monotone_and_does_not_depend_on_the_order_of_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stages, labels = noisy(rng, 2000, (1.2, 0.7, 0.3)), first_label(2000)
    floors = [0.95, 0.98, 0.99, 0.996]
    computes = [calibrate(stages, labels, [1.0, 4.0, 20.0], floor).expected_compute for floor in floors]
    assert computes == sorted(computes)
    assert computes[0] < computes[-1] <= 1.0
    dearer = [calibrate(stages, labels, [cost, 4.0, 20.0], 0.99).expected_compute for cost in (0.5, 1.0, 2.0, 5.0)]
    assert dearer == sorted(dearer)
    rule, order = calibrate(stages, labels, [1.0, 4.0, 20.0], 0.99), rng.permutation(2000)
    assert calibrate([each[order] for each in stages], labels[order], [5.0, 20.0, 100.0], 0.99) == rule
    assert sum(rule.expected_shares) == pytest.approx(1.0)


@pytest.mark.parametrize("noises", [(0.9, 0.45), (1.2, 0.8, 0.45)])
def test_on_new_rows_the_floor_is_seldom_missed(noises: tuple[float, ...]) -> None:
    rng, costs, times = np.random.default_rng(0), [1.0, 4.0, 20.0][-len(noises) :], 100
    new = noisy(rng, 100_000, noises)
    rules = [calibrate(noisy(rng, 1000, noises), first_label(1000), costs, floor=0.99) for _ in range(times)]
    assert sum(_accuracy(rule, new) < 0.99 * _accuracy(None, new) for rule in rules) <= 0.05 * times
    assert np.mean([rule.expected_compute for rule in rules]) < 0.7


def _accuracy(rule: CascadeRule | None, stages: list[Logits]) -> float:
    right = stages[-1][:, 0] > 0
    for stage in reversed(rule.used[:-1] if rule else []):
        right = np.where(rule.sure(stage, stages[stage]), stages[stage][:, 0] > 0, right)  # type: ignore[union-attr]
    return float(right.mean())


@pytest.mark.parametrize("floor", [0.9, 0.99, 0.995])
def test_too_few_rows_are_refused_with_the_number_that_it_takes(floor: float) -> None:
    needed = required_right_answers(floor)
    assert floor**needed <= 0.05 < floor ** (needed - 1)
    enough = logits_of(rows_right(needed + 1, slice(0, 1)))
    calibrate([enough, enough], first_label(needed + 1), [1.0, 2.0], floor)
    few = logits_of(rows_right(needed + 1, slice(0, 2)))
    with pytest.raises(DataError, match=f"{needed - 1:,} right.*{needed:,} right answers at least"):
        calibrate([few, few], first_label(needed + 1), [1.0, 2.0], floor)


def test_logits_that_are_no_numbers_are_refused() -> None:
    large = logits_of(rows_right(1000))
    small = large.copy()
    small[7, 1] = np.nan
    with pytest.raises(DataError, match=r"stage 0 .* 1 of 1,000"):
        calibrate([small, large], first_label(1000), [1.0, 2.0], 0.99)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"stage_logits": [np.zeros((9, 2))]}, "shapes"),
        ({"stage_logits": [np.zeros((9, 2)), np.zeros((9, 3))]}, r"\(9, 3\)"),
        ({"labels": np.zeros(8, np.int64)}, r"\(8,\)"),
        ({"costs": [1.0]}, r"costs \[1.0\]"),
        ({"costs": [0.0, 1.0]}, "above 0"),
        ({"floor": 1.0}, "floor 1.0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changed: dict[str, Any], words: str) -> None:
    given = {"stage_logits": [np.zeros((9, 2))] * 2, "labels": np.zeros(9, np.int64), "costs": [1.0, 2.0], "floor": 0.9}
    with pytest.raises(ValueError, match=words):
        calibrate(**(given | changed))


def test_a_rule_is_the_same_after_a_trip_through_json() -> None:
    stages = noisy(np.random.default_rng(0), 2000, (1.2, 0.7, 0.3))
    rule = calibrate(stages, first_label(2000), [1.0, 4.0, 20.0], 0.99)
    assert CascadeRule.model_validate_json(rule.model_dump_json()) == rule
    assert all(f"stage {stage} answers" in str(rule) for stage in rule.used)


def rule_of(*thresholds: float | None) -> CascadeRule:
    shares = (1.0, *[0.0 for _ in thresholds])
    seen = {"samples": 1000, "expected_accuracy": 1.0, "expected_shares": shares, "expected_compute": 0.5}
    return CascadeRule(thresholds=thresholds, floor=0.99, risk=0.05, **seen)


INTERFACE = Interface("toy/1", CARD.inputs, CARD.outputs, ("good", "bad"), {"tokenizer.json": "1a"})


class Table:
    """A stage that answers row i of ``logits`` to the input i, and notes what it was asked."""

    def __init__(self, logits: Logits) -> None:
        self.logits = logits
        self.asked: list[list[int]] = []

    async def infer(self, tensors: Tensors) -> Tensors:
        await asyncio.sleep(0)
        rows = tensors["rows"]
        self.asked.append(rows.tolist())
        return {OUTPUT: self.logits[rows], "twice": 2 * rows}


def cascade_of(rule: CascadeRule, tables: list[Table]) -> Cascade:
    return Cascade([Stage(INTERFACE, table.infer) for table in tables], rule)


def ask(cascade: Cascade, rows: NDArray[np.int64]) -> tuple[Tensors, NDArray[np.int8]]:
    return asyncio.run(cascade.infer({"rows": rows}))


@pytest.mark.parametrize("seed", range(3))
def test_each_answer_is_that_of_the_stage_that_is_said_to_have_given_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = noisy(rng, 3000, (1.2, 0.7, 0.3))
    rule = calibrate(logits, first_label(3000), [1.0, 4.0, 20.0], 0.98)
    tables = [Table(each) for each in logits]
    rows = rng.permutation(3000)
    outputs, stages = ask(cascade_of(rule, tables), rows)
    assert stages.dtype == np.int8
    assert np.array_equal(outputs[OUTPUT], np.stack(logits)[stages, rows])
    assert np.array_equal(outputs["twice"], 2 * rows)
    assert tuple(np.bincount(stages, minlength=3) / 3000) == rule.expected_shares
    for stage in rule.used:  # each is asked for the rows that no earlier one was sure of, in their order
        assert tables[stage].asked == [rows[stages >= stage].tolist()]


def test_stages_are_asked_for_nothing_that_they_need_not_answer() -> None:
    sure, unsure = np.array([[9.0, 0.0]] * 3), np.array([[0.1, 0.0]] * 3)
    tables = [Table(unsure), Table(sure), Table(sure), Table(unsure)]
    outputs, stages = ask(cascade_of(rule_of(0.9, None, 0.9), tables), np.arange(3))
    assert [len(table.asked) for table in tables] == [1, 0, 1, 0]
    assert stages.tolist() == [2, 2, 2]
    assert np.array_equal(outputs[OUTPUT], sure)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_stage_is_not_sure_of_what_is_no_number(odd: float) -> None:
    table, last = Table(np.array([[odd, 0.0], [9.0, 0.0]])), Table(np.array([[1.0, 0.0], [1.0, 0.0]]))
    _, stages = ask(cascade_of(rule_of(0.6), [table, last]), np.arange(2))
    assert stages.tolist() == ([0, 0] if odd == -np.inf else [1, 0])  # as a label of no probability it is a number


def test_a_stage_that_fails_fails_the_request() -> None:
    async def fail(_: Tensors) -> Tensors:
        raise RayloomError("closed")

    cascade = Cascade([Stage(INTERFACE, Table(np.array([[0.1, 0.0]])).infer), Stage(INTERFACE, fail)], rule_of(0.9))
    with pytest.raises(RayloomError, match="closed"):
        ask(cascade, np.arange(1))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"inputs": (Tensor(name="pixels", dtype="float32", shape=(-1, 1, 8, 8)),)},
            "takes pixels float32 .* and toy/1",
        ),
        ({"outputs": (Tensor(name="logits", dtype="float32", shape=(-1, 3)),)}, r"answers logits float32 \[-1, 3\]"),
        ({"labels": ("bad", "good")}, "has the labels bad, good, and toy/1 good, bad"),
        ({"codec": {"tokenizer.json": "2b", "text.json": "1"}}, "by another text.json, tokenizer.json"),
    ],
)
def test_stages_that_are_not_alike_are_refused(changed: dict[str, Any], words: str) -> None:
    infer = Table(np.zeros((1, 2))).infer
    other = replace(INTERFACE, title="other/3", **changed)
    with pytest.raises(RecipeError, match=f"other/3 and toy/1 .*{words}.*same data section"):
        Cascade([Stage(other, infer), Stage(INTERFACE, infer)], rule_of(0.9))


def test_a_rule_for_other_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="2 stages, and a rule for 3"):
        cascade_of(rule_of(0.9, 0.9), [Table(np.zeros((1, 2)))] * 2)


class Brightness(PooledEngine[None]):
    """Tells bright pixels from dark ones, and all between ``blind`` and its opposite wrongly, at leisure."""

    name, version = "brightness", "1"

    def __init__(self, blind: float, work: int) -> None:
        outputs = (TensorSpec(OUTPUT, np.dtype(np.float32), (-1, 2)),)
        super().__init__(Signature(ImageProcessor(PIXEL).inputs, outputs), [None])
        self.blind, self.work = blind, work

    def _run(self, member: None, inputs: Tensors) -> Tensors:
        np.linalg.inv(np.eye(self.work))
        pixels = inputs["pixel_values"].reshape(-1)
        seen = np.where(np.abs(pixels) < self.blind, -pixels, pixels)
        return {OUTPUT: np.stack([-5 * seen, 5 * seen], axis=1)}


PIXEL = ImageConfig(size=1, channels=1)


def loaded(name: str, blind: float, work: int, split: str = "d") -> LoadedModel:
    manifest = Manifest(
        **dict(CARD.model_copy(update={"lineage": CARD.lineage.model_copy(update={"data_fingerprint": split})})),
        name=name,
        version=1,
        created=datetime.now(UTC),
        size_bytes=1,
        files={"model.onnx": name, "labels.json": "a", "image.json": "b"},
    )
    return LoadedModel(manifest, Brightness(blind, work), ImageProcessor(PIXEL), ["dark", "bright"])


def pictures() -> LabelledDataset:
    """Four of each of 256 grey levels."""
    levels = np.repeat(np.arange(256, dtype=np.uint8), 4)
    inputs = [encode_png(np.full((1, 1), level)) for level in levels]
    return LabelledDataset(Split(inputs, (levels >= 128).astype(int).tolist()), ImageProcessor(PIXEL))


def test_published_versions_are_calibrated_on_what_none_of_them_was_trained_on() -> None:
    rule = calibrated([loaded("small", 0.3, 1), loaded("large", 0.0, 200)], pictures(), floor=0.99)
    assert rule.samples == 1024
    assert rule.expected_shares == pytest.approx((0.7, 0.3), abs=0.02)
    assert rule.expected_accuracy == 1.0
    assert 0.3 < rule.expected_compute < 0.9
    with pytest.raises(RecipeError, match="small/1 and large/1 were trained on different data or splits"):
        calibrated([loaded("small", 0.3, 1, split="e"), loaded("large", 0.0, 200)], pictures(), floor=0.99)


def test_versions_are_found_by_number_and_alias(tmp_path: Path) -> None:
    repository = Repository(UPath(tmp_path))
    version = repository.publish("toy", files_in(tmp_path / "files"), CARD).version
    repository.promote("toy", version)
    assert find_version(repository, "toy/production") == ("toy", version)
    assert find_version(repository, "toy/7") == ("toy", 7)
    with pytest.raises(StorageError, match="'toy' has no version that is canary"):
        find_version(repository, "toy/canary")


def test_a_recipe_names_the_stages_and_the_floor() -> None:
    recipe = load_recipe(REVIEWS, ["serve.cascade={stages: [small-reviews/12, reviews/production]}"])
    assert recipe.serve.cascade == CascadeConfig(
        stages=["small-reviews/12", "reviews/production"], accuracy_floor=0.995
    )
    assert load_recipe(REVIEWS).serve.cascade is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("serve.cascade.stages=[a/1]", ["serve.cascade.stages", "at least 2"]),
        ("serve.cascade.stages=[a/1, a/2, a/3, a/4, a/5]", ["serve.cascade.stages", "at most 4"]),
        (
            "serve.cascade.stages=[a/1, a]",
            ["serve.cascade.stages.1 is 'a'", "NAME/NUMBER, NAME/production or NAME/can"],
        ),
        ("serve.cascade.stages=[a/0, a/1]", ["serve.cascade.stages.0 is 'a/0'"]),
        ("serve.cascade.stages=[a/1, a/1]", ["serve.cascade.stages", "twice"]),
        ("serve.cascade={stages: [a/1, a/2], accuracy_floor: 1.0}", ["accuracy_floor is 1.0", "less than 1"]),
        (
            "serve.cascade={stages: [a/1, a/2], flor: 0.9}",
            ["unknown key serve.cascade.flor", "known are stages, accuracy_floor"],
        ),
        ("serve={version: 3, cascade: {stages: [a/1, a/2]}}", ["version is 3", "cascade names a/1, a/2", "leave one"]),
    ],
)
def test_a_cascade_that_cannot_be_is_refused_with_key_value_and_way_out(override: str, words: list[str]) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(REVIEWS, [override])
    assert all(word in str(refused.value) for word in words), str(refused.value)
