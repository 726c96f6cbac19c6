"""The alerts of one training run, in its first process, and the state of each rule over the records."""

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from app.best_effort import warn
from app.config import AlertConfig, Recipe
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
from app.config.alerts import Act
from app.storage import no_op
from app.telemetry.alerts.notification import Notification
from app.telemetry.alerts.notifier import Notifier
from app.telemetry.record import Record

_POLL_INTERVAL_S = 1.0
_CLOSE_TIMEOUT_S = 15.0
_STRENGTH: dict[Act, int] = {"notify": 0, "pause": 1, "stop": 2}

USUAL_VALUES = 100
"""A value is compared with the median of this many earlier values."""
WARM_UP_VALUES = 20
"""Minimum number of earlier values for a comparison."""


class Alerts:
    """Checks every record against every rule, and says whether training must pause or stop.

    A rule fires when it becomes true, and again only after it was false in between. Each firing prints a line, and
    ``notify`` also queues a notification. A daemon thread watches for silence. May be called from any thread.
    """

    def __init__(
        self,
        alerts: Sequence[AlertConfig],
        notifier: Notifier,
        run_id: str,
        recipe_name: str,
        clock: Callable[[], float] = time.monotonic,
        on_fire: Callable[[Notification], None] = no_op,
    ) -> None:
        """``on_fire`` is called with each alert that fires, whatever its action."""
        rules = [(alert, alert.rule) for alert in alerts]
        self._metrics = [(alert, MetricWatch(rule)) for alert, rule in rules if isinstance(rule, MetricRule)]
        self._silences = [(alert, SilenceWatch(rule)) for alert, rule in rules if isinstance(rule, SilenceRule)]
        self._notifier, self._run_id, self._recipe_name, self._clock = notifier, run_id, recipe_name, clock
        self._on_fire = on_fire
        # Before the first record, silence counts from here.
        self._now = Moment(clock())
        self._unseen = {watch.metric for _, watch in self._metrics}
        self.action: Act = "notify"
        """The strongest action of all alerts that have fired. "notify" does not end training."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        if self._silences:
            threading.Thread(target=self._watch_silence, name="alerts: silence", daemon=True).start()

    @classmethod
    def of(cls, recipe: Recipe, run_id: str, on_fire: Callable[[Notification], None] = no_op) -> "Alerts":
        """Create and start the recipe's alerts, with its receivers."""
        return cls(recipe.alerts, Notifier.of(recipe.notify), run_id, recipe.name, on_fire=on_fire)

    def append(self, *records: Record) -> None:
        """Check records, in order."""
        with self._lock:
            for record in records:
                for alert, metric, value in self._check(record):
                    self._fire(alert, metric, value)
                self._warn_of_unseen()

    def recall(self, records: Iterable[Record]) -> None:
        """Restore the rules' state from the records of the run before it was interrupted. Nothing fires."""
        with self._lock:
            for record in records:
                self._check(record)

    def check_silence(self) -> None:
        """Check the rules on silence. The thread calls this every second."""
        with self._lock:
            silent_s = self._clock() - self._now.time_s
            for alert, watch in self._silences:
                if watch.observe(silent_s):
                    self._fire(alert, None, None)

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Stop watching, and deliver the queued notifications, for at most ``timeout_s`` seconds."""
        self._closed.set()
        self._notifier.close(timeout_s)

    def _check(self, record: Record) -> list[tuple[AlertConfig, str, float]]:
        """Return the alerts that fire on this record, with the metric and its value."""
        self._now = Moment.of(record, self._clock())
        # A record ends the silence.
        for _, silence in self._silences:
            silence.observe(0.0)
        values = record.scalars()
        self._unseen -= values.keys()
        return [
            (alert, watch.metric, value)
            for alert, watch in self._metrics
            if (value := values.get(watch.metric)) is not None and watch.observe(value, self._now)
        ]

    def _fire(self, alert: AlertConfig, metric: str | None, value: float | None) -> None:
        notification = Notification(
            run_id=self._run_id,
            recipe=self._recipe_name,
            rule=alert.sentence,
            action=alert.strongest,
            metric=metric,
            value=value,
            step=self._now.step,
            epoch=self._now.epoch,
        )
        print(notification.line, flush=True)
        self._on_fire(notification)
        if "notify" in alert.do:
            self._notifier.send(notification)
        self.action = max(self.action, alert.strongest, key=_STRENGTH.__getitem__)

    def _warn_of_unseen(self) -> None:
        """After the first epoch, warn of metrics that no record had. Otherwise a misspelt name would go unnoticed."""
        if self._now.epoch_is_over and self._unseen:
            names = ", ".join(sorted(self._unseen))
            warn(f"alerts: no record had {names} so far: check the name")
            self._unseen.clear()

    def _watch_silence(self) -> None:
        while not self._closed.wait(_POLL_INTERVAL_S):
            self.check_silence()


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
