"""What an alert watches for, as typed values."""

import re
from dataclasses import dataclass
from typing import Literal

from app.config.metrics import MODES

Unit = Literal["s", "steps", "epochs"]
Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Duration:
    """How long something lasts: seconds, optimizer steps or epochs."""

    amount: float
    unit: Unit

    @classmethod
    def of(cls, text: str) -> "Duration":
        """Read a time that matches ``TIME``. Raises ValueError if it is 0, or a part of a step or epoch."""
        number, kind = re.split(r" ?(?=[a-z])", text, maxsplit=1)
        amount, kind = float(number), kind if kind == "s" else kind.removesuffix("s")
        if amount == 0.0:
            raise ValueError(f"{text!r} is no time: give more than 0")
        if kind in _SECONDS:
            return cls(amount * _SECONDS[kind], "s")
        if not amount.is_integer():
            raise ValueError(f"{text!r}: give a whole number of {kind}s")
        return cls(amount, "steps" if kind == "step" else "epochs")


@dataclass(frozen=True)
class Threshold:
    """The value lies above, or below, a bound; equal is neither."""

    side: Literal["above", "below"]
    bound: float

    def __str__(self) -> str:
        return f"{self.side} {repr(self.bound).removesuffix('.0')}"


@dataclass(frozen=True)
class NotFinite:
    """The value is not a number, or infinite."""

    def __str__(self) -> str:
        return "is not finite"


@dataclass(frozen=True)
class HasFallen:
    """The value lies by ``share`` or more below what is usual; 0 < share < 1."""

    share: float

    @classmethod
    def by(cls, percent: str) -> "HasFallen":
        """Read a share that matches ``PERCENT``. Raises ValueError if it makes no sense."""
        share = float(percent.rstrip(" %")) / 100.0
        if not 0.0 < share < 1.0:
            raise ValueError(f"a fall by {percent} makes no sense: give more than 0 and less than 100 %")
        return cls(share)

    def __str__(self) -> str:
        return f"has fallen by {100 * self.share:g} %"


@dataclass(frozen=True)
class NotImproved:
    """The value is not better than the best before it."""

    better: Better

    def __str__(self) -> str:
        return "has not improved"


Condition = Threshold | NotFinite | HasFallen | NotImproved


@dataclass(frozen=True)
class MetricRule:
    """A condition on a reported metric, and for how long it must hold; None: once is enough."""

    metric: str
    condition: Condition
    hold: Duration | None


@dataclass(frozen=True)
class SilenceRule:
    """Nothing at all is reported for so many seconds."""

    seconds: float


Rule = MetricRule | SilenceRule

METRIC = r"[A-Za-z_][\w./-]*"
_NUMBER = r"(?:\d+\.?\d*|\.\d+)"
CLOCK_TIME = f"{_NUMBER} ?(?:s|(?:second|min|minute|h|hour)s?)"
TIME = f"{_NUMBER} ?(?:s|(?:second|min|minute|h|hour|step|epoch)s?)"
PERCENT = f"{_NUMBER} ?%"
"""Patterns of a metric's name, of a time such as 5 min, of one that may be 3 epochs, and of a share such as 50 %."""
CLOCK_TIMES = "a time such as 10 s, 5 min or 2 h"
TIMES = "a time such as 10 s, 5 min, 2 h, 20 steps or 3 epochs"
_SECONDS = {"s": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0}
_BETTER: dict[str, Better] = {
    "loss": "lower",
    "perplexity": "lower",
    "accuracy": "higher",
    "samples_per_s": "higher",
    **{name: "higher" if mode == "max" else "lower" for name, mode in MODES.items()},
}


def direction_of(metric: str) -> Better:
    """Return which way a metric is better, as the last words of its name tell. Raises ValueError if they do not."""
    for ending, better in _BETTER.items():
        if metric.endswith(ending):
            return better
    raise ValueError(f"whether {metric} should rise or fall is not known: add better, which is higher or lower")
