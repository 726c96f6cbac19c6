"""Servers asked at one rate, whatever they answer: how long a request takes at equal load."""

import asyncio
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

import httpx

from benchmarks.markdown import one_line
from benchmarks.rounds import turns
from benchmarks.serving.contenders import Contender
from benchmarks.serving.wire import Request
from benchmarks.serving.workloads import Workload
from benchmarks.serving.wrk import drive
from benchmarks.spread import Spread

SHARE = 0.8
"""Of the answers that the server they are compared with gives to 16 connections that ask on."""

_CONNECTIONS, _CAPACITY_S = 16, 4
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Times:
    """Of the requests of one load, from when each was due."""

    p50_ms: float
    p99_ms: float
    errors: int
    """Answers with status 400 or more, and connections that broke; they have no part in the times."""


@dataclass(frozen=True)
class Steady:
    """All rounds."""

    rate: float
    """Requests a second; 0 if the server they are compared with did not run."""

    times: Mapping[str, Sequence[Times]]
    """By the contender's name."""

    absent: Mapping[str, str]
    """Contenders that did not run, and why, in a line."""

    def p50_ms(self, name: str) -> Spread:
        """Of a request."""
        return Spread(tuple(each.p50_ms for each in self.times[name]))

    def p99_ms(self, name: str) -> Spread:
        """Of a request."""
        return Spread(tuple(each.p99_ms for each in self.times[name]))

    def errors(self, name: str) -> int:
        """Of all rounds."""
        return sum(each.errors for each in self.times[name])


def steady(
    contenders: Sequence[Contender], baseline: Contender, workload: Workload, num_rounds: int, seconds: int
) -> Steady:
    """Ask each for ``SHARE`` of what ``baseline`` can answer, in turns."""
    try:
        with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as folder, baseline.serve(Path(folder)) as url:
            workload.check(url, baseline.wire, baseline.tolerance)
            rate = SHARE * drive(url, workload.requests(baseline.wire), _CONNECTIONS, _CAPACITY_S).rate
    except RuntimeError as error:
        return Steady(0.0, {}, {baseline.name: one_line(str(error))})
    by_name = {each.name: each for each in (*contenders, baseline)}
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
    return Steady(rate, {name: each for name, each in times.items() if name not in absent}, absent)


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
    gaps, taken_ms, errors = random.Random(0), list[float](), 0

    async def ask(client: httpx.AsyncClient, request: Request, due_s: float) -> None:
        nonlocal errors
        try:
            answer = await client.post(request.path, content=request.body, headers=dict(request.headers))
            answer.raise_for_status()
        except httpx.HTTPError:
            errors += 1
        else:
            taken_ms.append(1e3 * (time.monotonic() - due_s))

    async def run() -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits) as client:
            due_s, tasks = time.monotonic(), list[asyncio.Task[None]]()
            until_s = due_s + seconds
            while (due_s := due_s + gaps.expovariate(rate)) < until_s:
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                tasks.append(asyncio.create_task(ask(client, requests[len(tasks) % len(requests)], due_s)))
            await asyncio.gather(*tasks)

    asyncio.run(run())
    if len(taken_ms) < 2:
        raise RuntimeError(f"{errors} requests got no good answer, and {len(taken_ms)} did")
    percentiles = quantiles(taken_ms, n=100, method="inclusive")
    return Times(percentiles[49], percentiles[98], errors)
