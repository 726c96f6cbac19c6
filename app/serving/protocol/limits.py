"""What a request may take of the server."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on a request that are checked before it is read."""

    body_bytes: int = 64 * 2**20
    """Of a body, decompressed."""
    json_bytes: int = 8 * 2**20
    """Of its JSON, which takes about 40 times as much memory when it is parsed."""
    strings: int = 1_000_000
    """Elements of a tensor of BYTES: each is an object, whatever its length, and takes about a microsecond to read."""


LIMITS = Limits()
"""What holds where nothing else is said."""
