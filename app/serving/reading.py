"""Reading of large requests outside the event loop, in at most half of the time."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from app.errors import OverloadError

Result = TypeVar("Result")

ON_LOOP_BYTES = 2**16
"""Size up to which requests are read on the event loop: about a millisecond, less than a thread switch may take."""
_MAX_WAIT_S = 10.0
"""Maximum time that a large request waits for its turn."""


class Reader:
    """Reads large requests in a thread, one after the other.

    Parsers hold the interpreter's lock. So after each request the thread rests for as long as it has worked. Small
    requests and health checks get at least half of the time, however many large requests wait.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read")

    async def read(self, num_bytes: int, work: Callable[[], Result]) -> Result:
        """Return the result of ``work``, which reads ``num_bytes``. Small amounts are read on the event loop.

        Raises:
            OverloadError: the request waited too long for its turn.
        """
        if num_bytes <= ON_LOOP_BYTES:
            return work()
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await self._turn.acquire()
        except TimeoutError:
            raise OverloadError(
                f"large requests have waited {_MAX_WAIT_S:g} s to be read: try again later, or send smaller requests"
            ) from None
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
        reading.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.call_later, worked_s, self._turn.release))
        return await asyncio.wrap_future(reading)
