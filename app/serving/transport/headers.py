"""The headers of a request by their names."""

from collections.abc import Sequence
from typing import AnyStr


def combine(lines: Sequence[tuple[AnyStr, AnyStr]], comma: AnyStr) -> dict[AnyStr, AnyStr]:
    """Return headers by their names. The values of a repeated one are joined, so none is ignored.

    https://www.rfc-editor.org/rfc/rfc9110#section-5.3

    Args:
        lines: names in lower case, and values.
        comma: ``", "``, as text or bytes.
    """
    headers = dict(lines)
    if len(headers) < len(lines):
        headers = {}
        for name, value in lines:
            headers[name] = headers[name] + comma + value if name in headers else value
    return headers
