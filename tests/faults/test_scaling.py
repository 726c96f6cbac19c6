"""Replicas that come and go with the load, and what clients notice of it."""

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from upath import UPath

from tests.engine_contract import exported, rows
from tests.helpers import submit, wait_until
from tests.launch import Cluster
from tests.load import Ask, load, load_of
from tests.tables import Faults
from tests.toy import body, publish

pytestmark = pytest.mark.faults

BODY = body(rows(1))
CONTENT = json.dumps(BODY).encode() + b" " * 16384
"""So long that HAProxy does not wait for the end of it."""
LENGTH = {"content-length": str(len(CONTENT))}
WIDE = json.dumps(body(rows(64))).encode()
CLIENTS = 32
"""Each asks again when it has its answer: more requests at a time than fill a replica's batch of 8."""
HELD_S = 8.0
"""For how long others are in a replica: when it is stopped, longer than it takes new connections."""
_HTTP_PORTS = range(30000, 31000)
"""Of Serve's replicas, one each: it listens once it is ready."""


def connections(replica: psutil.Process) -> set[str]:
    """What they are: listening, or those of requests."""
    with contextlib.suppress(psutil.Error):  # it ended while we looked
        return {
            connection.status for connection in replica.net_connections("tcp") if connection.laddr.port in _HTTP_PORTS
        }
    return set()


def cold_replicas(ray: Cluster) -> list[psutil.Process]:
    """The processes of the pool that sleeps."""
    return ray.processes("ServeReplica:rayloom-rare:ModelServer")


def replicas(ray: Cluster) -> list[set[str]]:
    """The connections of each replica."""
    return [connections(replica) for replica in ray.replicas()]


def ready(ray: Cluster) -> int:
    """The number of replicas that take new connections."""
    return sum(psutil.CONN_LISTEN in replica for replica in replicas(ray))


def deploy(cluster: dict[str, str], scaling: str, *overrides: str, replicas: str = "[1, 2]") -> str:
    """Deploy the toy model, and return its path for inference. It begins with one replica."""
    (version,) = publish(UPath(cluster["RAYLOOM_STORAGE"]), exported())
    ranged = [f"serve.replicas={replicas}", f"serve.scaling={scaling}", "serve.threads=1", *overrides]
    deployed = submit(cluster, "deploy", "recipes/reviews.yaml", "name=toy", f"serve.version={version}", *ranged)
    assert deployed["metrics"]["replicas"] == 1
    return f"{deployed['artifacts']['http']}/v2/models/toy/infer"


def test_replicas_follow_a_target_of_latency(cluster: dict[str, str], ray: Cluster, faults: Faults) -> None:
    # Less than one request at a time, so the load asks for one replica. No engine answers in 50 µs.
    url = deploy(cluster, "{upscale_delay_s: 1, downscale_delay_s: 2, latency_target_ms: 0.05}")
    with faults("S5", "40 requests/s, slower than the target of latency; then none", "2 replicas, then 1") as fault:
        with load(url, BODY, 40) as sent:
            wait_until(lambda: ready(ray) == 2)
        wait_until(lambda: ready(ray) == 1, timeout_s=120)
        fault.saw(f"2, then 1; {len(sent.failed)} of {len(sent.answers)} failed")
        assert not sent.failed


@pytest.fixture(autouse=True)
def nothing_is_served(cluster: dict[str, str]) -> Iterator[None]:
    """A model stays in the pool of its first deploy."""
    yield
    submit(cluster, "undeploy", "recipes/reviews.yaml", "name=toy")


def wake(url: str, ray: Cluster) -> tuple[float, float]:
    """Ask a pool without replicas. Return when its answer came, and how long its replica took to start, in seconds."""
    wait_until(lambda: not cold_replicas(ray), timeout_s=120)
    time.sleep(3)  # Serve notices later that the process has ended
    with ThreadPoolExecutor() as client:
        asked_s = time.time()
        answer = client.submit(httpx.post, url, json=BODY, timeout=60)
        wait_until(lambda: bool(cold_replicas(ray)))
        (replica,) = cold_replicas(ray)
        wait_until(lambda: psutil.CONN_LISTEN in connections(replica))
        loaded_s = time.time()
        assert answer.result().status_code == 200
        # Ray may have started the process before.
        return time.time() - asked_s, loaded_s - max(replica.create_time(), asked_s)


def test_a_pool_that_sleeps_answers_soon_after_it_has_loaded(
    cluster: dict[str, str], ray: Cluster, faults: Faults
) -> None:
    scaling = "{upscale_delay_s: 0.1, downscale_delay_s: 3}"  # longer than a deploy takes to count its replicas
    url = deploy(cluster, scaling, "serve.pool=rare", "serve.request_timeout_s=60", replicas="[0, 1]")
    with faults("S5", "the first request of a pool without replicas", "answered in the time to load + 1 s") as fault:
        for _ in range(3):
            answered_s, load_s = wake(url, ray)
            fault.saw(f"{answered_s:.1f} s, of which {load_s:.1f} s were the start of the replica")
            assert answered_s < load_s + 1


def test_replicas_that_are_added_and_stopped_lose_nothing(
    cluster: dict[str, str], ray: Cluster, faults: Faults
) -> None:
    def one_only_answers() -> bool:
        return {psutil.CONN_ESTABLISHED} in replicas(ray)

    def ask_on(client: httpx.Client, url: str) -> list[int]:
        statuses = []
        while not two_answer.is_set():
            statuses.append(client.post(url, content=WIDE).status_code)
        return statuses

    async def held_back() -> AsyncIterator[bytes]:
        yield CONTENT[:5]
        await asyncio.sleep(HELD_S)
        yield CONTENT[5:]

    url = deploy(cluster, "{upscale_delay_s: 1, downscale_delay_s: 2}", "serve.batching.max_batch_size=8")
    with faults("S5", "1 replica to 2 and back to 1, at 40 requests/s", "0 errors") as fault:
        two_answer = threading.Event()
        with (
            load(url, BODY, 40) as sent,
            load_of(lambda: Ask(url, held_back(), LENGTH), 2) as held,
            httpx.Client(timeout=60) as client,
            ThreadPoolExecutor(CLIENTS) as pool,
        ):
            busy = [pool.submit(ask_on, client, url) for _ in range(CLIENTS)]
            try:
                wait_until(lambda: ready(ray) == 2)
            finally:
                two_answer.set()
            wait_until(one_only_answers, timeout_s=120)
            assert ready(ray) == 1
        wide = Counter(status for client in busy for status in client.result())
        failed = [*sent.failed, *held.failed]
        fault.saw(f"{len(failed)} of {len(sent.answers) + len(held.answers) + wide.total()} failed")
        assert not failed
        assert set(wide) == {200}
