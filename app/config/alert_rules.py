"""What an alert watches for: a sentence such as ``val_loss has not improved for 3 epochs``, read into typed values."""

import re
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from app.config.metrics import MODES

Unit = Literal["s", "steps", "epochs"]
Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Duration:
    """How long something lasts: seconds, optimizer steps or epochs."""

    amount: float
    unit: Unit


@dataclass(frozen=True)
class Threshold:
    """The value lies above, or below, a bound; equal is neither."""

    side: Literal["above", "below"]
    bound: float


@dataclass(frozen=True)
class NotFinite:
    """The value is not a number, or infinite."""


@dataclass(frozen=True)
class HasFallen:
    """The value lies by ``share`` or more below what is usual; 0 < share < 1."""

    share: float


@dataclass(frozen=True)
class NotImproved:
    """The value is not better than the best before it."""

    better: Better


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

FORMS = (
    "METRIC has not improved for D",
    "METRIC above X",
    "METRIC below X",
    "METRIC is not finite",
    "METRIC has fallen by P %",
    "nothing reported for D",
)
"""The sentences that are understood. ``for D`` may follow each of them; it must where it stands here."""

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_UNIT = "s|(?:second|min|minute|h|hour|step|epoch)s?"
METRIC = r"[A-Za-z_][\w./-]*"
DURATION = f"{_NUMBER} ?(?:{_UNIT})"
PERCENT = f"{_NUMBER} ?%"
"""Patterns of a metric's name, of a time such as 3 epochs, and of a share such as 50 %."""
TIMES = "a time such as 10 s, 5 min, 2 h, 20 steps or 3 epochs"
_SENTENCE = re.compile(
    rf"(?P<metric>{METRIC}) (?P<predicate>.+?)(?: for (?P<amount>{_NUMBER}) ?(?P<unit>{_UNIT}))?"
    r"(?: \((?P<better>higher|lower) is better\))?"
)
_THRESHOLD = re.compile(rf"(?:is )?(?P<side>above|below) (?P<bound>{_NUMBER})")
_FALLEN = re.compile(rf"has fallen by (?P<percent>{_NUMBER}) ?%")
_SECONDS = {"s": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0}
_WORDS = (
    *("has", "not", "improved", "is", "above", "below", "finite", "fallen", "by", "nothing", "reported", "for"),
    *("seconds", "min", "minutes", "hours", "steps", "epochs", "(higher", "(lower", "better)"),
)
_BETTER: dict[str, Better] = {
    "loss": "lower",
    "perplexity": "lower",
    "accuracy": "higher",
    "samples_per_s": "higher",
    **{name: "higher" if mode == "max" else "lower" for name, mode in MODES.items()},
}


def parse_rule(sentence: str) -> Rule:
    """Read a sentence of one of the ``FORMS``.

    Raises:
        ValueError: it has another form, or a number in it makes no sense.
    """
    text = " ".join(sentence.split())
    rule = _read(text)
    if rule is None:
        raise ValueError(f"{text!r} is not a rule; {_suggestion(text)}")
    return rule


def _read(text: str) -> Rule | None:
    """Return the rule, or None if the sentence has none of the forms."""
    parts = _SENTENCE.fullmatch(text)
    if parts is None:
        return None
    metric, predicate, better = parts["metric"], parts["predicate"], parts["better"]
    hold = _read_duration(parts["amount"], parts["unit"]) if parts["unit"] else None
    if (metric, predicate) == ("nothing", "reported"):
        return SilenceRule(_seconds(hold))
    condition = _read_condition(metric, predicate, better)
    if condition is None:
        return None
    if isinstance(condition, NotImproved) and hold is None:
        raise ValueError(f"{text!r} does not say for how long: end it with 'for 3 epochs'")
    if better and not isinstance(condition, NotImproved):
        raise ValueError(f"{text!r}: '({better} is better)' goes with 'has not improved' only: leave it out")
    return MetricRule(metric, condition, hold)


def _read_condition(metric: str, predicate: str, better: str | None) -> Condition | None:
    if predicate == "has not improved":
        return NotImproved(_direction(metric, better))
    if predicate == "is not finite":
        return NotFinite()
    if found := _THRESHOLD.fullmatch(predicate):
        return Threshold("above" if found["side"] == "above" else "below", float(found["bound"]))
    if found := _FALLEN.fullmatch(predicate):
        percent = float(found["percent"])
        if not 0.0 < percent < 100.0:
            raise ValueError(f"a fall by {percent:g} % makes no sense: give more than 0 and less than 100 %")
        return HasFallen(percent / 100.0)
    return None


def _read_duration(amount: str, unit: str) -> Duration:
    number = float(amount)
    if number <= 0.0:
        raise ValueError(f"'for {amount} {unit}' is no time: give more than 0")
    kind = unit if unit == "s" else unit.removesuffix("s")
    if kind in _SECONDS:
        return Duration(number * _SECONDS[kind], "s")
    if not number.is_integer():
        raise ValueError(f"'for {amount} {unit}': give a whole number of {kind}s")
    return Duration(number, "steps" if kind == "step" else "epochs")


def _seconds(hold: Duration | None) -> float:
    if hold is None or hold.unit != "s":
        raise ValueError("steps and epochs do not pass while nothing is reported: write 'nothing reported for 10 min'")
    return hold.amount


def known_direction(metric: str) -> Better | None:
    """Return which way a metric is better, as the last words of its name tell; None if they do not."""
    return next((better for ending, better in _BETTER.items() if metric.endswith(ending)), None)


def _direction(metric: str, better: str | None) -> Better:
    """Return which way is better: as the sentence says, or else as the metric's last words tell."""
    if better:
        return "higher" if better == "higher" else "lower"
    if (known := known_direction(metric)) is None:
        raise ValueError(
            f"whether {metric} should rise or fall is not known: end the sentence with '(higher is better)' "
            "or '(lower is better)'"
        )
    return known


def _suggestion(text: str) -> str:
    """Return the sentence with its spelling corrected if that makes it a rule, or else every form of a rule."""
    # Each word is compared with all known ones, so their number is bounded.
    first, *others = text.split()[:20] or [""]
    spelled = [next(iter(get_close_matches(word, _WORDS, n=1)), word) for word in others]
    # The first word is the name of a metric, or a misspelt "nothing".
    for start in (first, "nothing"):
        repaired = " ".join([start, *spelled])
        with suppress(ValueError):
            if _read(repaired):
                return f"did you mean {repaired!r}?"
    return f"expected one of: {'; '.join(FORMS)}; D is {TIMES}"
