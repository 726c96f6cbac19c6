"""Who the endpoint answers: whoever shows its token, only its own machine, or everybody.

The bearer scheme is that of https://www.rfc-editor.org/rfc/rfc6750.
"""

import hashlib
import hmac
import ipaddress
from pathlib import Path
from typing import Self
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict

from app.config import ServeConfig
from app.errors import UnauthorizedError
from app.serving.token_file import ENDPOINT_TOKEN_FILE, make_token, read_token

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
