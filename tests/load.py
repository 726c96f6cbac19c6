"""Requests at a steady rate, whatever becomes of them."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(frozen=True)
class Answered:
    """What became of one request."""

    sent_s: float
    seconds: float
    status: int | str
    """Or the name of what went wrong with the connection."""
    version: str | None
    retry_after: str | None


@dataclass
class Load:
    """What became of all requests so far."""

    answers: list[Answered] = field(default_factory=list)

    @property
    def statuses(self) -> Counter[int | str]:
        """How often each was answered."""
        return Counter(each.status for each in self.answers)

    @property
    def failed(self) -> list[Answered]:
        """Those that were not answered with 200."""
        return [each for each in self.answers if each.status != httpx.codes.OK]

    def percentile_s(self, share: float) -> float:
        """Of the time that requests took that were answered with 200."""
        seconds = sorted(each.seconds for each in self.answers if each.status == httpx.codes.OK)
        return seconds[int(share * (len(seconds) - 1))]


@contextmanager
def load(url: str, body: dict[str, Any], per_second: float) -> Iterator[Load]:
    """Send ``body`` at a rate, without waiting for answers; at the end, wait for all of them."""
    sent, stop = Load(), threading.Event()

    async def ask(client: httpx.AsyncClient) -> None:
        began, version, retry_after = time.monotonic(), None, None
        try:
            answer = await client.post(url, json=body)
            status: int | str = answer.status_code
            retry_after = answer.headers.get("retry-after")
            if status == httpx.codes.OK:
                version = answer.json()["model_version"]
        except httpx.HTTPError as error:
            status = type(error).__name__
        sent.answers.append(Answered(began, time.monotonic() - began, status, version, retry_after))

    async def run() -> None:
        async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=None)) as client:
            tasks: set[asyncio.Task[None]] = set()
            due_s = time.monotonic()
            while not stop.is_set():
                tasks.add(asyncio.create_task(ask(client)))
                due_s += 1 / per_second
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            await asyncio.gather(*tasks)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        yield sent
    finally:
        stop.set()
        thread.join()
