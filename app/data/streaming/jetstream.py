"""A stream of NATS JetStream, read by sequence."""

import asyncio
import os
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import nats
import nats.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, RetentionPolicy, StreamInfo
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from app.best_effort import warn
from app.config import StreamAddress
from app.data.streaming.messages import Message, Offsets, require_retained
from app.errors import BrokerUnreachableError, DataError

_CONNECT_TIMEOUT_S, _CLOSE_TIMEOUT_S = 5, 2.0
_MAX_ATTEMPTS, _RETRY_S = 2, 1
_INACTIVE_S = 60.0
"""Time after which the server drops the consumer of a process that was killed."""
Answer = TypeVar("Answer")


class JetStreamReader:
    """Reads with an ephemeral consumer, which the server forgets afterwards."""

    def __init__(self, source: str, address: StreamAddress, start: Mapping[int, int]) -> None:
        self._source, self._address = source, address
        # The client is asynchronous, and this process is not. It works while a method runs.
        self._runner = asyncio.Runner()
        self._client = Client()
        self._is_closed = False
        self._consumed = 0
        try:
            self.start: Offsets = {0: self._run(self._open(start.get(0)))}
        except BaseException:
            self.close()
            raise

    def read(self, count: int, timeout_s: float) -> list[Message]:
        """Return the next messages: see ``Reader``."""
        return self._run(self._fetch(count, timeout_s))

    def require_answer(self) -> None:
        """Ask the server: see ``Reader``."""
        self._run(self._client.jetstream().stream_info(self._address.name))

    def close(self) -> None:
        """Disconnect from the server."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._runner, suppress(TimeoutError, nats.errors.Error, OSError):
            # The connection may be closed already, or was never opened.
            if self._client.is_connected:
                self._runner.run(asyncio.wait_for(self._client.close(), _CLOSE_TIMEOUT_S))

    async def _open(self, start: int | None) -> int:
        """Connect, and make a consumer. Return the sequence that it begins with."""
        await self._connect()
        context = self._client.jetstream()
        try:
            info = await context.stream_info(self._address.name)
        except NotFoundError as error:
            raise DataError(
                f"data.source {self._source!r}: the server has no stream {self._address.name!r}; create it, or correct "
                "the name"
            ).of("stream.unknown", "data.source") from error
        except ServiceUnavailableError as error:
            raise DataError(f"data.source {self._source!r}: the server runs without JetStream; start it with -js").of(
                "stream.no_jetstream", "data.source"
            ) from error
        first = self._first_sequence(info, start)
        self._subscription = await self._subscribe(context, first)
        return first

    async def _connect(self) -> None:
        errors: list[Exception] = []

        async def note(error: Exception) -> None:
            errors.append(error)

        try:
            await self._client.connect(
                [f"nats://{server}" for server in self._address.servers],
                error_cb=note,
                connect_timeout=_CONNECT_TIMEOUT_S,
                # A reader whose connection breaks is replaced: its consumer may be gone, too.
                allow_reconnect=False,
                max_reconnect_attempts=_MAX_ATTEMPTS,
                reconnect_time_wait=_RETRY_S,
                **_credentials(),
            )
        except (nats.errors.Error, OSError, TimeoutError) as error:
            causes = [*errors, error]
            if refused := next((cause for cause in causes if "authorization" in str(cause).lower()), None):
                raise DataError(
                    f"data.source {self._source!r}: the server refuses the credentials ({refused}); set or correct "
                    "NATS_USER and NATS_PASSWORD, or NATS_CREDS, where training runs"
                ).of("stream.credentials", "data.source") from error
            cause = str(causes[0]) or type(causes[0]).__name__
            raise BrokerUnreachableError(
                f"data.source {self._source!r}: no server answers ({cause}); start it, or correct the address"
            ) from error

    def _first_sequence(self, info: StreamInfo, start: int | None) -> int:
        """Return the sequence to begin with. Raises DataError if the stream cannot give it."""
        if (retention := info.config.retention) not in (None, RetentionPolicy.LIMITS):
            raise DataError(
                f"data.source {self._source!r}: the stream has retention {retention}, which deletes messages when they "
                "are read; expected limits, so that a run can read them again"
            ).of("stream.retention", "data.source")
        oldest: int = max(info.state.first_seq, 1)
        end = info.state.last_seq + 1
        if start is None:
            return oldest
        if self._address.subject is not None and start < oldest:
            # Those that are gone may all be of other subjects.
            warn(
                f"data.source {self._source!r}: the server has deleted what is before {oldest:,}, and training "
                f"continues at {start:,}: messages of subject {self._address.subject} may be lost to this run"
            )
            oldest = start
        require_retained(self._source, 0, start, oldest, end)
        # From a sequence that is gone, the server goes on with the next one.
        return start

    async def _subscribe(self, context: JetStreamContext, first: int) -> JetStreamContext.PullSubscription:
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=first,
            ack_policy=AckPolicy.NONE,
            inactive_threshold=_INACTIVE_S,
        )
        try:
            return await context.pull_subscribe(self._address.subject or ">", stream=self._address.name, config=config)
        except APIError as error:
            raise DataError(
                f"data.source {self._source!r}: the server creates no consumer ({error.description}); correct the "
                "subject, or the rights of the user"
            ).of("stream.no_consumer", "data.source") from error

    async def _fetch(self, count: int, timeout_s: float) -> list[Message]:
        try:
            found = await self._subscription.fetch(count, timeout_s)
        except TimeoutError:
            return []
        messages = []
        for message in found:
            numbers = message.metadata.sequence
            self._consumed += 1
            if numbers.consumer != self._consumed:
                raise BrokerUnreachableError(f"data.source {self._source!r}: messages were lost on the way; read again")
            messages.append(Message(0, numbers.stream, message.data, message.subject))
        return messages

    def _run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        try:
            return self._runner.run(work)
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise BrokerUnreachableError(
                f"data.source {self._source!r}: the connection to the server is lost "
                f"({str(error) or type(error).__name__}); start the server"
            ) from error


def _credentials() -> dict[str, str]:
    """Return the credentials in the environment variables that NATS's own tools read. Raises DataError."""
    if file := os.environ.get("NATS_CREDS"):
        if not Path(file).is_file():
            raise DataError(f"NATS_CREDS is {file!r}, where there is no file: correct it where training runs").of(
                "file.missing"
            )
        return {"user_credentials": file}
    user, password = os.environ.get("NATS_USER"), os.environ.get("NATS_PASSWORD")
    if user and password:
        return {"user": user, "password": password}
    return {"token": user} if user else {}
