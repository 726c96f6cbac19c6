"""Minutes of good and bad requests, while replicas are killed and versions change."""

import concurrent.futures
import contextlib
import itertools
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
from upath import UPath

from tests.engine_contract import rows
from tests.helpers import wait_until
from tests.launch import Cluster
from tests.load import Ask, capacity, load_of
from tests.tables import Faults
from tests.toy import answering, body, deploy, deployed, expected, is_right, publish

pytestmark = [pytest.mark.faults, pytest.mark.slow]

SOAK_S = float(os.environ.get("RAYLOOM_SOAK_S", "300"))
"""How long; less than a minute is no soak."""
KILL_EVERY_S, PROMOTE_EVERY_S, SAMPLE_EVERY_S = 20.0, 30.0, 1.0
SHARE_BAD, SHARE_OF_CAPACITY = 0.2, 0.8
WARM_S, MAX_GROWTH, MAX_GROWTH_OF_RAY = 10.0, 16 * 2**20, 64 * 2**20
"""By so many bytes a replica may grow once it is so old, and a process of Ray's.

Serve's spare proxy keeps room for the bodies that it held while no replica answered: 34 MiB were seen.
"""
TWO = ("serve.replicas=2", "serve.threads=1")
MAX_LOST = 4
"""Requests that were in flight on a killed replica, and too large for HAProxy to ask another one."""
MAX_REFUSED = 0.01
"""Of the requests, while one replica does the work of two."""
COUNTS = (1, 2, 4, 8)
"""Rows of the good requests."""


@dataclass
class Grown:
    """The memory of each process of a cluster, while it is watched, once it is warm."""

    sizes: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    """In bytes, by its process id and its name."""

    def sample(self, processes: list[psutil.Process]) -> None:
        for process in processes:
            with contextlib.suppress(psutil.Error):  # it ended while we looked
                if time.time() - process.create_time() > WARM_S:
                    name = " ".join(process.cmdline())[:40] or process.name()
                    self.sizes.setdefault((process.pid, name), []).append(process.memory_info().rss)

    def most(self, word: str) -> tuple[int, str]:
        """By how many bytes one whose name has the word in it has grown, and its name.

        From the least of the first samples to the least of the last: what is more are bodies that are there just then.
        """
        return max(
            (min(sizes[-5:]) - min(sizes[:5]), name)
            for (_, name), sizes in self.sizes.items()
            if len(sizes) >= 10 and word in name
        )


def good(url: str, versions: dict[str, int]) -> list[Ask]:
    """Of different sizes; each answer must be that of the version it names."""
    asks = []
    for count in COUNTS:
        tensors = rows(count)
        right = {version: expected(tensors, number) for version, number in versions.items()}

        def fits(answer: dict[str, Any], right: dict[str, Any] = right) -> bool:
            return is_right(answer, right[answer["model_version"]])

        asks.append(Ask(url, json.dumps(body(tensors)).encode(), is_right=fits))
    return asks


def bad(url: str) -> list[Ask]:
    """What is refused, in some of the many ways that ``tests.hostile`` has."""
    given = body(rows(1))
    wrong = {**given["inputs"][0], "shape": [1, 15]}
    return [
        Ask(url, b"{", status=400),
        Ask(url, b"[" * 250_000, status=400),
        Ask(url, json.dumps(given).encode().replace(b'"data": [', b'"data": [NaN, '), status=400),
        Ask(url, json.dumps({**given, "inputs": [wrong, given["inputs"][1]]}).encode(), status=400),
        Ask(url, json.dumps(given).encode()[:-20], {"content-encoding": "gzip"}, status=400),
        Ask(url, json.dumps(given).encode(), {"inference-header-content-length": "99999"}, status=400),
        Ask(url, b" " * (9 * 2**20), status=413),
        Ask(url.replace("/toy/", "/%2e%2e%2f/"), json.dumps(given).encode(), status=404),
    ]


@pytest.fixture(scope="module")
def versions(cluster: dict[str, str]) -> dict[str, int]:
    """By their names, what each adds to every logit."""
    numbers = range(3)
    published = publish(UPath(cluster["RAYLOOM_STORAGE"]), *map(answering, numbers))
    return {str(version): number for version, number in zip(published, numbers, strict=True)}


@pytest.fixture
def url(cluster: dict[str, str], versions: dict[str, int]) -> Iterator[str]:
    with deployed(cluster, int(next(iter(versions))), *TWO) as artifacts:
        yield f"{artifacts['http']}/v2/models/toy/infer"


def test_soak(cluster: dict[str, str], versions: dict[str, int], url: str, faults: Faults) -> None:
    there, rng, grown = Cluster(cluster), random.Random(0), Grown()
    asks = {False: good(url, versions), True: bad(url)}

    def next_ask() -> Ask:
        return rng.choice(asks[rng.random() < SHARE_BAD])

    rate = SHARE_OF_CAPACITY * capacity(next_ask, clients=16, seconds=5.0)
    injected = (
        f"{SOAK_S:.0f} s at {rate:.0f} requests/s, 1 of 5 bad; SIGKILL every {KILL_EVERY_S:g} s, another version every "
        f"{PROMOTE_EVERY_S:g} s"
    )
    with faults("soak", injected, "no wrong answer; else 503, or in flight on a killed one; memory flat") as fault:
        turns, deploys, kills_s = itertools.cycle([*list(versions)[1:], next(iter(versions))]), [], list[float]()
        with concurrent.futures.ThreadPoolExecutor(1) as pool, load_of(next_ask, rate) as sent:
            began_s = time.monotonic()
            kill_s, promote_s = began_s + KILL_EVERY_S, began_s + PROMOTE_EVERY_S / 2
            while (now_s := time.monotonic()) < began_s + SOAK_S:
                grown.sample(there.state.processes())
                if now_s >= kill_s:
                    rng.choice(there.replicas()).kill()
                    kills_s.append(time.monotonic())
                    kill_s += KILL_EVERY_S
                if now_s >= promote_s:
                    deploys.append(pool.submit(deploy, cluster, int(next(turns)), *TWO))
                    promote_s += PROMOTE_EVERY_S
                time.sleep(SAMPLE_EVERY_S)
        for deploy_ in deploys:
            deploy_.result()
        wait_until(lambda: len(there.replicas()) == 2)
        (of_replica, _), (of_any, name) = grown.most("ServeReplica"), grown.most("")
        fault.saw(f"{sent.summary}; p99 {sent.percentile_s(0.99):.2f} s; {len(deploys)} deploys")
        fault.saw(f"a replica +{of_replica / 2**20:.0f} MiB at most, {name} +{of_any / 2**20:.0f} MiB")
        assert all(answer.is_right for answer in sent.answers)
        refused = [failure for failure in sent.failed if failure.status == 503]
        lost = [failure for failure in sent.failed if failure.status != 503]
        assert len(refused) <= MAX_REFUSED * len(sent.answers)
        assert all(any(item.in_flight(kill_s) for kill_s in kills_s) for item in lost)
        assert len(lost) <= MAX_LOST * len(kills_s)
        assert len({answer.version for answer in sent.answers} - {None}) == min(1 + len(deploys), len(versions))
        assert of_replica <= MAX_GROWTH
        assert of_any <= MAX_GROWTH_OF_RAY
