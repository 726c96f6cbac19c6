"""Collects the messages of one micro-epoch, in short calls between which a run can be asked to stop."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from app.best_effort import warn
from app.config import Recipe, StreamAddress
from app.data.streaming.messages import Message, Offsets, Reader
from app.data.streaming.rows import ChosenRows, RowsFactory, StreamRows
from app.errors import BrokerUnreachableError, DataError

_POLL_S = 1.0
_MIN_READ, _MAX_READ = 64, 1000
"""Messages that are read at a time."""


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
        raise DataError(f"data.source {source!r} needs the package of {error.name!r}: install rayloom[streams]").of(
            "package.not_installed", "data.source"
        ) from error


@dataclass
class Collector:
    """Reads a stream from given offsets on, until there are enough rows for a micro-epoch."""

    recipe: Recipe
    make_rows: RowsFactory
    start: Mapping[int, int]
    """Where the micro-epoch before ended. Empty: begin with the oldest messages that the broker has."""
    is_first: bool
    """Whether it is the first micro-epoch, from which the validation split is held out."""
    clock: Callable[[], float] = time.monotonic
    has_ended: bool = False
    """Whether the stream has been idle for longer than the recipe allows, with less than a batch of new rows."""
    _reader: Reader | None = field(default=None, init=False)
    _rows: StreamRows | None = field(default=None, init=False)
    _began: float | None = field(default=None, init=False)
    """When the first message came."""
    _last: float = field(init=False)
    """When the last message came, or the broker answered again."""
    _lost_at: float | None = field(default=None, init=False)
    """When the broker stopped answering. None: it answers."""

    def __post_init__(self) -> None:
        self._last = self.clock()

    @property
    def collected(self) -> int:
        """Messages so far."""
        return len(self._rows) if self._rows is not None else 0

    def poll(self) -> ChosenRows | None:
        """Read for about a second. Return the rows of the micro-epoch when it is complete, else None.

        Raises:
            DataError: the stream cannot be read, or too many messages are bad.
            BrokerUnreachableError: the broker has not answered for ``idle_seconds``, or it never did.
        """
        stream = self.recipe.data.stream
        assert stream is not None
        messages, now = self._read(), self.clock()
        if messages:
            assert self._rows is not None
            self._rows.add(messages)
            self._began, self._last = self._began if self._began is not None else now, now
        is_idle = self._lost_at is None and self._is_silent
        is_late = self._began is not None and now - self._began >= stream.seconds
        if self._rows and (self._rows.missing(stream.samples) <= 0 or is_late or is_idle):
            chosen = self._rows.choose(stream.samples, self.recipe.train.batch_size, is_late or is_idle)
            if chosen is not None:
                self.has_ended = False
                return chosen
        self.has_ended = is_idle
        return None

    @property
    def _is_silent(self) -> bool:
        """Whether no message has come for as long as the recipe allows."""
        assert self.recipe.data.stream is not None
        idle = self.recipe.data.stream.idle_seconds
        return idle is not None and self.clock() - self._last >= idle

    @property
    def _has_never_answered(self) -> bool:
        """Whether the run would begin with a broker that does not answer."""
        return self.is_first and self._rows is None

    def close(self) -> None:
        """Disconnect from the broker."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _read(self) -> list[Message]:
        """Return the next messages. While the broker does not answer, there are none."""
        stream = self.recipe.data.stream
        assert stream is not None
        try:
            reader = self._reader or self._open()
            missing = self._rows.missing(stream.samples) if self._rows is not None else _MIN_READ
            messages = reader.read(max(_MIN_READ, min(_MAX_READ, missing)), _POLL_S)
            if not messages and self._is_silent:
                # A broker that hangs sends nothing either.
                reader.require_answer()
        except BrokerUnreachableError as error:
            with suppress(BrokerUnreachableError):
                self.close()
            now, idle = self.clock(), stream.idle_seconds
            if self._lost_at is None:
                self._lost_at = now
                if not self._has_never_answered:
                    warn(f"{error}; training waits for it")
            if self._has_never_answered or (idle is not None and now - self._lost_at >= idle):
                raise
            return []
        if self._lost_at is not None:
            # While the broker was away, nobody could publish.
            self._lost_at, self._last = None, self.clock()
        return messages

    def _open(self) -> Reader:
        offsets: Offsets = self._rows.stop if self._rows is not None else dict(self.start)
        self._reader = open_reader(self.recipe.data.source, offsets)
        if self._rows is None:
            self._rows = self.make_rows(self._reader.start, self.is_first)
        return self._reader
