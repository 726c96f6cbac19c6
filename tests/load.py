"""Requests at a steady rate, whatever becomes of them."""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(frozen=True)
class Ask:
    """A request, and what becomes of it if all is well."""

    url: str
    content: bytes | AsyncIterable[bytes]
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int = 200
    is_right: Callable[[dict[str, Any]], bool] = lambda answer: True
    """Of the answer's JSON, if its status is 200."""


@dataclass(frozen=True)
class Answered:
    """What became of one request."""

    sent_s: float
    seconds: float
    status: int | str
    """Or the name of what went wrong with the connection."""
    expected: int
    version: str | None
    retry_after: str | None
    is_right: bool

    def in_flight(self, at_s: float, within_s: float = 1.0) -> bool:
        """Whether it was under way at that time, or began or ended not long before or after."""
        return self.sent_s - within_s <= at_s <= self.sent_s + self.seconds + within_s


@dataclass
class Load:
    """What became of all requests so far."""

    answers: list[Answered] = field(default_factory=list)

    @property
    def statuses(self) -> Counter[int | str]:
        """How often each was answered."""
        return Counter(answer.status for answer in self.answers)

    @property
    def failed(self) -> list[Answered]:
        """Those that were answered otherwise than is right."""
        return [answer for answer in self.answers if answer.status != answer.expected or not answer.is_right]

    @property
    def summary(self) -> str:
        """What became of these."""
        told = ", ".join(
            f"{count} {status}" for status, count in Counter(failure.status for failure in self.failed).items()
        )
        return f"{len(self.failed)} of {len(self.answers)} failed{f' ({told})' if told else ''}"

    def percentile_s(self, share: float) -> float:
        """Of the time that requests took that were answered with 200."""
        return percentile_s([answer for answer in self.answers if answer.status == httpx.codes.OK], share)


def percentile_s(answers: Sequence[Answered], share: float) -> float:
    """Of the time that requests took."""
    return sorted(answer.seconds for answer in answers)[int(share * (len(answers) - 1))]


def load(url: str, body: dict[str, Any], per_second: float) -> AbstractContextManager[Load]:
    """Send ``body`` at a rate, without waiting for answers; at the end, wait for all of them."""
    ask = Ask(url, json.dumps(body).encode())
    return load_of(lambda: ask, per_second)


@contextmanager
def load_of(next_ask: Callable[[], Ask], per_second: float) -> Iterator[Load]:
    """The same of requests that differ."""
    sent, stop = Load(), threading.Event()

    async def run() -> None:
        async with _client() as client:
            tasks: set[asyncio.Task[None]] = set()
            due_s = time.monotonic()
            while not stop.is_set():
                task = asyncio.create_task(_ask(client, next_ask(), sent))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
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


def capacity(next_ask: Callable[[], Ask], clients: int, seconds: float) -> float:
    """Answers a second that so many clients get, each of which asks again when it has its answer."""
    sent = Load()

    async def ask_on(client: httpx.AsyncClient, until_s: float) -> None:
        while time.monotonic() < until_s:
            await _ask(client, next_ask(), sent)

    async def run() -> None:
        async with _client() as client:
            until_s = time.monotonic() + seconds
            await asyncio.gather(*(ask_on(client, until_s) for _ in range(clients)))

    asyncio.run(run())
    return len(sent.answers) / seconds


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=None))


async def _ask(client: httpx.AsyncClient, ask: Ask, sent: Load) -> None:
    began_s, version, retry_after, is_right = time.monotonic(), None, None, True
    try:
        answer = await client.post(ask.url, content=ask.content, headers=ask.headers)
        status: int | str = answer.status_code
        retry_after = answer.headers.get("retry-after")
        if status == httpx.codes.OK:
            told = answer.json()
            version, is_right = told["model_version"], ask.is_right(told)
    except httpx.HTTPError as error:
        status = type(error).__name__
    seconds = time.monotonic() - began_s
    sent.answers.append(Answered(began_s, seconds, status, ask.status, version, retry_after, is_right))
