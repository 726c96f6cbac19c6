"""The delivery of notifications. Each receiver has its own thread, so none delays training or another receiver."""

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue

from tenacity import (
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_after_attempt,
    stop_when_event_set,
    wait_random_exponential,
)

from app.best_effort import warn
from app.config import NotifyConfig
from app.config.notify import ReceiverConfig
from app.errors import DeliveryError, TryLaterError
from app.telemetry.alerts.notification import Notification
from app.telemetry.alerts.receivers import AppriseService, Mail, Receiver, Webhook

_MAX_QUEUED = 100  # per receiver
_MAX_WAIT_S = 60.0


class Outbox:
    """The queue of one receiver, and the thread that empties it."""

    def __init__(self, receiver: Receiver, config: ReceiverConfig) -> None:
        self._receiver = receiver
        self._too_late = threading.Event()
        self._retrying = Retrying(
            sleep=sleep_using_event(self._too_late),
            stop=stop_after_attempt(config.attempts) | stop_when_event_set(self._too_late),
            wait=wait_random_exponential(multiplier=config.retry_wait_s, max=_MAX_WAIT_S),
            retry=retry_if_exception_type(TryLaterError),
            reraise=True,
        )
        self._queue: SimpleQueue[Notification | None] = SimpleQueue()  # None ends the thread
        self._has_overflowed = False
        self._thread = threading.Thread(target=self._deliver_all, name=f"alerts: {receiver.name}", daemon=True)
        self._thread.start()

    def put(self, notification: Notification) -> None:
        """Queue a notification. If the queue is full, drop it, with a warning the first time."""
        if self._queue.qsize() < _MAX_QUEUED:
            self._queue.put(notification)
        elif not self._has_overflowed:
            self._has_overflowed = True
            self._warn(f"{_MAX_QUEUED} notifications wait already: more are dropped")

    def finish(self) -> None:
        """Accept no more. The thread ends when everything queued is delivered."""
        self._queue.put(None)

    def join(self, deadline_s: float) -> None:
        """Wait for the thread's end until ``time.monotonic()`` reaches ``deadline_s``. Then give up the rest."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            self._warn("not all was delivered before the end")
        # This also wakes a retry that sleeps.
        self._too_late.set()

    def _deliver_all(self) -> None:
        while (notification := self._queue.get()) is not None and not self._too_late.is_set():
            try:
                self._retrying(self._receiver.send, notification)
            except DeliveryError as error:
                self._warn(f"gave up on {notification.rule!r} ({error})")
            except Exception as error:  # the next notification may do better
                self._warn(f"gave up on {notification.rule!r} ({type(error).__name__})")

    def _warn(self, text: str) -> None:
        if not self._too_late.is_set():
            warn(f"alerts: {self._receiver.name}: {text}")


class Notifier:
    """Sends each notification to every receiver."""

    def __init__(self, outboxes: Iterable[Outbox] = ()) -> None:
        self._outboxes = list(outboxes)

    @classmethod
    def of(cls, config: NotifyConfig) -> "Notifier":
        """Create a notifier to the recipe's receivers. If a secret is missing here, warn and skip its receiver."""
        factories: list[tuple[Callable[[], Receiver], ReceiverConfig]] = []
        if config.webhook:
            factories.append((partial(Webhook, config.webhook), config.webhook))
        if config.email:
            factories.append((partial(Mail, config.email), config.email))
        factories += [(partial(AppriseService, reference), ReceiverConfig()) for reference in config.apprise]
        outboxes = []
        for create_receiver, settings in factories:
            try:
                outboxes.append(Outbox(create_receiver(), settings))
            except DeliveryError as error:
                warn(f"alerts: {error}; this receiver gets no notifications")
        return cls(outboxes)

    def send(self, notification: Notification) -> None:
        """Queue the notification for every receiver. Never waits."""
        for outbox in self._outboxes:
            outbox.put(notification)

    def close(self, timeout_s: float) -> None:
        """Deliver the queued notifications, for at most ``timeout_s`` seconds in total."""
        deadline_s = time.monotonic() + timeout_s
        # All are told to finish before any is waited for, so that they deliver at the same time.
        for outbox in self._outboxes:
            outbox.finish()
        for outbox in self._outboxes:
            outbox.join(deadline_s)
