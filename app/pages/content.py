"""What a page consists of besides text: links, pictures, charts and states."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

MAX_POINTS = 1000
"""Maximum number of points of a curve in a page. A screen shows no more."""

Kind = Literal["line", "points", "both", "faint"]
Mood = Literal["good", "bad", "busy", ""]


@dataclass(frozen=True)
class Link:
    """A link to another page or file. ``href`` is relative where both lie in the same storage."""

    text: str
    href: str

    def __html__(self) -> str:
        return str(Markup('<a href="{}">{}</a>').format(self.href, self.text))

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Picture:
    """A small PNG, kept inside the page."""

    png_base64: str
    description: str
    caption: str = ""
    """Shown below it."""

    def __html__(self) -> str:
        image = Markup('<img src="data:image/png;base64,{}" alt="{}">').format(self.png_base64, self.description)
        return str(image + Markup("<small>{}</small>").format(self.caption) if self.caption else image)

    def __str__(self) -> str:
        return self.caption or self.description


@dataclass(frozen=True)
class State:
    """How something stands, with a dot in front: green, red, amber or gray."""

    text: str
    mood: Mood = ""

    def __html__(self) -> str:
        return str(Markup('<span class="state {}">{}</span>').format(self.mood, self.text))

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Series:
    """One curve or one cloud of points. NaN in ``y`` leaves a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    kind: Kind = "line"
    """``both``: a line with points. ``faint``: a line in the background, in the color of the series before it."""
    labels: Sequence[str] = ()
    """What each point is, shown under the pointer."""


@dataclass(frozen=True)
class Chart:
    """Curves or points over two axes. ``charts.js`` draws it."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    x_names: Sequence[str] = ()
    """Names of the places 0, 1, 2 … on the x axis, for what has no order."""

    @property
    def json(self) -> Markup:
        """The data for the script, safe inside an element of the page."""
        text = json.dumps(self.to_data(), ensure_ascii=False, allow_nan=False)
        return Markup(text.replace("<", "\\u003c"))  # noqa: S704 # nothing in it can end the element

    def to_data(self) -> dict[str, object]:
        """The data for the script: long curves are thinned, and what is no number becomes null."""
        return {
            "title": self.title,
            "x_label": self.x_label,
            "y_label": self.y_label,
            "log_x": self.log_x,
            "log_y": self.log_y,
            "x_names": list(self.x_names),
            "labels_points": any(series.labels for series in self.series),
            "series": [self._series_data(series) for series in self.series],
        }

    def _series_data(self, series: Series) -> dict[str, object]:
        kept = thin(series.y, MAX_POINTS)
        return {
            "name": series.name,
            "kind": series.kind,
            "x": [_number(series.x[index]) for index in kept],
            "y": [_number(series.y[index]) for index in kept],
            "labels": [series.labels[index] for index in kept] if series.labels else None,
        }


def thin(values: Sequence[float], max_points: int) -> Sequence[int]:
    """Return the indices of at most ``max_points`` values that keep the curve's outline.

    Of each of ``max_points / 2`` equal stretches, the lowest and the highest value are kept, so no spike is lost.
    """
    if len(values) <= max_points:
        return range(len(values))
    stretches = max_points // 2
    kept: list[int] = []
    for stretch in range(stretches):
        first, last = stretch * len(values) // stretches, (stretch + 1) * len(values) // stretches
        known = [index for index in range(first, last) if math.isfinite(values[index])] or [first]
        kept += sorted({min(known, key=values.__getitem__), max(known, key=values.__getitem__)})
    return kept


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
