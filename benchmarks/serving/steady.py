"""Servers asked at one rate, whatever they answer: how long a request takes at equal load."""

import asyncio
import gc
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Self, cast
from urllib.parse import SplitResult, urlsplit

import httptools
import uvloop

from benchmarks.markdown import one_line
from benchmarks.rounds import turns
from benchmarks.serving.cases import SteadyCase
from benchmarks.serving.contenders import Contender
from benchmarks.serving.wire import Request
from benchmarks.serving.workloads import Workload
from benchmarks.serving.wrk import drive
from benchmarks.spread import Spread

_CONNECTIONS, _CAPACITY_S = 16, 4
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Times:
    """The latencies of one load, counted from the time at which each request was due."""

    p50_ms: float
    p99_ms: float
    errors: int
    """Answers with status 400 or more, and connections that broke; they have no part in the times."""


@dataclass(frozen=True)
class Steady:
    """All rounds of one case."""

    title: str
    own: str
    baseline: str
    """Names of the two contenders."""
    share: float
    """Share of the rate that the baseline can answer."""
    rate: float
    """Requests a second; 0 if the baseline did not run."""

    times: Mapping[str, Sequence[Times]]
    """The latencies by the contender's name."""

    absent: Mapping[str, str]
    """Contenders that did not run, and why, in a line."""

    def p50_ms(self, name: str) -> Spread:
        """Return the median of a request's latency, for each round."""
        return Spread(tuple(time_.p50_ms for time_ in self.times[name]))

    def p99_ms(self, name: str) -> Spread:
        """Return the 99th percentile of a request's latency, for each round."""
        return Spread(tuple(time_.p99_ms for time_ in self.times[name]))

    def errors(self, name: str) -> int:
        """Return the number of errors in all rounds."""
        return sum(time_.errors for time_ in self.times[name])


def steady(case: SteadyCase, num_rounds: int, seconds: int) -> Steady:
    """Ask both contenders, in turns, at a share of the rate that the baseline can answer."""
    own, baseline, workload = case.own, case.baseline, case.workload
    found = partial(Steady, case.title, own.name, baseline.name, case.share)
    try:
        with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as folder, baseline.serve(Path(folder)) as url:
            workload.check(url, baseline.wire, baseline.tolerance)
            rate = case.share * drive(url, workload.requests(baseline.wire), _CONNECTIONS, _CAPACITY_S).rate
    except RuntimeError as error:
        return found(0.0, {}, {baseline.name: one_line(str(error))})
    by_name: dict[str, Contender] = {own.name: own, baseline.name: baseline}
    times: dict[str, list[Times]] = {name: [] for name in by_name}
    absent: dict[str, str] = {}
    for number, order in enumerate(turns(list(by_name), num_rounds), start=1):
        for name in order:
            if name in absent:
                continue
            try:
                times[name].append(_take_turn(by_name[name], workload, rate, seconds))
                print(f"round {number}: {name}: {rate:.0f}/s, {times[name][-1]}", flush=True)
            except RuntimeError as error:
                absent[name] = one_line(str(error))
                print(f"round {number}: {name}: left out: {error}", flush=True)
    return found(rate, {name: taken for name, taken in times.items() if name not in absent}, absent)


def _take_turn(contender: Contender, workload: Workload, rate: float, seconds: int) -> Times:
    with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as folder, contender.serve(Path(folder)) as url:
        workload.check(url, contender.wire, contender.tolerance)
        return ask_steadily(url, workload.requests(contender.wire), rate, seconds)


def ask_steadily(url: str, requests: Sequence[Request], rate: float, seconds: float) -> Times:
    """Send the requests in turn, as a Poisson process does, and wait for every answer.

    Args:
        url: scheme, host and port.
        rate: requests a second.

    Raises:
        RuntimeError: fewer than two answers were good.
    """
    address, gaps = urlsplit(url), random.Random(0)
    raw = [request.raw(address.netloc) for request in requests]
    idle, taken_ms, errors = list[_Connection](), list[float](), 0

    async def ask(content: bytes, due_s: float) -> None:
        nonlocal errors
        try:
            connection = next(_open(idle), None) or await _Connection.to(address)
            async with asyncio.timeout(_TIMEOUT_S):
                is_good = await connection.ask(content)
        except OSError:
            errors += 1
            return
        idle.append(connection)
        if is_good:
            taken_ms.append(1e3 * (time.monotonic() - due_s))
        else:
            errors += 1

    async def run() -> None:
        due_s, tasks = time.monotonic(), list[asyncio.Task[None]]()
        until_s = due_s + seconds
        while (due_s := due_s + gaps.expovariate(rate)) < until_s:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            tasks.append(asyncio.create_task(ask(raw[len(tasks) % len(raw)], due_s)))
        await asyncio.gather(*tasks)
        for connection in idle:
            connection.close()

    with _no_collection():
        uvloop.run(run())
    if len(taken_ms) < 2:
        raise RuntimeError(f"{errors} requests got no good answer, and {len(taken_ms)} did")
    percentiles = quantiles(taken_ms, n=100, method="inclusive")
    return Times(percentiles[49], percentiles[98], errors)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from pausing the client: it took 0.1 s and more among so many tasks."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Connection(asyncio.Protocol):
    """A keep-alive connection with one request at a time. It costs a fraction of the CPU of a full client."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._answered: asyncio.Future[bool] | None = None

    @classmethod
    async def to(cls, address: SplitResult) -> Self:
        """Connect. Raises OSError if the connection is refused."""
        loop, host, port = asyncio.get_running_loop(), str(address.hostname), address.port or 80
        _, connection = await loop.create_connection(cls, host, port)
        return connection

    @property
    def is_open(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, content: bytes) -> bool:
        """Send a request and return whether its answer is good. Raises OSError if the connection breaks."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(content)
        try:
            return await self._answered
        except asyncio.CancelledError:  # a late answer would be taken for that of the next request
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        assert self._transport is not None
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        assert self._parser is not None
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """Called by httptools."""
        assert self._parser is not None
        assert self._answered is not None
        if not self._answered.done():
            self._answered.set_result(self._parser.get_status_code() < 400)

    def connection_lost(self, _: Exception | None) -> None:
        """Called by asyncio."""
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionResetError("the server closed the connection"))


def _open(idle: list[_Connection]) -> Iterator[_Connection]:
    """Remove connections from ``idle``, and yield those that the server has not closed."""
    while idle:
        if (connection := idle.pop()).is_open:
            yield connection
