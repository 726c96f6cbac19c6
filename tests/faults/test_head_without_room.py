"""All work runs on other nodes if the head has no CPUs, no GPUs and no custom resource that the recipe reserves."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_nodes import Node
from tests.helpers import local_cluster, run, submit, wait_until
from tests.launch import Cluster, Launch

DIGITS = ["recipes/digits.yaml", "train.workers=1", "train.epochs=1", "tune.trials=2", "tune.epochs=1"]
PLACED = ["compile.gpus=0", "compile.resources={serving: 1}", "serve.resources={serving: 1}", "serve.host=0.0.0.0"]
QUICK = ["compile.engines=[openvino]", "compile.precisions=[fp32]", "compile.batch_sizes=[1]"]

# Print the GPUs that a task sees if it reserves none, then if it reserves one.
SEEN = """
import os
from app.config import Placement
from jobs import _node
from jobs._cluster import connect
_node._USUAL_START_S = 60.0  # a slow start would print a line
connect()
for gpus in (0, 1):
    placement = Placement({"CPU": 1, "GPU": gpus})
    print(_node.run_on_node("look", lambda tell: repr(os.environ.get("CUDA_VISIBLE_DEVICES")), placement))
"""


@dataclass
class TwoNodes:
    cluster: Cluster
    second: Node

    def node_of(self, task: str) -> set[str]:
        """Return the ids of the nodes that ran tasks of this name."""
        address = ["--address", self.cluster.environment["RAY_API_SERVER_ADDRESS"]]
        listed = run("ray", "list", "tasks", *address, "--filter", f"name={task}", "--format", "json",
                     environment=self.cluster.environment)  # fmt: skip
        assert listed.returncode == 0, listed.stderr
        return {listed_task["node_id"] for listed_task in json.loads(listed.stdout)}


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    home = Path(tempfile.mkdtemp(prefix="rayloom-test-"))
    with local_cluster(home, "--num-cpus=0") as environment:
        cluster = Cluster(environment)
        second = Node(cluster, 2, "--num-gpus=1", '--resources={"serving": 4}')
        wait_until(lambda: cluster.cpus()[1] == 2)
        yield TwoNodes(cluster, second)
    shutil.rmtree(home)


@pytest.fixture(scope="module")
def lifecycle(nodes: TwoNodes) -> dict[str, Any]:
    """The result of a lifecycle. It leaves trained weights to compile."""
    return submit(nodes.cluster.environment, "lifecycle", *DIGITS, *PLACED, *QUICK)


def test_a_lifecycle_runs_where_there_is_room(nodes: TwoNodes, lifecycle: dict[str, Any]) -> None:
    assert lifecycle["status"] == "succeeded"
    assert nodes.node_of("compile") == {nodes.second.id}
    replicas = nodes.cluster.replicas()
    assert replicas
    assert all(nodes.second.holds(replica.pid) for replica in replicas)


@pytest.mark.usefixtures("lifecycle")
def test_a_refusal_comes_back_as_it_is(nodes: TwoNodes) -> None:
    refused = submit(nodes.cluster.environment, "compile", *DIGITS, *PLACED, "compile.engines=[tensorrt]",
                     succeeds=False)  # fmt: skip
    assert refused["error"].startswith("compile.engines names tensorrt: ")
    assert "ray::" not in refused["error"]
    nowhere = submit(nodes.cluster.environment, "compile", *DIGITS, "compile.resources={missing: 1}", succeeds=False)
    assert "need 1 of the resource 'missing', and the cluster has 0: ask for fewer" in nowhere["error"]


@pytest.mark.usefixtures("lifecycle")
def test_what_compiles_ends_with_its_job(nodes: TwoNodes, launch: Launch) -> None:
    client = launch("rayloom", "submit", "compile", *DIGITS, *PLACED, **nodes.cluster.environment)
    client.says("file fp32")
    assert nodes.cluster.processes("ray::compile")
    (submission_id,) = re.findall(r"Job '(\S+)' submitted", client.output)
    assert run("ray", "job", "stop", submission_id, environment=nodes.cluster.environment).returncode == 0
    client.ends()
    wait_until(lambda: not nodes.cluster.processes("ray::compile"), timeout_s=10)


def test_a_gpu_that_is_not_reserved_is_not_seen(nodes: TwoNodes) -> None:
    address = f"127.0.0.1:{nodes.cluster.state.gcs_port}"
    seen = run("python", "-c", SEEN, environment={**nodes.cluster.environment, "RAY_ADDRESS": address})
    assert seen.stdout.splitlines() == ["''", "'0'"], seen.stderr
