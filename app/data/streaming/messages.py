"""Messages of a stream by partition and offset, and the reader that each broker has."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from app.config import StreamAddress
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


def open_reader(source: str, start: Mapping[int, int]) -> Reader:
    """Return a reader of ``data.source``. A partition without an offset in ``start`` begins at its oldest message.

    Raises:
        BrokerUnreachableError: the broker does not answer.
        DataError: there is no such stream, the broker refuses the credentials, or it no longer has the offsets.
    """
    address = StreamAddress.parse(source)
    try:
        if address.scheme == "nats":
            from app.data.streaming.jetstream import JetStreamReader  # a recipe needs one client at most

            return JetStreamReader(source, address, start)
        from app.data.streaming.kafka import KafkaReader

        return KafkaReader(source, address, start)
    except ModuleNotFoundError as error:
        raise DataError(
            f"data.source {source!r} needs the package of {error.name!r}: install rayloom[streams]"
        ) from error


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
