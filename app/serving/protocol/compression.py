"""Compressed bodies, by HTTP's names: ``gzip``, and ``deflate``, which is zlib's format."""

import zlib
from typing import TypeVar

from app.errors import RequestError, RequestTooLargeError, short_repr

Body = TypeVar("Body", bound=bytes | memoryview)

_WINDOWS = {"gzip": 31, "deflate": 15}
"""zlib's numbers for the two formats."""

MAX_INFLATION = 1032
"""Upper bound on the compression ratio of deflate, and so of gzip: https://zlib.net/zlib_tech.html"""
_MIN_BYTES = 1024
"""A smaller body fits into one packet uncompressed."""


def is_compressed(encoding: str) -> bool:
    """Return whether a body with this ``Content-Encoding`` is compressed. "" and "identity" mean that it is not."""
    return encoding.strip().lower() not in ("", "identity")


def decompress(body: Body, encoding: str, max_bytes: int) -> Body | bytes:
    """Return the content of a body with this ``Content-Encoding``.

    Raises:
        RequestTooLargeError: the content is larger than ``max_bytes``. No more than that is ever decompressed.
        RequestError: the encoding is unknown, or the body is not one complete stream of it.
    """
    content = _inflate(body, encoding, max_bytes) if is_compressed(encoding) else body
    if len(content) > max_bytes:
        raise too_large(max_bytes)
    return content


def too_large(max_bytes: int) -> RequestTooLargeError:
    """Return the error of a body that is larger than ``max_bytes``."""
    return RequestTooLargeError(f"the body is larger than {max_bytes} bytes: send less in a request")


def _inflate(body: bytes | memoryview, encoding: str, max_bytes: int) -> bytes:
    """Return the content; only its first ``max_bytes + 1`` bytes if it is longer."""
    window = _WINDOWS.get(encoding.strip().lower())
    if window is None:
        raise RequestError(
            f"the body has the content encoding {short_repr(encoding)}: expected {' or '.join(_WINDOWS)}"
        ).of("body.encoding")
    inflater = zlib.decompressobj(window)
    try:
        # One byte more than allowed tells that the content is too large, without inflating the rest.
        content = inflater.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise RequestError(f"the body is not {encoding}, as its content encoding says: {error}").of(
            "body.encoding"
        ) from None
    if len(content) <= max_bytes and (not inflater.eof or inflater.unused_data):
        problem = "ends too early" if not inflater.eof else "continues after its end"
        raise RequestError(f"the body is {encoding} that {problem}: send one complete stream").of("body.cut_short")
    return content


def compress(body: bytes, accepted: str) -> tuple[bytes, str | None]:
    """Return a response's body for this ``Accept-Encoding``, and its ``Content-Encoding`` if it was compressed."""
    if len(body) < _MIN_BYTES or (encoding := _preferred(accepted)) is None:
        return body, None
    return zlib.compress(body, level=1, wbits=_WINDOWS[encoding]), encoding


def _preferred(accepted: str) -> str | None:
    """Return the supported encoding with the highest weight, the first of equals; None if ``identity`` wins."""
    best, best_weight = None, 0.0
    for item in accepted.lower().split(","):
        encoding, *parameters = (part.strip() for part in item.split(";"))
        weight = _weight(parameters)
        # A weight of 0 forbids an encoding, so it must not win over none.
        if weight > best_weight and (encoding in _WINDOWS or encoding == "identity"):
            best, best_weight = encoding, weight
    return best if best in _WINDOWS else None


def _weight(parameters: list[str]) -> float:
    try:
        return float(parameters[0].removeprefix("q=")) if parameters else 1.0
    except ValueError:
        return 0.0
