"""Replicas that come and go with the load, and what clients notice of it."""

import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from upath import UPath

from tests.engine_contract import TEXTS, exported
from tests.helpers import submit, wait_until
from tests.launch import Cluster
from tests.load import load
from tests.tables import Faults
from tests.toy import publish

pytestmark = pytest.mark.faults

BODY = {"inputs": TEXTS[:1]}
SLOW = 40
"""Requests whose bodies are not there yet: they are in the replica, and cost it nothing."""
_HTTP_PORTS = range(30000, 31000)
"""Of Serve's replicas, one each: it listens once it is ready."""


def listens(replica: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # it ended while we looked
        found = replica.net_connections("tcp")
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port in _HTTP_PORTS for each in found)
    return False


def test_replicas_that_are_added_and_stopped_lose_nothing(
    cluster: dict[str, str], ray: Cluster, faults: Faults
) -> None:
    def ready() -> int:
        return sum(map(listens, ray.processes("ServeReplica:rayloom:ModelServer")))

    def send_slowly(url: str) -> int:
        def body() -> Iterator[bytes]:
            content = json.dumps(BODY).encode()
            yield content[:5]
            assert two_answer.wait(60)
            yield content[5:]

        return httpx.post(url, content=body(), timeout=60).status_code

    (version,) = publish(UPath(cluster["RAYLOOM_STORAGE"]), exported())
    ranged = ["serve.replicas=[1, 2]", "serve.scaling={upscale_delay_s: 1, downscale_delay_s: 2}"]
    recipe = ["recipes/reviews.yaml", "name=toy", f"serve.version={version}", "serve.threads=1", *ranged]
    deployed = submit(cluster, "deploy", *recipe, "serve.batching.max_batch_size=8")
    assert deployed["metrics"]["replicas"] == 1
    url = f"{deployed['artifacts']['http']}/v1/models/toy/predict"
    with faults("S5", "1 replica to 2 and back to 1, at 40 requests/s", "0 errors") as fault:
        two_answer = threading.Event()
        with load(url, BODY, 40) as sent, ThreadPoolExecutor(SLOW) as pool:
            slow = [pool.submit(send_slowly, url) for _ in range(SLOW)]
            wait_until(lambda: ready() == 2)
            two_answer.set()
            wait_until(lambda: ready() == 1, timeout_s=120)
        fault.saw(f"{len(sent.failed)} of {len(sent.answers) + SLOW} failed")
        assert not sent.failed
        assert {each.result() for each in slow} == {200}
