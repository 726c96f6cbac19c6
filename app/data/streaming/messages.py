"""Messages of a stream by partition and offset, and the reader that each broker has."""

from dataclasses import dataclass
from typing import Protocol

from app.errors import DataError

Offsets = dict[int, int]
"""Offset of the next message to read, by partition. A NATS stream is one partition, 0, with sequences as offsets."""


@dataclass(frozen=True)
class Message:
    """One message, and where it is in the stream."""

    partition: int
    offset: int
    value: bytes


class Reader(Protocol):
    """Reads a stream from given offsets on. Nothing is acknowledged or committed to the broker."""

    start: Offsets
    """Where it began to read: the given offsets, and the first ones of other partitions."""

    def read(self, count: int, timeout_s: float) -> list[Message]:
        """Return the next messages, ``count`` at most, in the order of each partition; none if none comes in time.

        Raises:
            BrokerUnreachableError: the broker does not answer.
            DataError: the broker has deleted messages that were to be read.
        """
        ...

    def require_answer(self) -> None:
        """Ask the broker, within seconds. Raise BrokerUnreachableError if it does not answer."""
        ...

    def close(self) -> None:
        """Disconnect from the broker."""
        ...


def require_retained(source: str, partition: int, offset: int, first: int, end: int) -> None:
    """Check that the broker has everything from ``offset`` on.

    Args:
        first: offset of the oldest message that the broker has.
        end: offset that the next new message will get.

    Raises:
        DataError: messages from ``offset`` on are missing.
    """
    where = f"data.source {source!r}, partition {partition}: training continues at offset {offset:,}"
    if offset < first:
        raise DataError(
            f"{where}, and the broker has deleted what is before {first:,}: {first - offset:,} messages are lost to "
            "this run; start a new run, and have the broker keep messages longer than a run may be stopped"
        )
    if offset > end:
        raise DataError(
            f"{where}, and the broker has messages before {end:,} only: the stream was recreated; start a new run"
        )
