"""The benchmark of cascades: the trade-off curve and the report."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from app.serving.cascade.rule import CascadeRule
from benchmarks.machine import Conditions
from benchmarks.serving.cascade import FLOOR, FLOORS, Findings, report
from benchmarks.serving.tradeoff import Point, Tradeoff, picture
from benchmarks.spread import Spread

# The first label is correct in every row. The small model is most confident in row 0 and least in row 3. It is wrong in
# rows 2 and 3; the large model is wrong in rows 1 and 3.
SMALL = np.array([[9.0, 0.0], [3.0, 0.0], [0.0, 2.0], [0.0, 1.0]])
LARGE = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
TRADEOFF = Tradeoff(SMALL, LARGE, np.zeros(4, int), small_flops=10.0, large_flops=100.0)


def rule(threshold: float | None) -> CascadeRule:
    return CascadeRule(
        thresholds=(threshold,),
        accuracy_floor=FLOOR,
        confidence=0.95,
        rows=1000,
        expected_accuracy=1.0,
        expected_shares=(0.5, 0.5),
        expected_compute=0.6,
    )


@pytest.mark.parametrize(
    ("threshold", "point", "relative"),
    [
        (None, Point(1.0, 0.5), (1.0, 0.0)),
        (1.0, Point(1.1, 0.5), (1.0, 0.0)),
        (0.9, Point(0.6, 0.75), (1.5, 0.5)),  # rows 2 and 3 are passed on: row 1 is gained
        (0.0, Point(0.1, 0.5), (1.0, 2**0.5 / 2)),  # row 1 is gained, row 2 is lost
    ],
)
def test_what_a_cascade_costs_and_what_it_gets_right(
    threshold: float | None, point: Point, relative: tuple[float, float]
) -> None:
    assert TRADEOFF.under(rule(threshold)) == point
    assert TRADEOFF.relative_accuracy(rule(threshold)) == relative


def test_the_curve_goes_from_the_small_model_to_all_rows_passed_on() -> None:
    assert [point.accuracy for point in TRADEOFF.curve()] == [0.5, 0.5, 0.75, 0.5, 0.5]
    assert [point.compute for point in TRADEOFF.curve()] == pytest.approx([0.1, 0.35, 0.6, 0.85, 1.1])


def test_the_picture_marks_both_models_and_the_rule() -> None:
    drawn = ET.fromstring(picture(TRADEOFF, {"floor 0.995": rule(0.9)}))
    svg = "{http://www.w3.org/2000/svg}"
    words = {element.text for element in drawn.iter(f"{svg}text")}
    assert {"small model alone", "large model alone", "floor 0.995", "50 %", "75 %"} <= words
    assert len(drawn.findall(f"{svg}circle")) == 3
    curve = drawn.findall(f"{svg}polyline")[1].attrib["points"].split()
    assert len(curve) == 5


def test_goals_that_are_missed_are_said() -> None:
    rules = {floor: rule(0.9) for floor in FLOORS}
    text = report(
        Findings(TRADEOFF, rules, {1: Spread((0.4, 0.5, 0.6)), 32: Spread((0.3,))}), Conditions(), "CASCADE.svg"
    )
    verdicts = re.findall(r"\| (reached|\*\*missed\*\*) \|$", text, re.MULTILINE)
    assert verdicts == ["**missed**", "reached", "**missed**", "reached", "reached"]
    assert "| cascade, floor 0.995 | 0.9000 | 50.0% | 50.0% | 0.7500 | 1.5000 ± 0.5000 | 0.600 |" in text
    assert "![Accuracy against operations](CASCADE.svg)" in text
