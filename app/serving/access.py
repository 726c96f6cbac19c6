"""Access to the endpoint: with its token, from its own machine only, or for everybody.

The bearer scheme is that of https://www.rfc-editor.org/rfc/rfc6750.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import AnyStr, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from app.config import ServeConfig
from app.errors import ClusterError, UnauthorizedError, short_repr
from app.storage import HOME

_SEND = "send 'Authorization: Bearer TOKEN', over gRPC as metadata; the token is in the file that jobs.deploy has named"


class Caller(NamedTuple):
    """The headers that identify the sender of a request. A repeated header keeps all its values."""

    authorization: str | None
    host: str | None = None
    origin: str | None = None

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Self:
        """Read headers with lower-case names."""
        return cls(headers.get("authorization"), headers.get("host"), headers.get("origin"))


class Access(BaseModel):
    """The condition for an answer. Without a field set, everybody is answered."""

    model_config = ConfigDict(frozen=True)

    token_sha256: str | None = None
    """The hex digest of the token that requests must send. Ray stores only the digest, so the token stays secret."""
    only_local: bool = False
    """Whether requests must come from this machine and address it. Serve's gRPC ports listen on all interfaces."""

    @property
    def needs_token(self) -> bool:
        """Whether requests must send a token."""
        return self.token_sha256 is not None

    @classmethod
    def by_token(cls, token: str) -> Self:
        """Answer requests that send this token."""
        return cls(token_sha256=_digest(token))

    def check(self, caller: Caller) -> None:
        """Check the headers of a request. Digests are compared in constant time.

        Raises:
            UnauthorizedError: the token is missing or wrong, or another site's page may have sent the request.
        """
        if self.only_local:
            require_local_names(caller)
        if self.token_sha256 is None:
            return
        if caller.authorization is None:
            raise UnauthorizedError(f"this endpoint asks for a token: {_SEND}")
        # A token has no comma, so there are several values. Choosing one would be a guess.
        if "," in caller.authorization:
            raise UnauthorizedError(f"Authorization has several values, expected one: {_SEND}")
        scheme, _, token = caller.authorization.partition(" ")
        # The scheme is case-insensitive (RFC 9110).
        if scheme.lower() != "bearer" or not hmac.compare_digest(_digest(token.strip()), self.token_sha256):
            raise UnauthorizedError(f"that is not this endpoint's token: {_SEND}")

    def check_peer(self, peer: str) -> None:
        """Check a caller's address, as gRPC writes it: ``ipv4:10.0.0.7:1234``, ``ipv6:%5B::1%5D:1234``.

        Raises:
            UnauthorizedError: the caller is another machine, and only this one may call.
        """
        # gRPC percent-encodes the brackets of an IPv6 address. A Unix socket has no host, and is local.
        scheme, _, address = unquote(peer).partition(":")
        host = address.rpartition(":")[0].strip("[]")
        if self.only_local and scheme != "unix" and not is_loopback(host):
            raise UnauthorizedError(
                "this endpoint answers its own machine only: deploy with serve.host, and it asks others for a token"
            )


class LocalOnly:
    """Middleware for a server on loopback that refuses requests which another site's page may have sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        app = self._app
        if scope["type"] == "http":
            try:
                require_local_names(Caller.of(headers_of(scope)))
            except UnauthorizedError as error:
                app = JSONResponse({"error": str(error)}, 401)
        await app(scope, receive, send)


def require_local_names(caller: Caller) -> None:
    """Refuse a request that does not address this machine by name, or that comes from another site's page.

    A site's owner can point its name at this machine (DNS rebinding), and its page can send a POST to any address. A
    browser sends the requested name as ``Host``, and the page's site as ``Origin``.

    Raises:
        UnauthorizedError: ``Host`` or ``Origin`` does not name this machine.
    """
    for header, given in (("Host", caller.host), ("Origin", caller.origin)):
        if given is not None and not is_loopback(_host_in(given)):
            raise UnauthorizedError(
                f"{header} is {short_repr(given)}, and only this machine is answered: use 127.0.0.1 or localhost"
            )


def _host_in(given: str) -> str:
    """Return the host in ``HOST:PORT`` or ``SCHEME://HOST:PORT``."""
    try:
        return urlsplit(given if "://" in given else f"//{given}").hostname or ""
    except ValueError:
        return ""


def token_file_of(config: ServeConfig) -> Path | None:
    """Return the file of the token that the recipe requires; None if it requires none."""
    if config.token_file:
        return Path(config.token_file)
    needs_token = config.auth == "token" or (config.auth == "auto" and not is_loopback(config.host))
    return ENDPOINT_TOKEN_FILE if needs_token else None


def access_of(config: ServeConfig, before: Access) -> Access:
    """Return the access that the recipe asks for.

    ``auto`` requires a token if other machines reach the host, or if the endpoint required one ``before``. So the
    recipe of another model cannot open a protected endpoint.

    Raises:
        ClusterError: the token's file cannot be read or created, or others could read it.
    """
    if file := token_file_of(config):
        return Access.by_token(read_token(file) if config.token_file else make_token(file))
    if config.auth == "none":
        return Access()
    # Without a token, the endpoint answers this machine only, because Serve's gRPC port is open to all.
    return before if before.token_sha256 else Access(only_local=True)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a listener on ``host``."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        # Other names are not resolved: they count as reachable from elsewhere, which is the safe side.
        return host == "localhost"
    # A listener for both families writes an IPv4 caller as ::ffff:127.0.0.1.
    return bool((getattr(address, "ipv4_mapped", None) or address).is_loopback)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


ENDPOINT_TOKEN_FILE = HOME / "endpoint_token"
"""The token that Rayloom created. It outlives the cluster, because clients keep using it."""
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{32,}=*")
_ADVICE = "'umask 077; openssl rand -hex 32 > FILE' makes one"


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        ClusterError: the file is missing, others could read it, or it holds no token.
    """
    try:
        with path.open(encoding="utf-8") as file:
            # Check the open file, because the path may name another one by now.
            mode = os.fstat(file.fileno()).st_mode & 0o777
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ClusterError(f"the token's file {str(path)!r} cannot be read ({reason}): {_ADVICE}").of(
            "file.unreadable"
        ) from error
    if mode & 0o077:
        raise ClusterError(f"the token's file {str(path)!r} has mode {mode:o}, so others can read it: expected 600").of(
            "token.mode"
        )
    if not _TOKEN.fullmatch(token):
        raise ClusterError(
            f"the token's file {str(path)!r} holds no token: expected 32 or more of the characters that a header may "
            f"carry (letters, digits and -._~+/); {_ADVICE}"
        ).of("token.missing")
    return token


def make_token(path: Path) -> str:
    """Return the token in a file. Create the file with a new token if it is missing.

    Raises:
        ClusterError: as ``read_token``, or the file cannot be created.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Temporary files have mode 600.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            with contextlib.suppress(FileExistsError):
                os.link(file.name, path)  # atomic, even if two processes create it at once
    except OSError as error:
        raise ClusterError(
            f"the token's file {str(path)!r} cannot be created ({error.strerror}): name one with serve.token_file"
        ).of("token.not_written", "serve.token_file") from error
    # Read from the file, because another process may have created it first.
    return read_token(path)


def combine(lines: Sequence[tuple[AnyStr, AnyStr]], comma: AnyStr) -> dict[AnyStr, AnyStr]:
    """Return headers by name. The values of a repeated header are joined, so none is ignored.

    https://www.rfc-editor.org/rfc/rfc9110#section-5.3

    Args:
        lines: pairs of a lower-case name and a value.
        comma: ``", "``, as text or bytes.
    """
    headers = dict(lines)
    if len(headers) < len(lines):
        headers = {}
        for name, value in lines:
            headers[name] = headers[name] + comma + value if name in headers else value
    return headers


def headers_of(scope: Scope) -> dict[str, str]:
    """Return the headers by lower-case name."""
    return combine([(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]], ", ")
