"""Machines that are lost, announced, cut off, slow or full under requests."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.cluster.conftest import RayCluster
from tests.cluster.machines import Machine
from tests.cluster.test_whole_way import BODY, ask
from tests.helpers import wait_until
from tests.load import Ask, Load, load_of, percentile_s
from tests.tables import Fault, Faults

pytestmark = pytest.mark.slow
BACK_S = 15
"""Time after which all is well again."""


def answers(cluster: RayCluster, machine: Machine) -> bool:
    """Return whether a machine's HAProxy listens, and knows a replica."""
    try:
        return machine.address in cluster.replicas() and ask(cluster, machine.address).is_success
    except httpx.ConnectError:
        return False


@contextmanager
def asked(cluster: RayCluster, url: str, per_second: float, fault: Fault) -> Iterator[Load]:
    """Ask at a rate in the block, then check the answers: at most 0.1 % fail, and none is wrong."""
    right = ask(cluster, cluster.workers[0].address).json()["outputs"]
    ask_once = Ask(
        url, json.dumps(BODY).encode(), cluster.endpoint_headers, is_right=lambda answer: answer["outputs"] == right
    )
    with cluster.network.entered(), load_of(lambda: ask_once, per_second) as sent:
        time.sleep(5)
        yield sent
    fault.saw(f"{sent.summary}, the slowest took {max(answer.seconds for answer in sent.answers):.1f} s")
    assert all(answer.is_right for answer in sent.answers)
    assert len(sent.failed) <= len(sent.answers) / 1000


def test_what_a_lost_machine_was_asked_another_answers(cluster: RayCluster, url: str, faults: Faults) -> None:
    injected = "power of 1 of 2 serving machines lost at 200 requests/s"
    with faults("N2", injected, "at most 0.1 % fail, full rate in 15 s") as fault:
        with asked(cluster, url, 200, fault) as sent:
            cluster.lose(cluster.workers[1])
            lost_s = time.monotonic()
            time.sleep(BACK_S + 10)
        late = [answer for answer in sent.answers if answer.sent_s > lost_s + BACK_S]
        fault.saw(f"{len(late) / 10:.0f}/s after {BACK_S} s")
        assert percentile_s(late, 0.99) < 1


def test_a_notice_of_preemption_moves_the_replica(cluster: RayCluster, url: str, faults: Faults) -> None:
    injected = "notice that a serving machine goes in 60 s at 100 requests/s, then its power lost"
    with faults("N7", injected, "a replica elsewhere before; at most 0.1 % fail") as fault:
        stays, leaves, new = *cluster.workers, cluster.join()
        with asked(cluster, url, 100, fault):
            announced_s = cluster.drain(leaves, within_s=60)
            wait_until(lambda: cluster.replicas() == sorted([stays.address, new.address]), timeout_s=60)
            fault.saw(f"moved after {time.monotonic() - announced_s:.1f} s")
            time.sleep(max(0.0, announced_s + 60 - time.monotonic()))
            cluster.lose(leaves)
            time.sleep(BACK_S)


def test_a_serving_machine_that_is_cut_off_for_20_s_is_missed_by_nobody(
    cluster: RayCluster, url: str, faults: Faults
) -> None:
    with faults("N8", "1 of 2 serving machines unreachable for 20 s at 100 requests/s", "0.1 % fail") as fault:
        with asked(cluster, url, 100, fault):
            cluster.workers[1].unplug()
            time.sleep(20)
            cluster.workers[1].plug()
            time.sleep(BACK_S)
        assert len(cluster.nodes()) == 3


def test_a_machine_whose_disk_is_full_goes_on_answering(cluster: RayCluster, url: str, faults: Faults) -> None:
    with faults("N10", "Ray's disk on 1 of 2 serving machines full at 100 requests/s", "at most 0.1 % fail") as fault:
        lost, full = (
            cluster.workers[1],
            cluster.join(before="mkdir -p /tmp/ray && mount -t tmpfs -o size=200m ray /tmp/ray"),
        )
        cluster.lose(lost)
        wait_until(lambda: answers(cluster, full), timeout_s=180)
        with asked(cluster, url.replace(cluster.workers[0].address, full.address), 100, fault):
            filled = full.run("dd", "if=/dev/zero", "of=/tmp/ray/full", "bs=1M", environment={})
            assert "No space left" in filled.stderr
            time.sleep(2 * BACK_S)
        cluster.lose(full)
