"""A cluster of several nodes, started by plain ``ray start``, whose head has no CPUs for work."""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from app.ports import unused
from tests.helpers import submit
from tests.plain_cluster import PlainCluster, plain_cluster

pytestmark = pytest.mark.slow
DIGITS = ["recipes/digits.yaml", "train.workers=1", "train.epochs=1", "tune.trials=2", "tune.epochs=1",
          "compile.engines=[openvino]", "compile.precisions=[fp32]", "compile.batch_sizes=[1]"]  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[PlainCluster]:
    with plain_cluster() as cluster:
        cluster.join("--num-cpus=2", "--labels=kind=slow")
        cluster.join("--num-cpus=2", "--labels=kind=quick", '--resources={"fast": 2}')
        yield cluster


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("serve.host=127.0.0.1", "serve.host is 127.0.0.1, and the cluster has 3 nodes"),
        ("serve.port={taken}", "cannot be used (Address already in use): stop what listens there, or set serve.port"),
        ("serve.token_file=/nowhere/token", "/nowhere/token"),
        ("serve.canary={{version: 7, percent: 10}}", "has no model 'digits'"),
    ],
)
def test_what_deploy_would_refuse_ends_a_lifecycle_before_its_first_step(
    cluster: PlainCluster, override: str, reason: str
) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        given = override.format(taken=taken.getsockname()[1])
        host = [] if given.startswith("serve.host=") else ["serve.host=0.0.0.0"]
        refused = submit(cluster.environment, "lifecycle", *DIGITS, *host, given, succeeds=False)
    assert reason in refused["error"]
    assert not [*cluster.storage.glob("runs/*/*")], "something has run"


def test_the_whole_way_and_clients_of_both_protocols(cluster: PlainCluster, ports: list[int], tmp_path: Path) -> None:
    http, grpc = ports
    chosen = ["train.labels={kind: quick}", "train.resources={fast: 1}"]
    done = submit(cluster.environment, "lifecycle", *DIGITS, *address(ports), *chosen)
    assert done["status"] == "succeeded"
    # A source of one unit is prepared in the job's own process.
    rows = [{"text": f"text {number}", "label": number % 2} for number in range(1000)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    texts = [f"data.source={tmp_path}/rows.jsonl", "data.shards={size: 4096}"]
    assert submit(cluster.environment, "prepare", "recipes/reviews.yaml", *texts, *chosen)["status"] == "succeeded"
    (quick,) = (node["node_id"] for node in cluster.listed("nodes") if node["labels"].get("kind") == "quick")
    actors, tasks = cluster.listed("actors"), cluster.listed("tasks")
    for name, found in (
        ("workers", [actor for actor in actors if "RayTrainWorker" in actor["class_name"]]),
        ("trials", [actor for actor in actors if actor["class_name"] == "TrialActor"]),
        ("preparation", [task for task in tasks if task["name"] == "prepare"]),
    ):
        assert {one["node_id"] for one in found} == {quick}, f"{name}: {sorted({one['class_name'] for one in actors})}"

    token = (Path(cluster.environment["RAYLOOM_HOME"]) / "endpoint_token").read_text(encoding="utf-8").strip()
    shown = {"authorization": f"Bearer {token}"}
    picture = np.zeros((1, 1, 8, 8), np.float32)
    answers = []
    for library, port in ((tritonclient.http, http), (tritonclient.grpc, grpc)):
        client = library.InferenceServerClient(f"127.0.0.1:{port}")
        (asked,) = client.get_model_metadata("digits", headers=shown, **JSON[library])["inputs"]
        given = library.InferInput(asked["name"], list(picture.shape), asked["datatype"])
        given.set_data_from_numpy(picture)
        # The HTTP client adds a header to the given ones.
        answers.append(client.infer("digits", [given], headers={**shown}).as_numpy("logits"))
    assert np.array_equal(*answers)
    assert answers[0].shape == (1, 10)
    assert httpx.post(f"http://127.0.0.1:{http}/v2/models/digits/infer", json={}).status_code == 401


JSON = {tritonclient.http: {}, tritonclient.grpc: {"as_json": True}}


@pytest.fixture(scope="module")
def ports() -> list[int]:
    """Free ports for the endpoint, which keeps them until its cluster stops."""
    return unused(2)


def address(ports: list[int]) -> list[str]:
    return ["serve.host=0.0.0.0", f"serve.port={ports[0]}", f"serve.grpc_port={ports[1]}"]


FAULTS = {
    "hangs": "time.sleep(3600)",
    "refuses": "raise PermissionError(13, 'Permission denied', str(path))",
    "dies": "os._exit(1)",
}
"""What a node does, instead of looking for the file that marks storage."""

FAULTY = """
import os, time
look = os.stat
def faulty(path, *others, **named):
    if ".mark-" in str(path):
        {fault}
    return look(path, *others, **named)
os.stat = faulty
"""


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("sees another folder", r"the nodes do not share storage: .* cannot see"),
        ("hangs", r"node [\d.]+ cannot read storage '{storage}' \(no answer within 60 s\): mend its mount"),
        ("refuses", r"node [\d.]+ cannot read storage '{storage}' \(.*Permission denied.*\): mend its mount"),
        ("dies", r"node [\d.]+ cannot read storage '{storage}' \(.*died.*\): mend its mount"),
    ],
)
def test_storage_that_a_node_cannot_read_ends_a_lifecycle_before_its_first_step(
    fault: str, reason: str, ports: list[int], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULTY.format(fault=FAULTS.get(fault, "pass")), encoding="utf-8")
    with plain_cluster() as cluster:
        cluster.storage.mkdir()
        faulty = f"export PYTHONPATH={tmp_path}"
        cluster.join("--num-cpus=2", before=faulty if fault in FAULTS else f"mount -t tmpfs none {cluster.storage}")
        refused = submit(cluster.environment, "lifecycle", *DIGITS, *address(ports), succeeds=False)
        assert re.search(reason.format(storage=cluster.storage), refused["error"]), refused["error"]
        assert not [*cluster.storage.glob("runs/*/*")], "something has run"
