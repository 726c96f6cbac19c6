"""The receivers of alerts, and references to their secrets."""

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, model_validator

from app.config.section import Section

_REFERENCE = re.compile(r"env:[A-Za-z_]\w*|file:/.+")


def is_reference(text: str) -> bool:
    """Return whether ``text`` says where a secret lies: ``env:NAME`` or ``file:/PATH``."""
    return _REFERENCE.fullmatch(text) is not None


def check_url(url: str) -> str:
    """Return ``url``, if notifications can be posted there. Raises ValueError, without showing what it may hide."""
    parts = urlsplit(url)
    try:
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # its message quotes the port, which may be the start of a password
        is_address = False
    if not is_address:
        raise ValueError("expected a URL such as https://example.org/hook, or env:NAME or file:/PATH that holds it")
    if parts.username or parts.password:
        raise ValueError(
            "the URL carries a password, which is not sent: give a URL with a token in its path or query, by "
            "env:NAME or file:/PATH"
        )
    return url


def _check_url_or_reference(given: str) -> str:
    return given if is_reference(given) else check_url(given)


def _check_secret(given: object) -> object:
    if given is None or (isinstance(given, str) and is_reference(given)):
        return given
    raise ValueError(
        "a recipe must not contain secrets: write env:NAME, a variable in the environment of the cluster's nodes, "
        "or file:/PATH, a file on them"
    )


_REFERENCE_HELP = (
    "env:NAME or file:/PATH, read where training runs: from the environment of the cluster's nodes, or a file on them. "
    "Never the secret itself, and never through a job's runtime environment, which Ray logs and shows"
)
Secret = Annotated[str | None, BeforeValidator(_check_secret)]
SecretUrl = Annotated[str, BeforeValidator(_check_secret)]
Url = Annotated[str, AfterValidator(_check_url_or_reference)]
Address = Annotated[str, Field(pattern=r"^[^@\s]+@[^@\s]+$")]


class ReceiverConfig(Section):
    """How long to try to reach a receiver."""

    timeout_s: Annotated[float, Field(gt=0.0)] = Field(default=10.0, description="for each try")
    attempts: PositiveInt = Field(default=5, description="tries before a notification is given up")
    retry_wait_s: Annotated[float, Field(gt=0.0)] = Field(
        default=1.0, description="longest wait before the second try; it doubles with each, up to a minute"
    )


class WebhookConfig(ReceiverConfig):
    """An HTTP receiver: each notification is one POST of JSON."""

    url: Url = Field(description="http or https; env:NAME or file:/PATH where the address itself is a secret")
    secret: Secret = Field(default=None, description=f"the key of the signature; null: unsigned. {_REFERENCE_HELP}")


class EmailConfig(ReceiverConfig):
    """A mail server, and who gets a mail for each notification."""

    host: str = Field(description="name of the mail server")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(default=587, description="port of the mail server")
    security: Literal["starttls", "tls", "none"] = Field(
        default="starttls", description="starttls: usual on port 587; tls: usual on port 465"
    )
    username: str | None = Field(default=None, description="to log in with; null: no login")
    password: Secret = Field(default=None, description=_REFERENCE_HELP)
    sender: Address = Field(description="address that mails come from")
    to: Annotated[list[Address], Field(min_length=1)] = Field(description="addresses that mails go to")

    @model_validator(mode="after")
    def _login_is_whole_and_private(self) -> "EmailConfig":
        if (self.username is None) != (self.password is None):
            raise ValueError("a login needs both username and password: give both or neither")
        if self.password and self.security == "none":
            raise ValueError("security is none, which would show the password to the network: set starttls or tls")
        return self


class NotifyConfig(Section):
    """Who is told of an alert, beside the log."""

    webhook: WebhookConfig | None = Field(default=None, description="an HTTP receiver; default: none")
    email: EmailConfig | None = Field(default=None, description="a mail server; default: no mail")
    apprise: list[SecretUrl] = Field(
        default=[],
        description="URLs of Apprise for other services, such as Slack or Telegram; needs the extra notify. "
        f"{_REFERENCE_HELP}",
        examples=[["env:SLACK_URL"]],
    )
