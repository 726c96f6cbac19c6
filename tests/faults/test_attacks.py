"""Effects of attacks on other clients of the endpoint."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from upath import UPath

from tests.attacks import ATTACKS, answers
from tests.engine_contract import exported, rows
from tests.helpers import ROOT, wait_until
from tests.launch import Cluster
from tests.load import load
from tests.tables import Faults
from tests.toy import body, deployed, publish

pytestmark = pytest.mark.faults

ATTACK_S = float(os.environ.get("RAYLOOM_ATTACK_S", "30")) / len(ATTACKS)
"""Duration of each attack. With ``RAYLOOM_ATTACK_S=300``, all attacks together take 5 minutes."""
PER_SECOND, MAX_P99_S, MAX_GROWTH = 40.0, 1.0, 256 * 2**20
"""The good client's rate and latency limit, and the limit on each replica's memory growth in bytes."""


@pytest.fixture(scope="module")
def endpoint(cluster: dict[str, str]) -> Iterator[dict[str, Any]]:
    (version,) = publish(UPath(cluster["RAYLOOM_STORAGE"]), exported())
    with deployed(cluster, version, "serve.replicas=2", "serve.threads=1") as artifacts:
        wait_until(lambda: len(Cluster(cluster).replicas()) == 2)
        with load(f"{artifacts['http']}/v2/models/toy/infer", body(rows(1)), PER_SECOND):
            time.sleep(2)
        yield artifacts


@pytest.mark.parametrize("name", ATTACKS)
def test_others_are_answered_while_the_endpoint_is_attacked(
    cluster: dict[str, str], endpoint: dict[str, Any], faults: Faults, name: str
) -> None:
    attack, before = ATTACKS[name], {process.pid: process for process in Cluster(cluster).replicas()}
    sizes = {pid: process.memory_info().rss for pid, process in before.items()}
    address = str(endpoint[attack.port]).rpartition("//")[2]
    assert answers(address, attack.port), "the attacks would be refused before they cost anything"
    command = [sys.executable, "-m", "tests.attacks", name, address, str(ATTACK_S)]
    injected = f"{name}, from {attack.clients} clients for {ATTACK_S:.0f} s, beside {PER_SECOND:g} requests/s"
    with faults("S10", injected, f"none fails, p99 below {MAX_P99_S:g} s, no replica replaced") as fault:
        with load(f"{endpoint['http']}/v2/models/toy/infer", body(rows(1)), PER_SECOND) as sent:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=600)
        made = json.loads(done.stdout)
        grown = max(process.memory_info().rss - sizes[pid] for pid, process in before.items() if process.is_running())
        fault.saw(f"{made}; {sent.summary}, p99 {sent.percentile_s(0.99):.2f} s, replicas {grown / 2**20:+.0f} MiB")
        assert made.get("made", 0) + made.get("cut off", 0)
        assert "not reached" not in made
        assert not sent.failed
        assert sent.percentile_s(0.99) <= MAX_P99_S
        assert {process.pid for process in Cluster(cluster).replicas()} == before.keys()
        assert grown <= MAX_GROWTH
