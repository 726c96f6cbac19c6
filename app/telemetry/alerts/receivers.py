"""The receivers of notifications, by HTTP, by e-mail and through Apprise, and the secrets that they need."""

import hashlib
import hmac
import logging
import os
import smtplib
import ssl
import time
from email.message import EmailMessage
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from app.config import EmailConfig, WebhookConfig
from app.config.notify import ReceiverConfig, check_url, is_reference
from app.errors import DeliveryError, TryLaterError
from app.telemetry.alerts.notification import Notification

TIMESTAMP_HEADER = "X-Rayloom-Timestamp"
SIGNATURE_HEADER = "X-Rayloom-Signature"


class Receiver(Protocol):
    """Takes one notification at a time."""

    name: str

    def send(self, notification: Notification) -> None:
        """Try once to deliver. Raises DeliveryError; TryLaterError if another try may succeed."""
        ...


class Webhook:
    """Posts notifications as JSON to one URL."""

    def __init__(self, config: WebhookConfig) -> None:
        """Raises DeliveryError if the URL or the secret cannot be read on this node, or the URL is invalid."""
        self._url = _read_url(config.url)
        self._secret = read_secret("notify.webhook.secret", config.secret) if config.secret else None
        self._timeout_s = config.timeout_s
        self.name = f"webhook at {urlsplit(self._url).hostname}"

    def send(self, notification: Notification) -> None:
        """Try once to deliver.

        Raises:
            TryLaterError: nobody answered, or the answer was 429 or 5xx.
            DeliveryError: any other answer than 2xx.
        """
        import httpx  # only webhooks need it

        body = notification.model_dump_json().encode()
        headers = {"Content-Type": "application/json", "User-Agent": "rayloom"} | self._signature(body)
        try:  # streamed: the body of the answer, which may be endless, is never read
            with httpx.stream("POST", self._url, content=body, headers=headers, timeout=self._timeout_s) as answer:
                status = answer.status_code
        except httpx.TransportError as error:
            # The error's text may show the URL.
            raise TryLaterError(type(error).__name__) from error
        if status == httpx.codes.TOO_MANY_REQUESTS or httpx.codes.is_server_error(status):
            raise TryLaterError(f"it answered {status}")
        if not httpx.codes.is_success(status):
            raise DeliveryError(f"it answered {status}").of("receiver.refuses", "notify.webhook")

    def _signature(self, body: bytes) -> dict[str, str]:
        timestamp = str(int(time.time()))
        signature = {SIGNATURE_HEADER: sign(self._secret, timestamp, body)} if self._secret else {}
        return {TIMESTAMP_HEADER: timestamp} | signature


def sign(secret: str, timestamp: str, body: bytes) -> str:
    """Return the signature of a request: ``sha256=`` and the hex HMAC-SHA256 (RFC 2104) of ``timestamp.body``.

    The timestamp, seconds since 1970 in UTC, is signed too, so that an old request cannot be sent again as a new one.
    """
    return "sha256=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def _read_url(given: str) -> str:
    if not is_reference(given):
        return given
    try:
        return check_url(read_secret("notify.webhook.url", given))
    except ValueError:
        # The text of the first error may show the URL.
        raise DeliveryError(f"notify.webhook.url is {given}, which holds no http or https URL").of(
            "url.invalid", "notify.webhook.url"
        ) from None


class Mail:
    """Sends notifications through one mail server."""

    def __init__(self, config: EmailConfig) -> None:
        """Raises DeliveryError if the password cannot be read on this node."""
        self._config = config
        self._password = read_secret("notify.email.password", config.password) if config.password else None
        self._trust = ssl.create_default_context()
        self.name = f"mail server {config.host}"

    def send(self, notification: Notification) -> None:
        """Try once to deliver, on a new connection.

        Raises:
            TryLaterError: nobody answered, or the server refused temporarily (4yz of RFC 5321).
            DeliveryError: the server refused permanently, or does not support the ``security``.
        """
        try:
            with self._connect() as server:
                if self._config.security == "starttls":
                    server.starttls(context=self._trust)
                if self._config.username and self._password:
                    server.login(self._config.username, self._password)
                refused = server.send_message(self._message(notification))
        except (smtplib.SMTPNotSupportedError, ssl.SSLCertVerificationError) as error:
            raise DeliveryError(str(error)).of("mail.not_secure", "notify.email.security") from error
        except smtplib.SMTPRecipientsRefused as error:
            codes = {code for code, _ in error.recipients.values()}
            # If one recipient is refused only for now, another try may reach it.
            raise _refusal(min(codes), "it refused every recipient") from error
        except smtplib.SMTPResponseException as error:
            raise _refusal(error.smtp_code, f"it answered {error.smtp_code}") from error
        except OSError as error:  # the network's errors, and smtplib's others
            raise TryLaterError(type(error).__name__) from error
        if refused:
            raise DeliveryError(f"it refused {', '.join(refused)}; the others have it").of(
                "recipients.refused", "notify.email.to"
            )

    def _connect(self) -> smtplib.SMTP:
        config = self._config
        if config.security == "tls":
            return smtplib.SMTP_SSL(config.host, config.port, timeout=config.timeout_s, context=self._trust)
        return smtplib.SMTP(config.host, config.port, timeout=config.timeout_s)

    def _message(self, notification: Notification) -> EmailMessage:
        message = EmailMessage()
        message["Subject"] = notification.title
        message["From"] = self._config.sender
        message["To"] = ", ".join(self._config.to)
        message.set_content(notification.text)
        return message


def _refusal(code: int, text: str) -> DeliveryError:
    return TryLaterError(text) if code < 500 else DeliveryError(text).of("receiver.refuses", "notify.email")


class AppriseService:
    """Sends notifications to one service that Apprise knows, such as Slack, Teams or Telegram."""

    def __init__(self, reference: str, timeout_s: float = ReceiverConfig().timeout_s) -> None:
        """Read the URL at ``reference``. ``timeout_s`` applies to the connection, and again to the answer.

        Raises:
            DeliveryError: the URL cannot be read on this node, or Apprise does not know it or is not installed.
        """
        url = read_secret("notify.apprise", reference)
        self._service = _service_of(url)
        if self._service is None:
            raise DeliveryError(f"notify.apprise is {reference}, which holds no URL that Apprise knows").of(
                "url.invalid", "notify.apprise"
            )
        self._service.socket_connect_timeout = self._service.socket_read_timeout = timeout_s
        self.name = f"Apprise service {self._service.service_name}"

    def send(self, notification: Notification) -> None:
        """Try once to deliver. Raises TryLaterError: Apprise does not say why a service did not take the message."""
        if not self._service.notify(notification.text, notification.title, notify_type="warning", body_format="text"):
            raise TryLaterError("it did not take it")


def _service_of(url: str) -> Any:
    """Return Apprise's service of a URL, or None if it knows none. Raises DeliveryError without Apprise."""
    try:
        from apprise import Apprise
    except ImportError as error:
        raise DeliveryError("notify.apprise needs Apprise: install rayloom[notify] on the cluster's nodes").of(
            "package.not_installed", "notify.apprise"
        ) from error
    # Apprise's lines may show parts of the URL.
    logging.getLogger("apprise").setLevel(logging.CRITICAL)
    return Apprise.instantiate(url)


def read_secret(key: str, reference: str) -> str:
    """Return the secret at ``reference``, ``env:NAME`` or ``file:/PATH``. The error names the recipe's ``key``.

    Raises:
        DeliveryError: this node has no such variable or file, or it is empty.
    """
    kind, _, where = reference.partition(":")
    try:
        secret = os.environ.get(where, "") if kind == "env" else Path(where).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DeliveryError(f"{key} is {reference}, which cannot be read here ({type(error).__name__})").of(
            "secret.unreadable", key
        ) from None
    if not secret:
        raise DeliveryError(f"{key} is {reference}, which is empty or not set here: set it on the cluster's nodes").of(
            "secret.missing", key
        )
    return secret
