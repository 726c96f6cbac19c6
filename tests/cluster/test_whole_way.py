"""From data to answers on three machines without a shared disk: a head without CPUs for work, two that work."""

import json
import time
from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np
import pytest

from tests.cluster.conftest import RayCluster
from tests.tables import Faults

pytestmark = pytest.mark.slow
PICTURE = np.linspace(-1, 1, 64).tolist()
CALL = """
import json, sys
from pathlib import Path
import numpy, tritonclient.grpc
token = Path("~/.rayloom/endpoint_token").expanduser().read_text().strip()
given = tritonclient.grpc.InferInput("pixel_values", [1, 1, 8, 8], "FP32")
given.set_data_from_numpy(numpy.linspace(-1, 1, 64).astype(numpy.float32).reshape(1, 1, 8, 8))
clients = [tritonclient.grpc.InferenceServerClient(f"{address}:8001") for address in sys.argv[1:]]
answers = [client.infer("digits", [given], headers={"authorization": f"Bearer {token}"}) for client in clients]
print(json.dumps([answer.as_numpy("logits").ravel().tolist() for answer in answers]))
"""
"""Print what each address answers over gRPC."""
BODY = {"inputs": [{"name": "pixel_values", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": PICTURE}]}


def ask(cluster: RayCluster, address: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
    """Ask the endpoint at one of the machines."""
    with cluster.network.entered():
        url = f"http://{address}:8000/v2/models/digits/infer"
        return httpx.post(url, json=BODY, headers=headers or cluster.endpoint_headers, timeout=30)


def test_a_wrong_token_is_refused(cluster: RayCluster, lifecycle: dict[str, Any], faults: Faults) -> None:
    assert lifecycle["status"] == "succeeded"
    with faults("N6", "a wrong token of a node, of a job and of a request", "each refused in 60 s") as fault:
        began_s = time.monotonic()
        assert "token" in cluster.refuse()
        fault.saw(f"the node after {time.monotonic() - began_s:.1f} s")
        job = ("ray", "job", "submit", "--", "touch", "/tmp/was-run")
        refused = cluster.head.run(*job, environment={**cluster.environment, "RAY_AUTH_TOKEN": "0" * 64})
        assert refused.returncode != 0
        assert "token" in refused.stdout + refused.stderr
        assert not (cluster.head.disk / "was-run").exists()
        wrong = {"authorization": f"Bearer {'0' * 64}"}
        statuses = [ask(cluster, machine.address, wrong).status_code for machine in cluster.workers]
        fault.saw(f"requests with {set(statuses)}")
        assert statuses == [401, 401]
        assert len(cluster.nodes()) == 3
        assert time.monotonic() - began_s < 60


def test_each_machine_answers_alike(cluster: RayCluster, lifecycle: dict[str, Any]) -> None:
    assert lifecycle["status"] == "succeeded"
    answers = [ask(cluster, machine.address) for machine in cluster.workers for _ in range(8)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({str(answer.json()["outputs"]) for answer in answers}) == 1
    for machine in cluster.workers:
        (config,) = machine.disk.glob("rl-*/**/haproxy.cfg")
        assert "backend unary-rayloom" in config.read_text(encoding="utf-8"), "the fast way in"
    called = cluster.on_head("python", "-c", CALL, *(machine.address for machine in cluster.workers))
    assert called.returncode == 0, called.stderr
    right = np.float32(answers[0].json()["outputs"][0]["data"])
    assert all(np.array_equal(np.float32(logits), right) for logits in json.loads(called.stdout))
    assert cluster.replicas() == sorted(machine.address for machine in cluster.workers)
