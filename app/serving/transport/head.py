"""The request line and header of a plain request for inference: one that needs nothing of HTTP but a body."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from app.serving.protocol.rest import JSON_LENGTH

START = b"POST /v2/models/"
"""What each plain request begins with."""
MAX_HEAD_BYTES = 4096

_PATH = re.compile(rb"/v2/models/([\w.~+-]+)(?:/versions/([\w.~+-]+))?/infer")
_NOT_PLAIN = frozenset({"content-encoding", "expect", "transfer-encoding", "upgrade"})
_MAX_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Head:
    """What the head of a plain request says."""

    model: str
    version: str | None
    num_bytes: int
    """Of the body."""
    accept_encoding: str
    authorization: str | None
    lengths: Mapping[str, str]
    """The headers that say how to read the body."""

    @classmethod
    def read(cls, head: bytes) -> "Head | None":
        """Read all up to the body. Return None if the request is not plain, or wrong."""
        reader = _Reader()
        parser = HttpRequestParser(reader)
        try:
            parser.feed_data(head)
        except (HttpParserError, HttpParserUpgrade):
            return None
        headers, path = dict(reader.lines), _PATH.fullmatch(reader.url)
        if not reader.is_complete or path is None or parser.get_method() != b"POST":
            return None
        if parser.get_http_version() != "1.1" or not parser.should_keep_alive():
            return None
        if len(headers) < len(reader.lines) or headers.keys() & _NOT_PLAIN:  # a header twice means either
            return None
        lengths = {name: headers[name] for name in ("content-length", JSON_LENGTH) if name in headers}
        if not headers.get("content-length", "0").strip("0") or any(map(_is_long, lengths.values())):
            return None
        return cls(
            model=path[1].decode(),
            version=path[2].decode() if path[2] else None,
            num_bytes=int(lengths["content-length"]),
            accept_encoding=headers.get("accept-encoding", ""),
            authorization=headers.get("authorization"),
            lengths=lengths,
        )


def _is_long(length: str) -> bool:
    return len(length) > _MAX_DIGITS


class _Reader:
    """The callbacks of a parser."""

    def __init__(self) -> None:
        self.url = b""
        self.lines: list[tuple[str, str]] = []
        self.is_complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.lines.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        self.is_complete = True

    def on_body(self, _: bytes) -> None:
        self.is_complete = False  # the head ended before, by other line ends
