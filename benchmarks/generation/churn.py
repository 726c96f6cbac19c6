"""Streams that come and go for minutes, of which clients cancel a third: memory, and the time until a place is free."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import ClassVar

import httpx
import psutil

from app.ports import LOOPBACK
from benchmarks.generation.endpoint import Served, served
from benchmarks.generation.material import Material, prompts
from benchmarks.markdown import Goal, verdict

_STREAMS, _SECONDS, _WARM_S = 64, 300.0, 60.0
_CACHE_MB = 256
"""About 16,000 tokens, so that the cache is full within the first minute."""
_CANCELLED = 1 / 3
_PROMPT_TOKENS, _MAX_TOKENS = (8, 160), (8, 128)
_MAX_GROWTH = 0.02
_PROBES, _LONG_TOKENS, _PLACE_S = 21, 150, 1.0
_WINDOW = 20
"""Samples, one a second, whose median is the memory before and after."""


@dataclass
class Churn:
    """The fate of the streams, and of the memory."""

    seconds: float
    title: ClassVar[str] = "Streams come and go"
    complete: int = 0
    cancelled: int = 0
    failed: int = 0
    """Streams that ended without an end, or were refused."""
    engine_bytes: list[int] = field(default_factory=list)
    server_bytes: list[int] = field(default_factory=list)
    """Resident memory, once a second."""
    freed_s: list[float] = field(default_factory=list)
    """For each probe, the time from the end of the connection until the statistics count one answer less."""

    @property
    def goals(self) -> Iterator[Goal]:
        """The goals of this part."""
        what = f"{_STREAMS} streams come and go for {self.seconds / 60:.0f} min, a third cancelled"
        yield Goal(f"{what}: streams that failed", "0", str(self.failed), verdict(not self.failed))
        for name, values in (("engine", self.engine_bytes), ("server", self.server_bytes)):
            first, last = _before_and_after(values)
            goal = f"≤ {_MAX_GROWTH:.0%} after the first minute"
            reached = f"{last / first - 1:+.1%} ({first / 2**20:.0f} to {last / 2**20:.0f} MiB)"
            yield Goal(f"{what}: memory of the {name}", goal, reached, verdict(last <= (1 + _MAX_GROWTH) * first))
        slowest = max(self.freed_s)
        reached = f"{slowest:.2f} s, the longest of {len(self.freed_s)}"
        yield Goal("a cancelled answer frees its place", f"≤ {_PLACE_S:g} s", reached, verdict(slowest <= _PLACE_S))

    @property
    def summary(self) -> str:
        """A sentence that describes the run."""
        return (
            f"Clients kept {_STREAMS} streams open for {self.seconds:.0f} s, with prompts of up to "
            f"{_PROMPT_TOKENS[1]} tokens and answers of up to {_MAX_TOKENS[1]}. {self.complete} were read to their "
            f"end, and {self.cancelled} were cancelled by their clients. Then {len(self.freed_s)} of {_STREAMS} "
            "running answers were cancelled, one after another. The median time until the place was free was "
            f"{1e3 * median(self.freed_s):.0f} ms."
        )


def _before_and_after(values: list[int]) -> tuple[float, float]:
    """Return the memory after the first minute, and at the end."""
    warm = values[int(_WARM_S) :] or values
    return median(warm[:_WINDOW]), median(warm[-_WINDOW:])


def churn(material: Material, seconds: float = _SECONDS) -> Churn:
    """Let streams come and go."""
    with served(material, _CACHE_MB) as server:
        return asyncio.run(_churn(server, seconds))


async def _churn(server: Served, seconds: float) -> Churn:
    found, until_s = Churn(seconds), time.monotonic() + seconds
    limits = httpx.Limits(max_connections=2 * _STREAMS, max_keepalive_connections=0)
    url = f"http://{LOOPBACK}:{server.port}"
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        sampling = asyncio.create_task(_sample(server, found))
        await asyncio.gather(*(_come_and_go(client, number, until_s, found) for number in range(_STREAMS)))
        sampling.cancel()
        await _probe(client, found)
    return found


async def _sample(server: Served, found: Churn) -> None:
    engine: psutil.Process = server.engine
    while True:
        found.engine_bytes.append(engine.memory_info().rss)
        found.server_bytes.append(server.process.memory_info().rss)
        await asyncio.sleep(1)


async def _come_and_go(client: httpx.AsyncClient, number: int, until_s: float, found: Churn) -> None:
    rng = random.Random(number)  # lengths, not secrets
    while time.monotonic() < until_s:
        prompt = prompts(1, rng.randint(*_PROMPT_TOKENS), seed=rng.randrange(2**31))[0].tolist()
        tokens = rng.randint(*_MAX_TOKENS)
        leaves_after = rng.randrange(tokens) if rng.random() < _CANCELLED else None
        is_complete, events = False, 0
        async with _stream(client, prompt, tokens) as lines:
            async for line in lines:
                events += line.startswith("data: {")
                is_complete = is_complete or line == "data: [DONE]"
                if leaves_after is not None and events > leaves_after:
                    break
        if leaves_after is not None and not is_complete and events > leaves_after:
            found.cancelled += 1
        elif is_complete:
            found.complete += 1
        else:
            found.failed += 1


@asynccontextmanager
async def _stream(client: httpx.AsyncClient, prompt: list[int], tokens: int) -> AsyncIterator[AsyncIterator[str]]:
    """Ask for a stream, and yield its lines. Leaving the block closes the connection."""
    body = {"model": "fp32", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    async with client.stream("POST", "/v1/completions", content=json.dumps(body)) as response:
        yield response.aiter_lines()


async def _probe(client: httpx.AsyncClient, found: Churn) -> None:
    """Cancel some of many running answers, one after another, and wait until each place is free."""
    leaving, entered = [asyncio.Event() for _ in range(_STREAMS)], asyncio.Semaphore(0)

    async def hold(number: int) -> None:
        async with _stream(client, prompts(1, seed=number)[0].tolist(), _LONG_TOKENS) as lines:
            reading = asyncio.create_task(_read(lines))
            entered.release()
            await leaving[number].wait()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    holding = [asyncio.create_task(hold(number)) for number in range(_STREAMS)]
    for _ in range(_STREAMS):
        await entered.acquire()
    for number in range(_PROBES):
        before = await _running(client)
        began_s = time.perf_counter()
        leaving[number].set()
        while await _running(client) >= before:
            await asyncio.sleep(0.005)
        found.freed_s.append(time.perf_counter() - began_s)
    for event in leaving:
        event.set()
    await asyncio.gather(*holding)


async def _read(lines: AsyncIterator[str]) -> None:
    async for _ in lines:
        pass


async def _running(client: httpx.AsyncClient) -> int:
    """Return the number of answers that have a place."""
    statistics = (await client.get("/v2/models/fp32/stats")).json()["model_stats"][0]
    running: int = statistics["generation"]["running"]
    return running
