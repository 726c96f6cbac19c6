"""Notifications to any service that Apprise knows, such as Slack, Teams or Telegram."""

import logging
from typing import Any

from app.errors import DeliveryError, TryLaterError
from app.telemetry.alerts.notification import Notification
from app.telemetry.alerts.secret import read_secret


class AppriseService:
    """Sends notifications to the service of one Apprise URL."""

    def __init__(self, reference: str, timeout_s: float) -> None:
        """Read the URL that ``reference`` points to; ``timeout_s`` is for connecting, and again for the answer.

        Raises:
            DeliveryError: the URL cannot be read on this node, Apprise does not know it, or is not installed.
        """
        url = read_secret("notify.apprise", reference)
        self._service = _service_of(url)
        if self._service is None:
            raise DeliveryError(f"notify.apprise is {reference}, which holds no URL that Apprise knows")
        self._service.socket_connect_timeout = self._service.socket_read_timeout = timeout_s
        self.name = f"Apprise service {self._service.service_name}"

    def send(self, notification: Notification) -> None:
        """Try once to deliver. Apprise does not tell why a service did not take it. Raises TryLaterError."""
        told = notification.text, notification.title
        if not self._service.notify(*told, notify_type="warning", body_format="text"):
            raise TryLaterError("it did not take it")


def _service_of(url: str) -> Any:
    """Return Apprise's service of a URL, or None if it knows none. Raises DeliveryError."""
    try:
        from apprise import Apprise
    except ImportError as error:
        raise DeliveryError("notify.apprise needs Apprise: install rayloom[notify] on the cluster's nodes") from error
    logging.getLogger("apprise").setLevel(logging.CRITICAL)  # its lines may show parts of the URL
    return Apprise.instantiate(url)
