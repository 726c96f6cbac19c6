"""The state of a rule over the records, which says when it fires."""

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from app.config.alert_rules import (
    Condition,
    HasFallen,
    MetricRule,
    NotFinite,
    NotImproved,
    SilenceRule,
    Threshold,
    Unit,
)
from app.telemetry.record import Record

USUAL_VALUES = 100
"""A value is compared with the median of this many earlier values."""
WARM_UP_VALUES = 20
"""Minimum number of earlier values for a comparison."""


@dataclass(frozen=True)
class Moment:
    """The time of a record: the clock in seconds, optimizer steps so far, the epoch and whether it has ended."""

    time_s: float
    step: int | None = None
    epoch: int | None = None
    epoch_is_over: bool = False

    @classmethod
    def of(cls, record: Record, time_s: float) -> "Moment":
        """Return the moment of a record that came at ``time_s``."""
        return cls(time_s, record.step, record.epoch, epoch_is_over=record.kind == "epoch")

    def since(self, began: "Moment", unit: Unit) -> float:
        """Return seconds, steps or whole epochs from ``began`` to now, including the step or epoch of ``began``."""
        if unit == "s":
            return self.time_s - began.time_s
        if unit == "steps":
            return (self.step or 0) - (began.step or 0) + 1
        return (self.epoch or 0) - (began.epoch or 0) + self.epoch_is_over


class MetricWatch:
    """Follows one metric for one rule."""

    def __init__(self, rule: MetricRule) -> None:
        self.metric = rule.metric
        self._is_true, self._hold = _test_of(rule.condition), rule.hold
        self._began: Moment | None = None
        self._fired = False

    def observe(self, value: float, now: Moment) -> bool:
        """Return whether the rule fires on this value: once, and again after it was false in between."""
        if not self._is_true(value):
            self._began, self._fired = None, False
            return False
        self._began = self._began or now
        if self._fired or (self._hold and now.since(self._began, self._hold.unit) < self._hold.amount):
            return False
        self._fired = True
        return True


class SilenceWatch:
    """Follows the time since the last record, for one rule."""

    def __init__(self, rule: SilenceRule) -> None:
        self._seconds = rule.seconds
        self._fired = False

    def observe(self, silent_s: float) -> bool:
        """Return whether the rule fires after ``silent_s`` seconds without a record: once in each silence."""
        was_fired, self._fired = self._fired, silent_s >= self._seconds
        return self._fired and not was_fired


def _test_of(condition: Condition) -> Callable[[float], bool]:
    match condition:
        case Threshold("above", bound):
            return lambda value: value > bound
        case Threshold(_, bound):
            return lambda value: value < bound
        case NotFinite():
            return lambda value: not math.isfinite(value)
        case HasFallen(share):
            return _HasFallen(share)
        case NotImproved(better):
            return _HasNotImproved(1.0 if better == "higher" else -1.0)


class _HasFallen:
    """Compares with the median of earlier values, except those that had fallen themselves."""

    def __init__(self, share: float) -> None:
        self._kept = 1.0 - share
        self._usual: deque[float] = deque(maxlen=USUAL_VALUES)

    def __call__(self, value: float) -> bool:
        is_warm = len(self._usual) >= WARM_UP_VALUES
        has_fallen = is_warm and value <= self._kept * statistics.median(self._usual)
        # A long fall would otherwise soon count as usual.
        if not has_fallen and math.isfinite(value):
            self._usual.append(value)
        return has_fallen


class _HasNotImproved:
    """Compares with the best earlier value. NaN is never better."""

    def __init__(self, sign: float) -> None:
        self._sign = sign
        self._best = -math.inf

    def __call__(self, value: float) -> bool:
        # This is also true for NaN.
        if not self._sign * value > self._best:
            return True
        self._best = self._sign * value
        return False
