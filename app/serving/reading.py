"""Reading of large requests outside the event loop, in at most half of the time."""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from app.errors import OverloadError, RequestTooLargeError
from app.serving.protocol.compression import decompress, is_compressed
from app.serving.protocol.infer import LIMITS

Result = TypeVar("Result")

ON_LOOP_BYTES = 2**16
"""Size up to which requests are read on the event loop: about a millisecond, less than a thread switch may take."""
_MAX_WAIT_S = 10.0
"""Maximum time that a large request waits for its turn."""
_GROWTH = 4
"""Factor between the limits that a compressed body is tried with."""


class Reader:
    """Reads large requests in a thread, one at a time.

    Parsers hold the interpreter's lock. So after each request the thread rests for as long as it has worked. Small
    requests and health checks get at least half of the time, however many large requests wait.

    Requests wait in the order of their arrival. Bytes that only decompression adds postpone a request, because they
    cost its sender nothing: JSON of the maximum size goes behind all that arrive while it may wait.
    """

    def __init__(self) -> None:
        self._is_busy = False
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []  # a heap
        self._numbers = itertools.count()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read")

    async def inflate(self, body: bytes, encoding: str, max_bytes: int) -> bytes:
        """Return the content of a body, as ``decompress`` does.

        The limit grows from try to try, so that content waits only as long as its own size requires.

        Raises:
            OverloadError: the request waited too long for its turn.
        """
        if not is_compressed(encoding):
            return decompress(body, encoding, max_bytes)
        limit = min(max(ON_LOOP_BYTES, len(body)), max_bytes)
        while True:
            try:
                return await self.read(limit, partial(decompress, body, encoding, limit), len(body))
            except RequestTooLargeError:
                if limit == max_bytes:
                    raise
            limit = min(limit * _GROWTH, max_bytes)

    async def read(self, num_bytes: int, work: Callable[[], Result], received: int | None = None) -> Result:
        """Return the result of ``work``, which reads ``num_bytes``. Small amounts are read on the event loop.

        Args:
            received: how many bytes the client has sent; by default ``num_bytes`` or more.

        Raises:
            OverloadError: the request waited too long for its turn.
        """
        if num_bytes <= ON_LOOP_BYTES:
            return work()
        await self._turn(0 if received is None else max(0, num_bytes - received))
        loop, worked_s = asyncio.get_running_loop(), 0.0

        def timed() -> Result:
            nonlocal worked_s
            began_s = time.thread_time()
            try:
                return work()
            finally:
                worked_s = time.thread_time() - began_s

        reading = self._thread.submit(timed)
        # The thread finishes even if the client has disconnected, so the turn ends with the work, not with the request.
        reading.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.call_later, worked_s, self._end_turn))
        try:
            return await asyncio.wrap_future(reading)
        finally:
            # An error refers to this frame. Without this, the future would keep the error, and with it the request.
            del reading

    async def _turn(self, added_bytes: int) -> None:
        """Wait for a turn, of a request to which decompression adds so many bytes. Raises OverloadError."""
        if not self._is_busy:
            self._is_busy = True
            return
        loop = asyncio.get_running_loop()
        due_s = loop.time() + added_bytes * _MAX_WAIT_S / LIMITS.json_bytes
        turn: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._waiting, (due_s, next(self._numbers), turn))
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await turn
        except BaseException as error:
            # Its turn came in the moment in which it gave up.
            if not turn.cancelled():
                self._end_turn()
            if not isinstance(error, TimeoutError):
                raise
            raise OverloadError(
                f"large requests have waited {_MAX_WAIT_S:g} s to be read: try again later, or send smaller requests"
            ) from None

    def _end_turn(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            # Those that have given up are cancelled.
            if not turn.done():
                turn.set_result(None)
                return
        self._is_busy = False
