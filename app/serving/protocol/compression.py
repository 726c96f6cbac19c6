"""Bodies that are compressed, by HTTP's names: ``gzip``, and ``deflate``, which is zlib's format."""

import zlib
from typing import TypeVar

from app.errors import RequestError, RequestTooLargeError
from app.serving.protocol.wording import shown

Body = TypeVar("Body", bound=bytes | memoryview)

_WINDOWS = {"gzip": 31, "deflate": 15}
"""What zlib calls the two formats."""

_LEAST_BYTES = 1024
"""Less fits in a packet as it is."""


def is_compressed(encoding: str) -> bool:
    """Whether a body with this ``Content-Encoding`` is to be inflated; with "" and "identity" it comes as it is."""
    return encoding.strip().lower() not in ("", "identity")


def decompressed(body: Body, encoding: str, most_bytes: int) -> Body | bytes:
    """The body of a request with this ``Content-Encoding``.

    Raises:
        RequestTooLargeError: it is larger than ``most_bytes``; of a compressed one no more than that is ever made.
        RequestError: the encoding is not known, or the body is not of it, whole and alone.
    """
    content = _inflated(body, encoding, most_bytes) if is_compressed(encoding) else body
    if len(content) > most_bytes:
        raise RequestTooLargeError(f"the body is larger than {most_bytes} bytes: send fewer rows in a request")
    return content


def _inflated(body: bytes | memoryview, encoding: str, most_bytes: int) -> bytes:
    """Of a longer one ``most_bytes`` and one more."""
    window = _WINDOWS.get(encoding.strip().lower())
    if window is None:
        raise RequestError(f"the body has the content encoding {shown(encoding)}: expected {' or '.join(_WINDOWS)}")
    inflating = zlib.decompressobj(window)
    try:
        content = inflating.decompress(body, most_bytes + 1)
    except zlib.error as error:
        raise RequestError(f"the body is not {encoding}, as its content encoding says: {error}") from None
    if len(content) <= most_bytes and (not inflating.eof or inflating.unused_data):
        what = "ends too early" if not inflating.eof else "goes on after its end"
        raise RequestError(f"the body is {encoding} that {what}: send it whole and alone")
    return content


def compressed(body: bytes, accepted: str) -> tuple[bytes, str | None]:
    """The body of a response to a request with this ``Accept-Encoding``, and its ``Content-Encoding`` if it has one."""
    if len(body) < _LEAST_BYTES or (encoding := _preferred(accepted)) is None:
        return body, None
    return zlib.compress(body, level=1, wbits=_WINDOWS[encoding]), encoding


def _preferred(accepted: str) -> str | None:
    """What of ours the client likes most, the first of equals; None if that is no encoding."""
    best, weight = None, 0.0
    for item in accepted.lower().split(","):
        encoding, *parameters = (part.strip() for part in item.split(";"))
        liking = _weight(parameters)
        if liking > weight and (encoding in _WINDOWS or encoding == "identity"):
            best, weight = encoding, liking
    return best if best in _WINDOWS else None


def _weight(parameters: list[str]) -> float:
    try:
        return float(parameters[0].removeprefix("q=")) if parameters else 1.0
    except ValueError:
        return 0.0
