"""The plot of a compile run's report."""

from collections.abc import Sequence
from typing import Any

from plotly import express as px

from app.compile.operating_points import OperatingPoint


def front_plot(points: Sequence[OperatingPoint], front: Sequence[OperatingPoint]) -> Any:
    """Latency, throughput and size (area of a marker) of every setting, one colour a variant."""
    return px.scatter(
        {
            "milliseconds of a call": [each.latency_ms for each in points],
            "rows a second": [each.throughput for each in points],
            "variant": [str(each.variant) for each in points],
            "MB": [each.size_bytes / 1e6 for each in points],
            "accuracy": [each.accuracy for each in points],
            "setting": [str(each) for each in points],
            "front": ["on the front" if each in front else "beaten" for each in points],
        },
        x="milliseconds of a call",
        y="rows a second",
        color="variant",
        symbol="front",
        size="MB",
        hover_name="setting",
        hover_data=["accuracy"],
        log_x=True,
        log_y=True,
    )
