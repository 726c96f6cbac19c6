"""Small requests for the model 'toy', as bytes, that cost a server without limits much time or memory."""

import json
import zlib
from collections.abc import Callable

from tests.calls import prefixed, sized
from tests.wire import message

MIB = 2**20
INFER, PREDICT, EMBEDDINGS = "/v2/models/toy/infer", "/v1/models/toy/predict", "/v1/embeddings"


def packed(content: bytes) -> bytes:
    return zlib.compress(content, wbits=31)


def listed(item: bytes, size: int = 8 * MIB - 100) -> bytes:
    """Return a JSON list that repeats one item up to ``size`` bytes."""
    return b"[" + (item + b",") * (size // (len(item) + 1) - 1) + item + b"]"


def squeezed(path: str, content: bytes) -> bytes:
    return message("POST", path, packed(content), "Content-Encoding: gzip")


def _call(content: bytes, method: str = "ModelInfer") -> bytes:
    return sized(prefixed(packed(content), is_compressed=True), "grpc-encoding: gzip", method=method)


def _keys() -> bytes:
    return b"{%s}" % b",".join(b'"%06x":1' % number for number in range(8 * MIB // 11))


def _record() -> bytes:
    return b'{"inputs":{"a":%s}}' % listed(b"[]")


HTTP: dict[str, Callable[[], bytes]] = {
    "64 MiB of spaces": lambda: squeezed(INFER, b" " * (64 * MIB - 1)),
    "inputs that are empty objects": lambda: squeezed(INFER, b'{"inputs":%s}' % listed(b"{}")),
    "the same, plain": lambda: message("POST", INFER, b'{"inputs":%s}' % listed(b"{}")),
    "the same, short enough for the fast path": lambda: message(
        "POST", INFER, b'{"inputs":%s}' % listed(b"{}", 250_000)
    ),
    "data of numbers": lambda: squeezed(INFER, b'{"inputs":[{"name":"input_ids","data":%s}]}' % listed(b"1")),
    "many keys": lambda: squeezed(INFER, _keys()),
    "texts that are numbers": lambda: squeezed(PREDICT, b'{"inputs":%s}' % listed(b"1")),
    "texts that are empty objects": lambda: squeezed(PREDICT, b'{"inputs":%s}' % listed(b"{}")),
    "a row of empty lists": lambda: squeezed(PREDICT, _record()),
    "a row of numbers": lambda: squeezed(PREDICT, _record().replace(b"[]", b"11")),
    "empty texts": lambda: squeezed(PREDICT, b'{"inputs":%s}' % listed(b'""')),
    "embeddings of objects": lambda: squeezed(EMBEDDINGS, b'{"model":"toy","input":%s}' % listed(b"{}")),
    "embeddings of tokens": lambda: squeezed(EMBEDDINGS, b'{"model":"toy","input":%s}' % listed(b"1")),
    "an index of empty lists": lambda: squeezed("/v2/repository/index", b'{"ready":%s}' % listed(b"[]")),
    "deep lists": lambda: squeezed(INFER, b'{"inputs":' + b"[" * 4 * MIB + b"]" * 4 * MIB),
}
"""Make requests over HTTP. None is valid. To make all of them takes seconds."""

GRPC: dict[str, Callable[[], bytes]] = {
    "a call with empty inputs": lambda: _call(b"\x2a\x00" * 32 * MIB),
    "a call with empty tensors": lambda: _call(b"\x3a\x00" * 32 * MIB),
    "a call with one input of empty parameters": lambda: _call(b"\x2a\x80\x80\x80\x10" + b"\x22\x00" * 16 * MIB),
    "a call with unknown fields": lambda: _call(b"\x78\x00" * 32 * MIB),
    "metadata of 64 MiB": lambda: _call(b"\x0a\x80\x80\x80\x1f" + bytes(62 * MIB), "ModelMetadata"),
}
"""Make calls over HTTP/1.1, as HAProxy sends them. None is valid."""

MESSAGES: dict[str, bytes] = {
    "empty inputs": b"\x2a\x00" * 8 * MIB,
    "empty parameters": b"\x2a\x80\x80\x80\x08" + b"\x22\x00" * 8 * MIB,
}
"""Messages for a stream. The client compresses them."""

TEXT = packed(json.dumps({"inputs": "!" * (7 * MIB)}).encode())
"""A single text."""
