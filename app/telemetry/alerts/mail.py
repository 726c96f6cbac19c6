"""Notifications by e-mail."""

import smtplib
import ssl
from email.message import EmailMessage

from app.config import EmailConfig
from app.errors import DeliveryError, TryLaterError
from app.telemetry.alerts.notification import Notification
from app.telemetry.alerts.secret import read_secret


class Mail:
    """Sends notifications through one mail server."""

    def __init__(self, config: EmailConfig) -> None:
        """Raises DeliveryError if the password cannot be read on this node."""
        self._config = config
        self._password = read_secret("notify.email.password", config.password) if config.password else None
        self._trust = ssl.create_default_context()
        self.name = f"mail server {config.host}"

    def send(self, notification: Notification) -> None:
        """One try, on a connection of its own.

        Raises:
            TryLaterError: nobody answered, or the server refused for now (4yz of RFC 5321).
            DeliveryError: the server refused for good, or cannot do what ``security`` asks for.
        """
        try:
            with self._connect() as server:
                if self._config.security == "starttls":
                    server.starttls(context=self._trust)
                if self._config.username and self._password:
                    server.login(self._config.username, self._password)
                refused = server.send_message(self._message(notification))
        except (smtplib.SMTPNotSupportedError, ssl.SSLCertVerificationError) as error:
            raise DeliveryError(str(error)) from error
        except smtplib.SMTPRecipientsRefused as error:
            codes = {code for code, _ in error.recipients.values()}
            raise _refused(min(codes), "it refused every recipient") from error
        except smtplib.SMTPResponseException as error:
            raise _refused(error.smtp_code, f"it answered {error.smtp_code}") from error
        except OSError as error:  # of the network, and smtplib's others
            raise TryLaterError(type(error).__name__) from error
        if refused:
            raise DeliveryError(f"it refused {', '.join(refused)}; the others have it")

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


def _refused(code: int, text: str) -> DeliveryError:
    return TryLaterError(text) if code < 500 else DeliveryError(text)
