"""The alerts of one training run, in its first process."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from app.config import AlertConfig, Recipe
from app.config.alert_rules import MetricRule, SilenceRule
from app.config.alerts import Act
from app.telemetry.alerts.notification import Action, Notification
from app.telemetry.alerts.notifier import Notifier
from app.telemetry.alerts.watch import MetricWatch, Moment, SilenceWatch
from app.telemetry.record import Record
from app.warnings import warn

_LOOK_INTERVAL_S = 1.0
_CLOSE_TIMEOUT_S = 15.0
_ASKED: dict[Act, Action] = {"notify": Action.CONTINUE, "pause": Action.PAUSE, "stop": Action.STOP}


class Alerts:
    """Checks every record against every rule, and says what the loop must do.

    A rule fires when it comes true, and again only after it was false in between. Each firing is a line in the log;
    ``notify`` also queues a notification. A daemon thread watches for silence. May be called from any thread.
    """

    def __init__(
        self,
        alerts: Sequence[AlertConfig],
        notifier: Notifier,
        run_id: str,
        recipe_name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        rules = [(alert, alert.rule) for alert in alerts]
        self._metrics = [(alert, MetricWatch(rule)) for alert, rule in rules if isinstance(rule, MetricRule)]
        self._silences = [(alert, SilenceWatch(rule)) for alert, rule in rules if isinstance(rule, SilenceRule)]
        self._notifier, self._run_id, self._recipe_name, self._clock = notifier, run_id, recipe_name, clock
        self._now = Moment(clock())
        self._unseen = {watch.metric for _, watch in self._metrics}
        self._asked = Action.CONTINUE
        self._lock = threading.Lock()
        self._closed = threading.Event()
        if self._silences:
            threading.Thread(target=self._look_for_silence, name="alerts: silence", daemon=True).start()

    @classmethod
    def of(cls, recipe: Recipe, run_id: str) -> "Alerts":
        """The recipe's alerts, at work, with its receivers."""
        return cls(recipe.alerts, Notifier.of(recipe.notify), run_id, recipe.name)

    def append(self, *records: Record) -> None:
        """Check some records, in their order."""
        with self._lock:
            for record in records:
                for alert, metric, value in self._check(record):
                    self._fire(alert, metric, value)
                self._warn_of_unseen()

    def recall(self, records: Iterable[Record]) -> None:
        """Take in what the run reported before it was interrupted; nothing fires, or fires again, for it."""
        with self._lock:
            for record in records:
                self._check(record)

    def pending(self) -> Action:
        """The strongest action that was asked for; once asked for, it stays so."""
        return self._asked

    def check_silence(self) -> None:
        """Check the rules on silence; the thread does so every second."""
        with self._lock:
            silent_s = self._clock() - self._now.time_s
            for alert, watch in self._silences:
                if watch.observe(silent_s):
                    self._fire(alert, None, None)

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Watch no more, and deliver what is queued, for at most ``timeout_s`` seconds."""
        self._closed.set()
        self._notifier.close(timeout_s)

    def _check(self, record: Record) -> list[tuple[AlertConfig, str, float]]:
        """The alerts that come true with this record, with the metric and its value."""
        self._now = Moment.of(record, self._clock())
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
        if "notify" in alert.do:
            self._notifier.send(notification)
        self._asked = max(self._asked, _ASKED[alert.strongest])

    def _warn_of_unseen(self) -> None:
        """After the first epoch, name the metrics that no record had: a slip of the pen makes no noise else."""
        if self._now.epoch_is_over and self._unseen:
            names = ", ".join(sorted(self._unseen))
            warn(f"alerts: no record had {names} so far: check the name")
            self._unseen.clear()

    def _look_for_silence(self) -> None:
        while not self._closed.wait(_LOOK_INTERVAL_S):
            self.check_silence()
