"""Who the endpoint answers: whoever shows its token, only its own machine, or everybody.

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
from pathlib import Path
from typing import Self
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict

from app.config import ServeConfig
from app.errors import ClusterError, UnauthorizedError
from app.storage import HOME

_SEND = "send 'Authorization: Bearer TOKEN', over gRPC as metadata; the token is in the file that jobs.deploy has named"


class Access(BaseModel):
    """Who is answered. Without a field set, everybody."""

    model_config = ConfigDict(frozen=True)

    token_sha256: str | None = None
    """The digest, in hex, of the token that a request must show; so what Ray knows of an endpoint is no secret."""
    only_local: bool = False
    """Whether requests must come from this machine: Serve's ports for gRPC are open to others wherever HTTP is not."""

    @classmethod
    def by_token(cls, token: str) -> Self:
        """For whoever shows it."""
        return cls(token_sha256=_digest(token))

    def check(self, authorization: str | None) -> None:
        """Look at the ``Authorization`` of a request. The digests are compared in constant time.

        Raises:
            UnauthorizedError: the token is missing, or another one.
        """
        if self.token_sha256 is None:
            return
        if authorization is None:
            raise UnauthorizedError(f"this endpoint asks for a token: {_SEND}")
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(_digest(token.strip()), self.token_sha256):
            raise UnauthorizedError(f"that is not this endpoint's token: {_SEND}")

    def check_peer(self, peer: str) -> None:
        """Look at where a call comes from, as gRPC writes it: ``ipv4:10.0.0.7:1234``, ``ipv6:%5B::1%5D:1234``.

        Raises:
            UnauthorizedError: another machine, if only this one may call.
        """
        scheme, _, address = unquote(peer).partition(":")
        host = address.rpartition(":")[0].strip("[]")
        if self.only_local and scheme != "unix" and not is_loopback(host):
            raise UnauthorizedError(
                "this endpoint answers its own machine only: deploy with serve.host, and it asks others for a token"
            )


def token_file_of(config: ServeConfig) -> Path | None:
    """Where the token lies that the recipe asks for, if it asks for one."""
    if config.token_file:
        return Path(config.token_file)
    asks = config.auth == "token" or (config.auth == "auto" and not is_loopback(config.host))
    return ENDPOINT_TOKEN_FILE if asks else None


def access_of(config: ServeConfig, before: Access) -> Access:
    """Who is to be answered, as the recipe says.

    ``auto`` asks for a token where other machines reach the host, and where the endpoint asked for one ``before``:
    the recipe of another model does not open it.

    Raises:
        ClusterError: the token's file cannot be read or made, or others could read it.
    """
    if file := token_file_of(config):
        return Access.by_token(read_token(file) if config.token_file else make_token(file))
    if config.auth == "none":
        return Access()
    return before if before.token_sha256 else Access(only_local=True)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return bool((getattr(address, "ipv4_mapped", None) or address).is_loopback)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


ENDPOINT_TOKEN_FILE = HOME / "endpoint_token"
"""Where Rayloom keeps the token that it has made; it outlives the cluster, for clients know it."""
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{32,}=*")
_ADVICE = "'umask 077; openssl rand -hex 32 > FILE' makes one"


def read_token(path: Path) -> str:
    """The token in a file.

    Raises:
        ClusterError: there is no such file, others could read it, or it holds no token.
    """
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ClusterError(f"the token's file {str(path)!r} cannot be read ({reason}): {_ADVICE}") from error
    if mode & 0o077:
        raise ClusterError(f"the token's file {str(path)!r} has mode {mode:o}, so others can read it: expected 600")
    if not _TOKEN.fullmatch(token):
        raise ClusterError(
            f"the token's file {str(path)!r} holds no token: expected 32 or more of the characters that a header may "
            f"carry (letters, digits and -._~+/); {_ADVICE}"
        )
    return token


def make_token(path: Path) -> str:
    """The token in a file, which is made with a new one if there is none.

    Raises:
        ClusterError: as ``read_token``, or the file cannot be made.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8") as file:  # of mode 600
            file.write(secrets.token_hex(32))
            file.flush()
            with contextlib.suppress(FileExistsError):
                os.link(file.name, path)  # whole, or not at all, also when two of us make it
    except OSError as error:
        raise ClusterError(
            f"the token's file {str(path)!r} cannot be made ({error.strerror}): name one with serve.token_file"
        ) from error
    return read_token(path)
