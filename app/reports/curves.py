"""The curves of a training run, read from its ``metrics.jsonl``."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
from upath import UPath

from app.artifacts import METRICS_FILE
from app.conditional import read
from app.pages.content import MAX_POINTS, Chart, Kind, Series, thin

Of = Literal["step", "epoch"]
_COMPARED_BYTES = 256
"""Bytes before new lines that are compared with what was there. Longer than a line's time-dependent figures."""


@dataclass
class Curve:
    """One metric by optimizer step."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def to_series(self, name: str, kind: Kind = "line") -> Series:
        """Return the curve for a chart."""
        return Series(name, self.steps, self.values, kind)

    def thinned(self, max_points: int = MAX_POINTS) -> "Curve":
        """Return the curve with at most ``max_points`` points."""
        kept = thin(self.values, max_points)
        return Curve([self.steps[index] for index in kept], [self.values[index] for index in kept])


@dataclass
class Curves:
    """All metrics of a run, those of steps and those of epochs apart."""

    of_steps: dict[str, Curve] = field(default_factory=dict)
    of_epochs: dict[str, Curve] = field(default_factory=dict)

    def add(self, lines: bytes) -> None:
        """Add whole lines of ``metrics.jsonl``. A line that cannot be parsed is skipped."""
        for line in lines.splitlines():
            entry = _parse(line)
            if entry is None:
                continue
            curves = self.of_epochs if "val_loss" in entry else self.of_steps
            step = entry.pop("step")
            for name, value in _flatten("", entry):
                curve = curves.setdefault(name, Curve())
                curve.steps.append(step)
                curve.values.append(value)

    def chart(self, title: str, label: str, names: Mapping[str, tuple[Of, str]], **options: bool) -> Chart | None:
        """Return a chart of the metrics that the run has, by the names of the chart's series; None if it has none.

        Args:
            names: the kind of record and the metric of each series.
            options: ``log_x`` and ``log_y`` of the chart.
        """
        found = []
        for name, (of, metric) in names.items():
            curve = (self.of_epochs if of == "epoch" else self.of_steps).get(metric)
            if curve is not None:
                found.append(curve.to_series(name, "both" if of == "epoch" else "line"))
        return Chart(title, "step", label, found, **options) if found else None

    def total(self, prefix: str) -> dict[str, float]:
        """Return the sums over the epochs of the metrics under ``prefix``, by the rest of their names."""
        return {
            name.removeprefix(prefix): sum(curve.values)
            for name, curve in self.of_epochs.items()
            if name.startswith(prefix)
        }


def read_curves(run_folder: UPath) -> Curves:
    """Return the curves of a run, which may be under way."""
    return CurveFile(run_folder).read()


class CurveFile:
    """The curves of one run, read again and again while the run goes on. Each time only new lines are parsed."""

    def __init__(self, run_folder: UPath) -> None:
        self._path = run_folder / METRICS_FILE
        self._curves = Curves()
        self._parsed = 0
        """Bytes of the file that are parsed: whole lines."""
        self._last = b""
        """The last of these bytes. Others in their place mean that a run went back, and dropped lines."""

    def read(self) -> Curves:
        """Return the curves by now."""
        new = self._read_from(self._parsed - len(self._last))
        if not new.startswith(self._last):
            self._curves, self._parsed, self._last = Curves(), 0, b""
            new = self._read_from(0)
        whole = new[len(self._last) : new.rfind(b"\n") + 1]
        if whole:
            self._curves.add(whole)
            self._parsed += len(whole)
            self._last = whole[-_COMPARED_BYTES:]
        return self._curves

    def _read_from(self, start: int) -> bytes:
        """Return the file's content from a position on; nothing if the file is shorter, or missing."""
        try:
            if start == 0:
                return read(self._path) or b""
            content: bytes = self._path.fs.cat_file(self._path.path, start=start)
        except (FileNotFoundError, NotADirectoryError):
            return b""
        except (OSError, ValueError):  # S3 refuses a range that lies behind the end
            return b""
        return content


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return a line of the file; None if it is torn."""
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:  # NaN and Infinity, which only Python's own parser reads; or torn
        try:
            entry = json.loads(line)
        except ValueError:
            return None
    return entry if isinstance(entry, dict) and "step" in entry else None


def _flatten(prefix: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _flatten(f"{prefix}{name}.", value)
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", value
