"""The headers of a gRPC call over HTTP/2.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from hpack import Decoder
from hpack.table import HeaderTable

MAX_HEADER_BYTES = 2**16
"""Of all names and values, plus 32 for each header. HAProxy passes on a quarter of this at most."""
_MAX_KNOWN, _MAX_KNOWN_BYTES = 128, 8192
"""Heads of each kind that are kept, and the bytes of each. A small block may decode to many bytes."""
_MAX_ENTRIES = HeaderTable.DEFAULT_SIZE // 32
"""Of a header table, where each entry takes 32 bytes at least."""
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
    """Reads the header blocks of a connection, and decodes a block that comes again once.

    Some blocks refer to no entry of the connection's header table. Their headers are always the same, but they may add
    entries. HAProxy sends only such blocks, and each adds the same entries again. These entries wait until a block is
    decoded. The headers of other blocks are known until the table changes.
    """

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=MAX_HEADER_BYTES)
        self._table = self._decoder.header_table = _WatchedTable()
        self._independent: dict[bytes, tuple[CallHead | None, _Entries]] = {}
        self._dependent: dict[bytes, CallHead | None] = {}
        self._waiting: deque[tuple[bytes, bytes]] = deque(maxlen=_MAX_ENTRIES)

    def read(self, block: bytes) -> CallHead | None:
        """Return the head of a call, or None as ``CallHead.read`` does.

        Raises:
            HPACKError: the block is invalid or too large. The blocks after it cannot be read.
        """
        if known := self._independent.get(block):
            head, entries = known
            if entries:
                self._waiting.extend(entries)
                self._dependent.clear()
            return head
        if block in self._dependent:
            return self._dependent[block]
        return self._decode(block)

    def _decode(self, block: bytes) -> CallHead | None:
        table = self._table
        for entry in self._waiting:
            table.add(*entry)
        self._waiting.clear()
        table.watch()
        headers = self._decoder.decode(block, raw=True)
        head = CallHead.read(headers)
        resizes = bool(block) and block[0] & 0b111_00000 == _RESIZES
        is_independent = not (resizes or table.is_referred_to)
        if table.added or resizes:
            self._dependent.clear()
        if len(block) + sum(len(name) + len(value) for name, value in headers) > _MAX_KNOWN_BYTES:
            return head
        if is_independent:
            _keep(self._independent, block, (head, tuple(table.added)))
        elif not (table.added or resizes):
            _keep(self._dependent, block, head)
        return head


_Entries = tuple[tuple[bytes, bytes], ...]
_Known = TypeVar("_Known")


def _keep(known: dict[bytes, _Known], block: bytes, value: _Known) -> None:
    if len(known) >= _MAX_KNOWN:
        known.clear()
    known[block] = value


class _WatchedTable(HeaderTable):
    """A header table that tells what a block does with it."""

    def __init__(self) -> None:
        super().__init__()
        self.watch()

    def watch(self) -> None:
        """Forget earlier blocks."""
        self.added: list[tuple[bytes, bytes]] = []
        self.is_referred_to = False

    def add(self, name: bytes, value: bytes) -> None:
        self.added.append((name, value))
        super().add(name, value)

    def get_by_index(self, index: int) -> tuple[bytes, bytes]:
        self.is_referred_to |= index > self.STATIC_TABLE_LENGTH
        return super().get_by_index(index)
