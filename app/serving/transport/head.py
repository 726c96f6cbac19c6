"""The head of a plain request for inference: its request line and headers, without any special feature of HTTP."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from app.serving.access import Caller
from app.serving.protocol.rest import JSON_LENGTH

START = b"POST /v2/models/"
"""The first bytes of every plain request."""
MAX_HEAD_BYTES = 4096

_PATH = re.compile(rb"/v2/models/([\w.~+-]+)(?:/versions/([\w.~+-]+))?/infer")
_NOT_PLAIN = frozenset({"content-encoding", "expect", "transfer-encoding", "upgrade"})
_MAX_DIGITS = 18


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The head of a plain request."""

    model: str
    version: str | None
    num_bytes: int
    """The size of the body."""
    accept_encoding: str
    caller: Caller
    lengths: Mapping[str, str]
    """The headers with lengths, which are needed to read the body."""
    traceparent: str | None

    @classmethod
    def read(cls, head: bytes) -> "RequestHead | None":
        """Read the bytes before the body. Return None if the request is not plain, or not valid."""
        callbacks = _HeadParser()
        parser = HttpRequestParser(callbacks)
        try:
            parser.feed_data(head)
        except (HttpParserError, HttpParserUpgrade):
            return None

        headers, path = dict(callbacks.lines), _PATH.fullmatch(callbacks.url)
        if not callbacks.is_complete or path is None or parser.get_method() != b"POST":
            return None
        # Other versions, and connections that end with the answer, take the general path.
        if parser.get_http_version() != "1.1" or not parser.should_keep_alive():
            return None
        if len(headers) < len(callbacks.lines) or headers.keys() & _NOT_PLAIN:
            # A repeated header is ambiguous.
            return None

        lengths = {name: headers[name] for name in ("content-length", JSON_LENGTH) if name in headers}
        # So does a request without a body: the general path tells what is missing.
        if not headers.get("content-length", "0").strip("0") or any(map(_is_long, lengths.values())):
            return None
        return cls(
            model=path[1].decode(),
            version=path[2].decode() if path[2] else None,
            num_bytes=int(lengths["content-length"]),
            accept_encoding=headers.get("accept-encoding", ""),
            caller=Caller.of(headers),
            lengths=lengths,
            traceparent=headers.get("traceparent"),
        )


def _is_long(length: str) -> bool:
    return len(length) > _MAX_DIGITS


class _HeadParser:
    """The callbacks of httptools' parser."""

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
        self.is_complete = False  # with other line ends, the head has ended before
