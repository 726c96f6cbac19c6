"""What clients of the endpoint notice when parts of it die, change or are asked too much."""

import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
from upath import UPath

from tests.engine_contract import exported, rows
from tests.helpers import run, submit, wait_until
from tests.launch import Cluster
from tests.load import load, percentile_s
from tests.tables import Faults
from tests.toy import answering, body, deploy, publish
from tests.wire import drip, exchange

pytestmark = pytest.mark.faults

DIGITS = ["recipes/digits.yaml", "name=held", "tune=null", "train.epochs=3", "serve.replicas=2"]
BODY = {
    "inputs": [
        {
            "name": "pixel_values",
            "shape": [1, 1, 8, 8],
            "datatype": "FP32",
            "data": np.linspace(-1, 1, 64).tolist(),
        }
    ]
}
TOY = ["recipes/reviews.yaml", "name=toy"]
KILLS, SLOW = 20, 100


@pytest.fixture(scope="module")
def deployed(cluster: dict[str, str]) -> dict[str, Any]:
    """Two replicas."""
    return submit(cluster, "lifecycle", *DIGITS)


@pytest.fixture
def url(deployed: dict[str, Any]) -> str:
    return f"{deployed['artifacts']['http']}/v2/models/held/infer"


@pytest.fixture
def replicas(cluster: dict[str, str], deployed: dict[str, Any]) -> Iterator[Cluster]:
    """The cluster, with both replicas in it before and after."""
    there = Cluster(cluster)
    wait_until(lambda: len(there.replicas()) == 2)
    yield there
    wait_until(lambda: len(there.replicas()) == 2)


def test_what_a_killed_replica_was_asked_another_answers(replicas: Cluster, url: str, faults: Faults) -> None:
    injected = f"SIGKILL of 1 of 2 replicas, {KILLS} times, at 40 requests/s"
    with faults("S1", injected, "what it had not read yet fails; 2 again in 15 s") as fault:
        back_s = []
        with load(url, BODY, 40) as sent:
            for _ in range(KILLS):
                time.sleep(2)
                replicas.replicas()[0].kill()
                killed_s = time.monotonic()
                wait_until(lambda: len(replicas.replicas()) == 1)
                wait_until(lambda: len(replicas.replicas()) == 2)
                back_s.append(time.monotonic() - killed_s)
            time.sleep(2)
        fault.saw(f"{sent.summary}, p99 {sent.percentile_s(0.99):.2f} s; 2 again after {max(back_s):.1f} s")
        assert len(sent.failed) <= KILLS
        assert max(back_s) <= 15


@pytest.mark.parametrize(
    ("word", "bound_s"),
    [("ServeController", 0.0), ("HAProxyManager", 5.0), ("/haproxy", 5.0)],
    ids=str,
)
def test_requests_are_answered_while_what_steers_them_is_started_again(
    replicas: Cluster, url: str, faults: Faults, word: str, bound_s: float
) -> None:
    with faults(
        "S3", f"SIGKILL of {word.strip('/')} at 40 requests/s", f"no answer for {bound_s:g} s at most"
    ) as fault:
        with load(url, BODY, 40) as sent:
            time.sleep(2)
            found = replicas.processes(word)
            for process in found:
                process.kill()
            killed_s = time.monotonic()
            time.sleep(10 + bound_s)
        away_s = max((failure.sent_s - killed_s for failure in sent.failed), default=0.0)
        fault.saw(f"{sent.summary}, up to {away_s:.1f} s after")
        assert found
        assert not sent.failed if bound_s == 0 else away_s <= bound_s


def test_a_version_that_is_damaged_never_answers_and_the_old_one_does(
    replicas: Cluster, cluster: dict[str, str], url: str, deployed: dict[str, Any], faults: Faults
) -> None:
    first = deployed["artifacts"]["model"].rpartition("/")[2]
    second = submit(cluster, "compile", *DIGITS)["artifacts"]["model"].rpartition("/")[2]
    model = Path(cluster["RAYLOOM_STORAGE"]) / "models/held" / second / "model.onnx"
    whole = model.read_bytes()
    model.write_bytes(whole[:-100])
    with faults("S4", "deploy of a version whose file is cut, at 40 requests/s", "0 errors; the old one") as fault:
        with load(url, BODY, 40) as sent:
            assert submit(cluster, "deploy", *DIGITS, f"serve.version={second}", succeeds=False)["status"] == "failed"
        fault.saw(sent.summary)
        assert not sent.failed
        assert {answer.version for answer in sent.answers} == {first}
    model.write_bytes(whole)
    with faults("S5", "deploy of another version, and back, at 40 requests/s", "0 errors") as fault:
        with load(url, BODY, 40) as sent:
            for version in (second, first):
                submit(cluster, "deploy", *DIGITS, f"serve.version={version}")
        fault.saw(sent.summary)
        assert not sent.failed
        assert {answer.version for answer in sent.answers} == {first, second}


def test_a_version_that_no_replica_can_load_never_answers_and_the_old_one_does(
    replicas: Cluster, cluster: dict[str, str], faults: Faults
) -> None:
    good, *bad = publish(UPath(cluster["RAYLOOM_STORAGE"]), exported(), b"no model", answering(np.nan), exported())
    toy = deploy(cluster, good, "serve.replicas=2")
    wait_until(lambda: len(replicas.replicas()) == 2)
    injected = "deploys of a version whose file is no model, one that answers NaN, and one that is not ready in time"
    with faults("S4", f"{injected}, at 40 requests/s", "0 errors; the old one") as fault:
        with load(f"{toy['http']}/v2/models/toy/infer", body(rows(1)), 40) as sent:
            told = [
                submit(cluster, "deploy", *TOY, f"serve.version={version}", *override, succeeds=False)["error"]
                for version, override in zip(bad, [(), (), ("serve.ready_timeout_s=0.5",)], strict=True)
            ]
        fault.saw(sent.summary)
        assert "cannot load" in told[0]
        assert "not finite" in told[1]
        assert "not ready after 0.5 s" in told[2]
        assert not sent.failed
        assert len(sent.answers) >= 150
        assert {answer.version for answer in sent.answers} == {str(good)}
    submit(cluster, "undeploy", *TOY)


def test_a_deploy_goes_through_though_a_replica_dies_meanwhile(
    replicas: Cluster, cluster: dict[str, str], url: str, faults: Faults
) -> None:
    with faults(
        "S5", "SIGKILL of an old replica during a deploy, at 40 requests/s", "deployed; what was in flight can fail"
    ) as fault:
        with load(url, BODY, 40) as sent, ThreadPoolExecutor(1) as pool:
            old = replicas.replicas()
            deploying = pool.submit(submit, cluster, "deploy", *DIGITS, "serve.queue_limit=100")
            wait_until(lambda: len(replicas.replicas()) > len(old))
            old[0].kill()
            killed_s = time.monotonic()
            assert deploying.result()["status"] == "succeeded"
        fault.saw(sent.summary)
        assert all(failure.in_flight(killed_s) for failure in sent.failed)
    submit(cluster, "deploy", *DIGITS)


def test_a_replica_whose_event_loop_is_blocked_is_replaced(
    replicas: Cluster, cluster: dict[str, str], url: str, faults: Faults
) -> None:
    job = ["ray", "job", "submit", "--working-dir", ".", "--", "python", "-m", "tests.faults.block_replica", "120"]
    with faults(
        "S2",
        "event loop of 1 of 2 replicas blocked, at 40 requests/s",
        "replaced in 15 s; what it had not read yet fails",
    ) as fault:
        with load(url, BODY, 40) as sent:
            output = run(*job, environment=cluster).stdout
            (found,) = re.findall(r"BLOCKED (\d+) (\S+)", output)
            pid, blocked_s = int(found[0]), float(found[1])
            wait_until(lambda: not psutil.pid_exists(pid))
            gone_s = time.time() - blocked_s
            wait_until(lambda: len(replicas.replicas()) == 2)
            back_s = time.time() - blocked_s
            time.sleep(2)
        fault.saw(f"killed after {gone_s:.1f} s, 2 again after {back_s:.1f} s")
        fault.saw(f"{sent.summary}, slowest {sent.percentile_s(1.0):.1f} s")
        assert back_s <= 15
        assert len(sent.failed) <= 2


def test_a_replica_that_is_slow_gets_fewer_requests(replicas: Cluster, url: str, faults: Faults) -> None:
    with faults("S2", "1 of 2 replicas 2 s slower, at 40 requests/s", "fewer than 10 % wait for it") as fault:
        slow = replicas.replicas()[0]
        with load(url, BODY, 40) as sent:
            for _ in range(6):
                slow.suspend()
                time.sleep(2)
                slow.resume()
                time.sleep(0.1)
        waited = sum(answer.seconds > 1 for answer in sent.answers) / len(sent.answers)
        fault.saw(f"{waited:.0%} wait for more than 1 s; {sent.summary}")
        assert waited < 0.1
        assert not sent.failed


def test_requests_that_never_end_are_given_up(replicas: Cluster, url: str, faults: Faults) -> None:
    address = urlsplit(url).netloc
    never = f"{SLOW} connections whose headers never end, and {SLOW} whose bodies drip"
    head = f"POST {urlsplit(url).path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n".encode()
    with faults("S7", never, "408 and closed in 35 s; others are answered") as fault:
        with load(url, BODY, 40) as sent, ThreadPoolExecutor(2 * SLOW) as pool:
            began_s = time.monotonic()
            dripping = [pool.submit(drip, address, head, pause_s=1, patience_s=60) for _ in range(SLOW)]
            replies = list(pool.map(lambda _: exchange(address, b"POST / HTTP/1.1\r\n", patience_s=60), range(SLOW)))
            assert {said.result()[:13] for said in dripping} == {b"HTTP/1.1 408 "}
            given_up_s = time.monotonic() - began_s
        fault.saw(f"{Counter(reply.status for reply in replies)} after {given_up_s:.1f} s; {sent.summary}")
        assert {reply.status for reply in replies} == {408}
        assert given_up_s <= 35
        assert not sent.failed


def test_more_than_can_be_answered_is_refused_at_once(
    replicas: Cluster, cluster: dict[str, str], url: str, faults: Faults
) -> None:
    wide = {"inputs": [{**BODY["inputs"][0], "shape": [1024, 1, 8, 8], "data": np.zeros(1024 * 64).tolist()}]}
    submit(cluster, "deploy", *DIGITS, "serve.queue_limit=2")
    before = sum(process.memory_info().rss for process in replicas.replicas())
    with faults("S7", "as many rows as 2 replicas cannot answer, for 10 s", "200, or 503 with Retry-After") as fault:
        with load(url, wide, 40) as sent:
            time.sleep(10)
        grown = sum(process.memory_info().rss for process in replicas.replicas()) - before
        refused_s = percentile_s(sent.failed, 0.99)
        time.sleep(5)
        with load(url, BODY, 40) as after:
            time.sleep(2)
        fault.saw(f"{sent.summary}; 99 in 100 refused in {refused_s * 1e3:.0f} ms; memory {grown / 2**20:+.0f} MiB")
        fault.saw(f"5 s later {after.summary}, 99 in 100 in {after.percentile_s(0.99) * 1e3:.0f} ms")
        assert set(sent.statuses) == {200, 503}
        assert all(failure.retry_after for failure in sent.failed)
        assert grown <= 64 * 2**20
        assert not after.failed
    submit(cluster, "deploy", *DIGITS)
