"""Cascades: the rule, what it promises, and which stage answers which row."""

import asyncio
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from app.config import CascadeConfig, load_recipe
from app.errors import RayloomError
from app.serving.cascade.calibration import calibrate
from app.serving.cascade.rule import CascadeRule, max_probability
from app.serving.cascade.served import route
from app.tensors import OUTPUT, Tensors
from tests.helpers import ROOT
from tests.wording import refused

REVIEWS = ROOT / "recipes/reviews.yaml"
Logits = NDArray[np.float64]


def logits_of(right: NDArray[np.bool_]) -> Logits:
    """Of two labels, the first being right: the earlier a row, the surer the answer."""
    sureness = np.linspace(9.0, 1.0, len(right))
    return np.stack([np.where(right, sureness, 0.0), np.where(right, 0.0, sureness)], axis=1)


def first_label(num_rows: int) -> NDArray[np.int64]:
    return np.zeros(num_rows, np.int64)


def right_but(num_rows: int, *wrong: slice) -> NDArray[np.bool_]:
    right = np.ones(num_rows, np.bool_)
    for item in wrong:
        right[item] = False
    return right


def noisy(rng: np.random.Generator, num_rows: int, *noises: float) -> list[Logits]:
    """Stages that see the same evidence for the first of two labels through noise of their own."""
    evidence = rng.normal(1.9, 1.55, num_rows)
    seen = [evidence + noise * rng.normal(size=num_rows) for noise in noises]
    return [np.stack([item, -item], axis=1) for item in seen]


def test_the_small_stage_answers_as_far_as_nothing_is_lost() -> None:
    small, large = logits_of(right_but(1000, slice(600, None))), logits_of(right_but(1000))
    rule = calibrate([small, large], first_label(1000), [1.0, 10.0], 0.99)
    assert rule.thresholds == (max_probability(small)[599],)
    assert rule.expected_shares == (0.6, 0.4)
    assert rule.expected_compute == pytest.approx(1 / 10 + 0.4)
    assert (rule.expected_accuracy, rule.rows, rule.asked) == (1.0, 1000, [0, 1])
    assert rule.summary(["tiny/1", "big/2"]).splitlines() == [
        "a cascade, calibrated on 1,000 validation rows:",
        f"  tiny/1 answers 60.0%, with a probability of {rule.thresholds[0]:.4f} or more",
        "  big/2 answers 40.0%",
        "  there 1.0000 of the accuracy of big/2, for 0.500 of its compute",
        "  elsewhere 0.99 of its accuracy or more, with confidence 0.95",
    ]
    assert CascadeRule.model_validate_json(rule.model_dump_json()) == rule


@pytest.mark.parametrize(
    ("lost", "gained", "share"),
    # With nothing gained v is 9.9, so that z is (9.5 - lost) / 3.146: 1.748 with 4, 1.430 with 5, and 1.645 is needed.
    # With two gained v is 12.41 with 5 lost, and z is 6.5 / 3.523 = 1.845; 12.49 with 6, and z is 5.5 / 3.535 = 1.556.
    [(4, 0, 0.5), (5, 0, 0.0), (5, 2, 0.5), (6, 2, 0.0)],
)
def test_so_many_may_be_lost_and_not_one_more(lost: int, gained: int, share: float) -> None:
    num_rows = 1000 + gained
    small = right_but(num_rows, slice(lost), slice(int(0.525 * num_rows), None))
    large = right_but(num_rows, slice(20, 20 + gained))
    rule = calibrate([logits_of(small), logits_of(large)], first_label(num_rows), [1.0, 10.0], 0.99)
    assert rule.expected_shares[0] == pytest.approx(share, abs=1e-3)
    assert rule.expected_accuracy == pytest.approx((1000 - lost + gained) / 1000 if share else 1.0)


@pytest.mark.parametrize(
    ("wrong", "small_cost"), [(slice(0, 1000), 1.0), (slice(100, None), 9.0)], ids=["wrong where sure", "too dear"]
)
def test_a_stage_that_saves_nothing_is_not_asked(wrong: slice, small_cost: float) -> None:
    stages = [logits_of(right_but(1000, wrong)), logits_of(right_but(1000))]
    rule = calibrate(stages, first_label(1000), [small_cost, 10.0], 0.99)
    assert (rule.thresholds, rule.asked, rule.expected_shares) == ((None,), [1], (0.0, 1.0))
    assert (rule.expected_accuracy, rule.expected_compute) == (1.0, 1.0)
    assert "no threshold pays" in rule.summary(["small", "large"])


def test_of_three_stages_those_are_asked_that_pay() -> None:
    useless, good = logits_of(right_but(1000, slice(None))), logits_of(right_but(1000))
    rule = calibrate([useless, good, good], first_label(1000), [1.0, 2.0, 10.0], 0.99)
    assert rule.thresholds == (None, max_probability(good).min())
    assert rule.expected_shares == (0.0, 1.0, 0.0)
    assert rule.expected_compute == pytest.approx(0.2)


@pytest.mark.parametrize("noises", [(0.9, 0.45), (1.2, 0.8, 0.45)])
def test_on_new_rows_the_floor_is_missed_no_more_often_than_is_said(noises: tuple[float, ...]) -> None:
    rng, costs, times = np.random.default_rng(0), [1.0, 4.0, 20.0][-len(noises) :], 100
    new = noisy(rng, 25_000, *noises)
    rules = [calibrate(noisy(rng, 1000, *noises), first_label(1000), costs, 0.99) for _ in range(times)]
    alone = (new[-1][:, 0] > 0).mean()
    assert sum(_accuracy(rule, new) < 0.99 * alone for rule in rules) <= 0.05 * times
    assert np.mean([rule.expected_compute for rule in rules]) < 0.75


def _accuracy(rule: CascadeRule, stages: list[Logits]) -> float:
    right = stages[-1][:, 0] > 0
    for stage in reversed(rule.asked[:-1]):
        right = np.where(rule.is_sure(stage, stages[stage]), stages[stage][:, 0] > 0, right)
    return float(right.mean())


def test_too_few_rows_are_refused_with_the_number_that_it_takes() -> None:
    def calibrated_on(right: int) -> CascadeRule:
        stage = logits_of(right_but(right + 1, slice(0, 1)))
        return calibrate([stage, stage], first_label(right + 1), [1.0, 2.0], 0.995)

    # 0.005 r - 0.5 >= 1.6449 sqrt(0.004975 r) from r = 725 on: 3.125 >= 3.1239.
    assert calibrated_on(725).expected_shares[0] > 0
    with refused("cascade.too_few_rows"):
        calibrated_on(724)


def rule_of(*thresholds: float | None) -> CascadeRule:
    return CascadeRule(
        thresholds=thresholds,
        accuracy_floor=0.99,
        confidence=0.95,
        rows=1000,
        expected_accuracy=1.0,
        expected_shares=(1.0, *[0.0 for _ in thresholds]),
        expected_compute=0.5,
    )


def test_a_stage_answers_a_row_of_which_it_is_just_sure_enough() -> None:
    logits = np.array([[2.0, 0.0], [1.9, 0.0], [0.0, 2.1]])
    rule = rule_of(float(max_probability(logits)[0]))
    assert rule.is_sure(0, logits).tolist() == [True, False, True]
    assert rule.is_sure(1, logits).tolist() == [True, True, True]


class Asked:
    """Stages that answer with rows of given logits, and note what they are asked."""

    def __init__(self, *logits: Logits) -> None:
        self.logits = logits
        self.rows: list[tuple[int, list[int]]] = []

    async def __call__(self, stage: int, rows: NDArray[np.intp]) -> Tensors:
        await asyncio.sleep(0)
        self.rows.append((stage, rows.tolist()))
        return {OUTPUT: self.logits[stage][rows], "place": rows}


SURE, UNSURE = [9.0, 0.0], [0.1, 0.0]


def test_rows_that_a_stage_is_not_sure_of_go_on_together_and_come_back_in_order() -> None:
    first = np.array([UNSURE, SURE, UNSURE, SURE])
    second, last = np.array([SURE, UNSURE, UNSURE, UNSURE]), np.array([UNSURE] * 4)
    ask = Asked(first, second, last)
    outputs, stages = asyncio.run(route(rule_of(0.9, 0.9), 4, ask))
    assert stages.tolist() == [1, 0, 2, 0]
    assert outputs[OUTPUT].tolist() == [SURE, SURE, UNSURE, SURE]
    assert outputs["place"].tolist() == [0, 1, 2, 3]
    assert ask.rows == [(0, [0, 1, 2, 3]), (1, [0, 2]), (2, [2])]


def test_a_stage_without_a_threshold_and_those_behind_the_last_answer_are_not_asked() -> None:
    ask = Asked(*[np.array([row] * 3) for row in (UNSURE, SURE, SURE, UNSURE)])
    _, stages = asyncio.run(route(rule_of(0.9, None, 0.9), 3, ask))
    assert stages.tolist() == [2, 2, 2]
    assert [stage for stage, _ in ask.rows] == [0, 2]


def test_a_stage_that_fails_fails_the_request() -> None:
    class Failing(Asked):
        async def __call__(self, stage: int, rows: NDArray[np.intp]) -> Tensors:
            if stage == 1:
                raise RayloomError("closed")
            return await super().__call__(stage, rows)

    with pytest.raises(RayloomError, match="closed"):
        asyncio.run(route(rule_of(0.9), 2, Failing(np.array([SURE, UNSURE]))))


def test_a_recipe_names_what_is_asked_before_its_own_model() -> None:
    recipe = load_recipe(REVIEWS, ["serve.cascade={before: [small-reviews, reviews/3]}"])
    assert recipe.serve.cascade == CascadeConfig(before=["small-reviews", "reviews/3"], accuracy_floor=0.995)
    assert load_recipe(REVIEWS).serve.cascade is None


@pytest.mark.parametrize(
    ("value", "rule", "key"),
    [
        ("{before: []}", "recipe.too_short", "serve.cascade.before"),
        ("{before: [a, b, c, d]}", "recipe.too_long", "serve.cascade.before"),
        ("{before: [a/0]}", "recipe.string_pattern_mismatch", "serve.cascade.before.0"),
        ("{before: [a], accuracy_floor: 1.0}", "recipe.less_than_equal", "serve.cascade.accuracy_floor"),
        ("{before: [a], floor: 0.9}", "recipe.extra_forbidden", "serve.cascade.floor"),
    ],
)
def test_a_cascade_that_cannot_be_is_refused_with_key_value_and_way_out(value: str, rule: str, key: str) -> None:
    with refused(rule, key):
        load_recipe(REVIEWS, [f"serve.cascade={value}"])


def test_probabilities_are_those_of_a_softmax_however_large_the_logits() -> None:
    logits: NDArray[Any] = np.array([[0.0, np.log(3.0)], [1e4, 0.0], [0.0, 0.0]])
    assert max_probability(logits) == pytest.approx([0.75, 1.0, 0.5])
