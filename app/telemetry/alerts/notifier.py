"""Hands notifications to their receivers, each in a thread of its own, so that none delays training or another."""

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from tenacity import (
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_after_attempt,
    stop_when_event_set,
    wait_random_exponential,
)

from app.config import NotifyConfig, WebhookConfig
from app.config.notify import ReceiverConfig
from app.errors import DeliveryError, TryLaterError
from app.telemetry.alerts.mail import Mail
from app.telemetry.alerts.notification import Notification
from app.warnings import warn

_CAPACITY = 100  # notifications that wait for one receiver
_MAX_WAIT_S = 60.0


class Receiver(Protocol):
    """Takes one notification at a time."""

    name: str

    def send(self, notification: Notification) -> None:
        """Try once to deliver. Raises DeliveryError; TryLaterError if another try may succeed."""
        ...


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
        self._queue: SimpleQueue[Notification | None] = SimpleQueue()  # None: the end
        self._has_overflowed = False
        self._thread = threading.Thread(target=self._deliver_all, name=f"alerts: {receiver.name}", daemon=True)
        self._thread.start()

    def put(self, notification: Notification) -> None:
        """Queue a notification; one too many is dropped, with a warning the first time."""
        if self._queue.qsize() < _CAPACITY:
            self._queue.put(notification)
        elif not self._has_overflowed:
            self._has_overflowed = True
            self._warn(f"{_CAPACITY} notifications wait already: more are dropped")

    def finish(self) -> None:
        """Take no more; the thread ends when all is delivered."""
        self._queue.put(None)

    def join(self, deadline_s: float) -> None:
        """Wait for the thread's end until ``time.monotonic()`` reaches ``deadline_s``; then nothing more is tried."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            self._warn("not all was delivered before the end")
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
        """A notifier to the recipe's receivers; one whose secret is missing here is left out, with a warning."""
        makers: list[tuple[Callable[[], Receiver], ReceiverConfig]] = []
        if config.webhook:
            makers.append((partial(_webhook, config.webhook), config.webhook))
        if config.email:
            makers.append((partial(Mail, config.email), config.email))
        makers += [(partial(_apprise, reference), ReceiverConfig()) for reference in config.apprise]
        outboxes = []
        for make, settings in makers:
            try:
                outboxes.append(Outbox(make(), settings))
            except DeliveryError as error:
                warn(f"alerts: {error}; this receiver is told nothing")
        return cls(outboxes)

    def send(self, notification: Notification) -> None:
        """Queue the notification for every receiver; never waits."""
        for outbox in self._outboxes:
            outbox.put(notification)

    def close(self, timeout_s: float) -> None:
        """Deliver what is queued, for at most ``timeout_s`` seconds in all."""
        deadline_s = time.monotonic() + timeout_s
        for outbox in self._outboxes:
            outbox.finish()
        for outbox in self._outboxes:
            outbox.join(deadline_s)


def _webhook(config: WebhookConfig) -> Receiver:
    from app.telemetry.alerts.webhook import Webhook  # imports httpx, which only webhooks need

    return Webhook(config)


def _apprise(reference: str) -> Receiver:
    from app.telemetry.alerts.apprise_service import AppriseService  # imports requests, which only Apprise needs

    return AppriseService(reference, ReceiverConfig().timeout_s)
