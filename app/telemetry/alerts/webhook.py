"""Notifications by HTTP, signed."""

import hashlib
import hmac
import time
from urllib.parse import urlsplit

import httpx

from app.config import WebhookConfig
from app.config.notify import check_url, is_reference
from app.errors import DeliveryError, TryLaterError
from app.telemetry.alerts.notification import Notification
from app.telemetry.alerts.secret import read_secret

TIMESTAMP_HEADER = "X-Rayloom-Timestamp"
SIGNATURE_HEADER = "X-Rayloom-Signature"


def sign(secret: str, timestamp: str, body: bytes) -> str:
    """The signature of a request: ``sha256=`` and the hex HMAC-SHA256 (RFC 2104) of ``timestamp.body``.

    The timestamp, seconds since 1970 in UTC, is signed too, so that an old request cannot be sent again as a new one.
    """
    return "sha256=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


class Webhook:
    """Posts notifications as JSON to one URL."""

    def __init__(self, config: WebhookConfig) -> None:
        """Raises DeliveryError if the URL or the secret cannot be read on this node, or the URL is none."""
        self._url = _url(config.url)
        self._secret = read_secret("notify.webhook.secret", config.secret) if config.secret else None
        self._timeout_s = config.timeout_s
        self.name = f"webhook at {urlsplit(self._url).hostname}"

    def send(self, notification: Notification) -> None:
        """One try.

        Raises:
            TryLaterError: nobody answered, or the answer was 429 or 5xx.
            DeliveryError: any other answer than 2xx.
        """
        body = notification.model_dump_json().encode()
        headers = {"Content-Type": "application/json", "User-Agent": "rayloom"} | self._signature(body)
        try:  # a stream: the answer's body, which may have no end, is never read
            with httpx.stream("POST", self._url, content=body, headers=headers, timeout=self._timeout_s) as answer:
                status = answer.status_code
        except httpx.TransportError as error:
            raise TryLaterError(type(error).__name__) from error  # its text may show the URL
        if status == httpx.codes.TOO_MANY_REQUESTS or httpx.codes.is_server_error(status):
            raise TryLaterError(f"it answered {status}")
        if not httpx.codes.is_success(status):
            raise DeliveryError(f"it answered {status}")

    def _signature(self, body: bytes) -> dict[str, str]:
        timestamp = str(int(time.time()))
        signature = {SIGNATURE_HEADER: sign(self._secret, timestamp, body)} if self._secret else {}
        return {TIMESTAMP_HEADER: timestamp} | signature


def _url(given: str) -> str:
    if not is_reference(given):
        return given
    try:
        return check_url(read_secret("notify.webhook.url", given))
    except ValueError:
        raise DeliveryError(f"notify.webhook.url is {given}, which holds no http or https URL") from None
