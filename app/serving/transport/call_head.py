"""The headers of a gRPC call, as HAProxy sends them over HTTP/1.1.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

import re
from dataclasses import dataclass

from app.serving.access import combine

CONTENT_TYPE = "application/grpc"
_USUAL = CONTENT_TYPE.encode()
_CONTENT_TYPE = re.compile(rb"application/grpc(\+proto)?\s*(;.*)?", re.IGNORECASE)
ENCODINGS = ("identity", "gzip", "deflate")
"""Supported compressions of messages."""
_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNIT_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


@dataclass(slots=True)
class CallHead:
    """The headers of a call."""

    is_grpc: bool
    """Whether the request is a gRPC call."""
    path: str
    encoding: str
    """The compression of compressed messages."""
    caller: tuple[bytes | None, ...]
    """The headers that ``Caller`` reads, as bytes. Equal headers identify the same caller."""
    timeout_s: float | None
    wrong_timeout: str | None
    """The value of ``grpc-timeout``, if gRPC does not allow it."""
    lines: list[tuple[bytes, bytes]]
    """The headers: names in lower case, and values."""

    @classmethod
    def read(cls, method: bytes, path: bytes, lines: list[tuple[bytes, bytes]]) -> "CallHead":
        """Read the headers of a request. Their names are in lower case."""
        known = combine(lines, b", ")
        content_type, given = known.get(b"content-type", b""), known.get(b"grpc-timeout")
        # gRPC allows at most 8 digits and a unit. Anything else is kept, for the error message.
        timeout = _TIMEOUT.fullmatch(given.decode("latin-1")) if given is not None else None
        return cls(
            method == b"POST" and (content_type == _USUAL or _CONTENT_TYPE.fullmatch(content_type) is not None),
            path.decode("latin-1"),
            known.get(b"grpc-encoding", b"identity").decode("latin-1"),
            (known.get(b"authorization"), known.get(b"host"), known.get(b"origin")),
            int(timeout[1]) * _UNIT_S[timeout[2]] if timeout else None,
            given.decode("latin-1") if given is not None and timeout is None else None,
            lines,
        )

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """Return the headers as text."""
        return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in self.lines]
