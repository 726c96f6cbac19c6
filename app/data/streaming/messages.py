"""Messages of a stream by partition and offset, their rows, and the reader that each broker has."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from app.config import DataConfig
from app.data.preparation.samples import SampleKind
from app.data.sources.cells import BATCH_ROWS, Column, Columns, Rows, each_at, kind_in_words, rows_of_objects
from app.data.sources.lines import parse_json
from app.errors import DataError

Offsets = dict[int, int]
"""Offset of the next message to read, by partition. A NATS stream is one partition, 0, with sequences as offsets."""


@dataclass(frozen=True)
class Message:
    """One message, and where it is in the stream."""

    partition: int
    offset: int
    value: bytes
    subject: str = ""
    """Of NATS."""

    def __str__(self) -> str:
        place = f"subject {self.subject}" if self.subject else f"partition {self.partition}"
        return f"the message at offset {self.offset:,} of {place}"


@dataclass(frozen=True)
class MessageFormat:
    """Messages as the rows of a source: JSON objects, as JSON lines have them, with the content of files in base64."""

    source: str
    columns: Columns

    @classmethod
    def of(cls, kind: SampleKind, config: DataConfig) -> "MessageFormat":
        """Return the format of samples. A row of a table has every column, as the endpoint's requests do."""
        found = kind.columns(config)
        if kind.contents == "row":
            found = replace(found, all=tuple(replace(column, is_optional=False) for column in found.all))
        return cls(config.source, found)

    def rows(self, messages: Sequence[Message]) -> Rows:
        """Return messages as rows. Raises DataError, with the message's place, for one that cannot be read."""
        objects = [self._object(message) for message in messages]
        return rows_of_objects(objects, self.columns, self.source, each_at([str(message) for message in messages]))

    def batches(self, messages: Sequence[Message]) -> Iterator[Rows]:
        """Yield messages as rows, in batches of bounded size."""
        for start in range(0, len(messages), BATCH_ROWS):
            yield self.rows(messages[start : start + BATCH_ROWS])

    def _object(self, message: Message) -> Mapping[str, Any]:
        given = parse_json(message.value, message.__str__, "in a message")
        files = [column for column in self.columns.all if column.kind == "file" and column.name in given]
        return {**given, **{column.name: _content(given[column.name], column, message) for column in files}}


def _content(value: Any, column: Column, message: Message) -> bytes | None:
    """Return the content of a file. A message names no file, because those who publish it are not those who train."""
    if value is None or value == "":
        return None
    try:
        if not isinstance(value, str):
            raise ValueError(kind_in_words(value))
        return base64.b64decode(value, validate=True)
    except ValueError as error:
        raise DataError(
            f"{message}: {column.name!r} is not base64 ({error}): a message holds the content of a file in base64, "
            f"for {column.key}"
        ).of("field.not_base64", column.key) from error


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
        ).of("stream.messages_gone", "data.source")
    if offset > end:
        raise DataError(
            f"{where}, and the broker has messages before {end:,} only: the stream was recreated; start a new run"
        ).of("stream.recreated", "data.source")
