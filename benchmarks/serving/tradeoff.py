"""The tradeoff of a cascade of two models between accuracy and compute, as numbers and as a plot."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from app.serving.cascade.rule import CascadeRule, max_probability

_WIDTH, _HEIGHT, _MARGIN = 640, 420, 64
_CURVE_POINTS = 400


@dataclass(frozen=True)
class Point:
    """The compute and accuracy of one way to answer the rows of a split."""

    compute: float
    """Mean operations per row, as a share of the large model's."""
    accuracy: float


@dataclass(frozen=True, eq=False)
class Tradeoff:
    """The answers of a small and a large model to the same rows, and the operations per row of each."""

    small: NDArray[np.floating]
    """Logits of shape (rows, labels)."""
    large: NDArray[np.floating]
    """Logits of shape (rows, labels)."""
    classes: NDArray[np.integer]
    """The correct labels, of shape (rows)."""
    small_flops: float
    large_flops: float

    @cached_property
    def small_right(self) -> NDArray[np.bool_]:
        """A mask of the rows that the small model answers correctly, of shape (rows)."""
        return np.asarray(self.small.argmax(-1) == self.classes)

    @cached_property
    def large_right(self) -> NDArray[np.bool_]:
        """A mask of the rows that the large model answers correctly, of shape (rows)."""
        return np.asarray(self.large.argmax(-1) == self.classes)

    @property
    def small_alone(self) -> Point:
        """The point where the small model answers every row."""
        return Point(self.small_flops / self.large_flops, float(self.small_right.mean()))

    @property
    def large_alone(self) -> Point:
        """The point where the large model answers every row and the small one none."""
        return Point(1.0, float(self.large_right.mean()))

    def is_passed_on(self, rule: CascadeRule) -> NDArray[np.bool_]:
        """Return a mask of the rows that the rule sends to the large model, of shape (rows)."""
        return ~rule.is_sure(0, self.small) if 0 in rule.asked else np.ones(len(self.classes), np.bool_)

    def right(self, rule: CascadeRule) -> NDArray[np.bool_]:
        """Return a mask of the rows that the cascade answers correctly, of shape (rows)."""
        return np.where(self.is_passed_on(rule), self.large_right, self.small_right)

    def under(self, rule: CascadeRule) -> Point:
        """Return the point of the cascade with thresholds that were chosen on other rows."""
        if 0 not in rule.asked:
            return self.large_alone
        compute = self.small_alone.compute + float(self.is_passed_on(rule).mean())
        return Point(compute, float(self.right(rule).mean()))

    def relative_accuracy(self, rule: CascadeRule) -> tuple[float, float]:
        """Return the cascade's accuracy / the large model's, and its standard error over samples of the rows."""
        right, num_large_right = self.right(rule), int(self.large_right.sum())
        error = math.sqrt(int((right != self.large_right).sum())) / num_large_right
        return int(right.sum()) / num_large_right, error

    def curve(self) -> list[Point]:
        """Return the points of all thresholds, from the small model alone to all rows passed on."""
        surest_last = np.argsort(max_probability(self.small))
        gained = np.where(self.large_right, 1, 0) - np.where(self.small_right, 1, 0)
        right = self.small_right.sum() + np.concatenate([[0], np.cumsum(gained[surest_last])])
        num_rows, cost = len(self.classes), self.small_alone.compute
        steps = np.unique(np.linspace(0, num_rows, min(num_rows, _CURVE_POINTS) + 1, dtype=int))
        return [Point(cost + step / num_rows, float(right[step]) / num_rows) for step in steps]


def picture(tradeoff: Tradeoff, rules: Mapping[str, CascadeRule]) -> str:
    """Return an SVG plot of the curve, both models, each named rule, and a line for rows passed on at random."""
    marked = {"small model alone": tradeoff.small_alone, "large model alone": tradeoff.large_alone}
    marked |= {name: tradeoff.under(rule) for name, rule in rules.items()}
    curve = tradeoff.curve()
    axes = _Axes.around([*curve, *marked.values()])
    path = " ".join(axes.place(point) for point in curve)
    (start, end), middle = (axes.place(point) for point in (curve[0], curve[-1])), _MARGIN + _WIDTH // 2
    size = f'width="{_WIDTH + 2 * _MARGIN}" height="{_HEIGHT + 2 * _MARGIN}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
            f'<rect {size} fill="white"/>',
            *axes.grid(),
            f'<text x="{middle}" y="{_HEIGHT + 2 * _MARGIN - 16}" text-anchor="middle">operations per row, '
            "as a share of the large model's</text>",
            f'<text x="{_MARGIN}" y="{_MARGIN - 16}">accuracy on the test split</text>',
            f'<polyline points="{start} {end}" stroke="gray" stroke-dasharray="5 4" fill="none"/>',
            f'<polyline points="{path}" stroke="steelblue" stroke-width="2" fill="none"/>',
            *(part for name, point in marked.items() for part in axes.mark(name, point)),
            "</svg>\n",
        ]
    )


@dataclass(frozen=True)
class _Axes:
    """The mapping from points to positions in the plot."""

    max_compute: float
    lowest: float
    """The lowest accuracy on the axis: a share that is a whole number of percent."""
    highest: float

    @classmethod
    def around(cls, points: list[Point]) -> "_Axes":
        accuracies = [point.accuracy for point in points]
        lowest, highest = math.floor(100 * min(accuracies)) / 100, math.ceil(100 * max(accuracies)) / 100
        return cls(max(point.compute for point in points), lowest, max(highest, lowest + 0.01))

    def place(self, point: Point) -> str:
        x, y = self._place(point)
        return f"{x:.1f},{y:.1f}"

    def grid(self) -> Iterator[str]:
        """Yield a grid line for each percent of accuracy, and a label for each percent and each tenth of compute."""
        for percent in range(round(100 * self.lowest), round(100 * self.highest) + 1):
            _, y = self._place(Point(0.0, percent / 100))
            yield f'<path d="M{_MARGIN} {y:.1f}h{_WIDTH}" stroke="gainsboro"/>'
            yield f'<text x="{_MARGIN - 8}" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>'
        for tenth in range(math.floor(10 * self.max_compute) + 1):
            x, _ = self._place(Point(tenth / 10, self.lowest))
            yield f'<path d="M{x:.1f} {_MARGIN}v{_HEIGHT}" stroke="gainsboro"/>'
            yield f'<text x="{x:.1f}" y="{_MARGIN + _HEIGHT + 18}" text-anchor="middle">{tenth / 10:g}</text>'

    def mark(self, name: str, point: Point) -> Iterator[str]:
        """Yield a dot and its name, on the side that has room."""
        x, y = self._place(point)
        anchor, shift = ("start", 8) if x < _MARGIN + _WIDTH / 2 else ("end", -8)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="darkorange"/>'
        yield f'<text x="{x + shift:.1f}" y="{y + 16:.1f}" text-anchor="{anchor}">{name}</text>'

    def _place(self, point: Point) -> tuple[float, float]:
        height = (point.accuracy - self.lowest) / (self.highest - self.lowest)
        return _MARGIN + _WIDTH * point.compute / self.max_compute, _MARGIN + _HEIGHT * (1 - height)
