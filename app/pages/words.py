"""Figures as a person reads them."""

import math
from datetime import datetime

MISSING = "–"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: 1.2 s, 3 min 4 s, 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds >= 0.1 or not seconds else f"{seconds * 1e3:.1f} ms"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def minute(time: datetime | None) -> str:
    """Return a time to the minute, or nothing for None."""
    return f"{time:%Y-%m-%d %H:%M}" if time else ""


def hours(value: float) -> str:
    """Return hours with three significant digits."""
    return f"{value:,.0f} h" if value >= 100 else f"{value:.3g} h"


def energy(joules: float) -> str:
    """Return an energy in joules or kilowatt-hours."""
    return f"{joules / 3.6e6:.3g} kWh" if joules >= 3.6e4 else f"{joules:.3g} J"


def number(value: object) -> str:
    """Return a number with four significant digits, other values as they are, and a dash for None."""
    if value is None:
        return MISSING
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def percent(share: float) -> str:
    """Return a share of one as a percentage."""
    return f"{100 * share:.1f} %"
