"""The curves of a training run, read from its ``metrics.jsonl``."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from upath import UPath

from app.artifacts import METRICS_FILE
from app.pages.content import Chart, Kind, Series
from app.shared_files import read
from app.telemetry.record import ReadingRecord, numbers, parse_line, parse_reading

_SMOOTHED_OVER = 40.0
"""The weight of each new value, times the number of values. The mean is over about a twentieth of the curve."""

Of = Literal["step", "epoch"]


@dataclass
class Curve:
    """One metric by optimizer step."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @property
    def smoothed(self) -> "Curve":
        """The exponential moving average of the values, over about a twentieth of the curve."""
        share = min(1.0, _SMOOTHED_OVER / max(1, len(self.values)))
        total = weight = 0.0
        means = []
        for value in self.values:
            if not math.isfinite(value):
                means.append(math.nan)
                continue
            total, weight = total + share * (value - total), weight + share * (1.0 - weight)
            # Dividing by the weight corrects the bias of the first means.
            means.append(total / weight)
        return Curve(self.steps, means)

    def to_series(self, name: str, kind: Kind = "line") -> Series:
        """Return the curve for a chart."""
        return Series(name, self.steps, self.values, kind)


@dataclass
class Curves:
    """All metrics of a run, those of steps and those of epochs apart."""

    of_steps: dict[str, Curve] = field(default_factory=dict)
    of_epochs: dict[str, Curve] = field(default_factory=dict)
    reading: ReadingRecord | None = None
    """How the micro-batches of all steps were read."""

    def add(self, lines: bytes) -> None:
        """Add whole lines of ``metrics.jsonl``. A line that cannot be parsed is skipped."""
        for line in lines.splitlines():
            entry = parse_line(line)
            if entry is None:
                continue
            # The kind of a record is not written. Only epochs have been validated.
            curves = self.of_epochs if "val_loss" in entry else self.of_steps
            step = entry.pop("step")
            if reading := parse_reading(entry.pop("reading", None)):
                self.reading = self.reading + reading if self.reading else reading
            for name, value in numbers(entry).items():
                curve = curves.setdefault(name, Curve())
                curve.steps.append(step)
                curve.values.append(value)

    def chart(self, title: str, label: str, names: Mapping[str, tuple[Of, str]], log_y: bool = False) -> Chart | None:
        """Return a chart of the metrics that the run has, by the names of the chart's series; None if it has none.

        Args:
            names: the kind of record and the metric of each series.
            log_y: whether the vertical axis is logarithmic.
        """
        found = []
        for name, (of, metric) in names.items():
            curve = (self.of_epochs if of == "epoch" else self.of_steps).get(metric)
            if curve is not None:
                found += _series_of(name, of, metric, curve)
        return Chart(title, "step", label, found, log_y=log_y) if found else None

    def total(self, prefix: str) -> dict[str, float]:
        """Return the sums over the epochs of the metrics under ``prefix``, by the rest of their names."""
        return {
            name.removeprefix(prefix): sum(curve.values)
            for name, curve in self.of_epochs.items()
            if name.startswith(prefix)
        }


def _series_of(name: str, of: Of, metric: str, curve: Curve) -> list[Series]:
    if of == "epoch":
        return [curve.to_series(name, "both")]
    if metric == "loss":  # noisy from step to step
        return [curve.smoothed.to_series(name), curve.to_series("each step", "faint")]
    return [curve.to_series(name)]


def read_curves(run_folder: UPath) -> Curves:
    """Return the curves of a run, which may be under way."""
    curves = Curves()
    curves.add(read(run_folder / METRICS_FILE) or b"")
    return curves
