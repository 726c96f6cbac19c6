"""The headers of a gRPC call over HTTP/2.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hpack import Decoder
from hpack.table import HeaderTable

MAX_HEADER_BYTES = 2**16
"""Of all names and values, plus 32 for each header. HAProxy passes on a quarter of this at most."""
_MAX_KNOWN, _MAX_KNOWN_BYTES = 256, 8192
"""Heads that are kept, and the bytes of each. A small block may decode to many bytes."""
_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
_OF_HTTP_1 = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})
_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNIT_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_RESIZES = 0b001_00000
"""The first bits of a block that resizes the header table: https://www.rfc-editor.org/rfc/rfc7541#section-6.3"""


@dataclass(frozen=True, slots=True)
class CallHead:
    """The headers of a call."""

    method: str
    path: str
    content_type: str
    encoding: str
    """The compression of compressed messages."""
    authorization: str | None
    timeout_s: float | None
    wrong_timeout: str | None
    """The value of ``grpc-timeout``, if gRPC does not allow it."""
    metadata: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, headers: Iterable[tuple[bytes, bytes]]) -> "CallHead | None":
        """Read the headers of a call. Return None if HTTP/2 does not allow them."""
        pseudo: dict[bytes, bytes] = {}
        metadata: list[tuple[str, str]] = []
        for name, value in headers:
            if name.startswith(b":"):
                if metadata or name in pseudo or name not in _PSEUDO:
                    return None
                pseudo[name] = value
            elif not name or name.lower() != name or name in _OF_HTTP_1:
                return None
            else:
                metadata.append((name.decode("latin-1"), value.decode("latin-1")))
        known = dict(metadata)
        told = known.get("grpc-timeout")
        timeout = _TIMEOUT.fullmatch(told or "")
        if not {b":method", b":scheme", b":path"} <= pseudo.keys():
            return None
        return cls(
            pseudo[b":method"].decode("latin-1"),
            pseudo[b":path"].decode("latin-1"),
            known.get("content-type", ""),
            known.get("grpc-encoding", ""),
            known.get("authorization"),
            int(timeout[1]) * _UNIT_S[timeout[2]] if timeout else None,
            told if timeout is None else None,
            tuple(metadata),
        )


class HeadReader:
    """Reads the header blocks of a connection. A block that came before and changed nothing is not decoded again."""

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=MAX_HEADER_BYTES)
        self._table = self._decoder.header_table = _CountingTable()
        self._known: dict[bytes, CallHead | None] = {}

    def read(self, block: bytes) -> CallHead | None:
        """Return the head of a call, or None as ``CallHead.read`` does.

        Raises:
            HPACKError: the block is invalid or too large. The blocks after it cannot be read.
        """
        if block in self._known:
            return self._known[block]
        before = self._table.added
        headers = self._decoder.decode(block, raw=True)
        head = CallHead.read(headers)
        if self._table.added != before or (block and block[0] & 0b111_00000 == _RESIZES):
            self._known.clear()
        elif len(block) + sum(len(name) + len(value) for name, value in headers) <= _MAX_KNOWN_BYTES:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[block] = head
        return head


class _CountingTable(HeaderTable):
    """A header table that counts the entries added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.added = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.added += 1
        super().add(name, value)
