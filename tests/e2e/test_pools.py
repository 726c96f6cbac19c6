"""Models in replicas of their own: found, listed, asked without a hop, and asleep until somebody asks."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
from upath import UPath

from tests.engine_contract import PROCESSOR, SIGNATURE, TEXTS, exported, rows
from tests.helpers import wait_until
from tests.jobs import run_job, serve_nothing
from tests.launch import Cluster
from tests.load import load
from tests.toy import LABELS, answering, asked, body, expected, is_right, publish_version

NUMBERS = {"common": 0, "small": 1}
"""What each model adds to the logits."""


@pytest.fixture(scope="module")
def endpoint(cluster: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The artifacts of a job, when one model is in the shared pool and one is in a pool of its own."""
    storage = UPath(cluster["RAYLOOM_STORAGE"])
    for name, number in NUMBERS.items():
        content = answering(number) if number else exported()
        publish_version(storage, name, content, SIGNATURE, PROCESSOR, LABELS)
    deploy(cluster, "small", "serve.pool=tiny", "serve.on_demand={memory_mb: 1}")
    yield deploy(cluster, "common")["artifacts"]
    serve_nothing(cluster)


@pytest.fixture(scope="module")
def sleepy(cluster: dict[str, str], endpoint: dict[str, Any]) -> dict[str, Any]:
    """The artifacts of a job that adds a model in a pool that may have no replica."""
    publish_version(UPath(cluster["RAYLOOM_STORAGE"]), "sleepy", answering(2), SIGNATURE, PROCESSOR, LABELS)
    scaling = "serve.scaling={upscale_delay_s: 0.1, downscale_delay_s: 1}"
    given = ["serve.pool=rare", "serve.replicas=[0, 1]", scaling]
    artifacts: dict[str, Any] = deploy(cluster, "sleepy", *given)["artifacts"]
    assert artifacts["http"] == endpoint["http"]
    return artifacts


def deploy(cluster: dict[str, str], name: str, *overrides: str, succeeds: bool = True) -> dict[str, Any]:
    given = ["recipes/reviews.yaml", f"name={name}", "serve.version=1", "serve.threads=1", *overrides]
    return run_job(cluster, "deploy", *given, succeeds=succeeds)


def admin(cluster: dict[str, str], command: str) -> str:
    """What HAProxy answers to a command."""
    state = json.loads((Path(cluster["RAYLOOM_HOME"]) / "cluster/cluster.json").read_text(encoding="utf-8"))
    (path,) = Path(state["runtime"]).glob("haproxy/*/admin.sock")
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(str(path))
        control.sendall(f"{command}\n".encode())
        return "".join(iter(lambda: control.recv(2**16).decode(), ""))


def ask(endpoint: dict[str, Any], name: str) -> httpx.Response:
    return httpx.post(f"{endpoint['http']}/v2/models/{name}/infer", json=body(rows(2)), timeout=60)


def test_each_model_is_found_by_both_protocols_and_listed_with_the_others(endpoint: dict[str, Any]) -> None:
    with tritonclient.grpc.InferenceServerClient(endpoint["grpc"]) as client:
        for name, number in NUMBERS.items():
            for _ in range(3):  # over a replica of the shared pool, and straight
                assert is_right(ask(endpoint, name).json(), expected(rows(2), number))
                answer = client.infer(name, asked(tritonclient.grpc, rows(2)))
                assert np.allclose(answer.as_numpy("logits"), expected(rows(2), number), atol=1e-4)
            assert client.get_model_metadata(name).name == name
            predicted = httpx.post(f"{endpoint['http']}/v1/models/{name}/predict", json={"inputs": TEXTS[:2]})
            assert predicted.json()["model_name"] == name
            assert len(predicted.json()["predictions"]) == 2
        indexed = {model.name for model in client.get_model_repository_index().models}
        counted = {stats.name for stats in client.get_inference_statistics().model_stats}
    listed = httpx.post(f"{endpoint['http']}/v2/repository/index").json()
    assert {model["name"] for model in listed} >= set(NUMBERS)
    assert indexed >= set(NUMBERS)
    assert counted >= set(NUMBERS)
    assert {model["name"] for model in httpx.get(f"{endpoint['http']}/v1/predict").json()} >= set(NUMBERS)
    assert ask(endpoint, "missing").status_code == 404


def test_haproxy_learns_where_a_model_is_and_then_leaves_out_the_shared_pool(
    cluster: dict[str, str], endpoint: dict[str, Any]
) -> None:
    def straight() -> int:
        """The requests that HAProxy has sent to the pool's own replicas."""
        lines = [line.split(",") for line in admin(cluster, "show stat").splitlines()]
        (column,) = (place for place, name in enumerate(lines[0]) if name == "stot")
        return sum(int(line[column]) for line in lines if line[:2] == ["http-rayloom-tiny", "BACKEND"])

    wait_until(lambda: ask(endpoint, "small").is_success and straight() > 0)
    before = straight()
    for _ in range(10):
        answer = ask(endpoint, "small")
        assert is_right(answer.json(), expected(rows(2), 1))
        assert "x-rayloom-pool" not in answer.headers, "it is for HAProxy alone"
    assert straight() == before + 10


def test_a_deploy_in_one_pool_replaces_no_replica_of_the_others_and_fails_no_request(
    cluster: dict[str, str], endpoint: dict[str, Any], ray: Cluster
) -> None:
    began_s = time.time()
    publish_version(UPath(cluster["RAYLOOM_STORAGE"]), "late", answering(3), SIGNATURE, PROCESSOR, LABELS)
    with load(f"{endpoint['http']}/v2/models/common/infer", body(rows(1)), per_second=50) as sent:
        deploy(cluster, "late", "serve.pool=late")
        assert is_right(ask(endpoint, "late").json(), expected(rows(2), 3))
        run_job(cluster, "undeploy", "recipes/reviews.yaml", "name=late")
        assert ask(endpoint, "late").status_code == 404
    for pool in ("rayloom", "rayloom-tiny"):
        replicas = ray.processes(f"{pool}:ModelServer")
        assert replicas
        assert all(process.create_time() < began_s for process in replicas)
    assert not sent.failed, sent.summary


def state_of_sleepy(endpoint: dict[str, Any]) -> tuple[str, str]:
    listed = httpx.post(f"{endpoint['http']}/v2/repository/index").json()
    (found,) = (model for model in listed if model["name"] == "sleepy")
    return found["state"], found["reason"]


@pytest.mark.slow
def test_short_requests_keep_a_pool_awake(sleepy: dict[str, Any], ray: Cluster) -> None:
    def replicas() -> set[int]:
        return {process.pid for process in ray.processes("ServeReplica:rayloom-rare:ModelServer")}

    wait_until(lambda: not replicas())  # another one could end meanwhile
    assert ask(sleepy, "sleepy").is_success
    began_s, awake = time.monotonic(), replicas()
    while time.monotonic() - began_s < 16:  # Serve remembers ten seconds
        assert ask(sleepy, "sleepy").is_success
        assert replicas() == awake, f"asleep after {time.monotonic() - began_s:.0f} s"
        time.sleep(0.4)


@pytest.mark.slow
def test_a_pool_that_nobody_asks_falls_asleep_and_the_first_requests_wake_it(
    sleepy: dict[str, Any], ray: Cluster
) -> None:
    def state() -> tuple[str, str]:
        return state_of_sleepy(sleepy)

    wait_until(lambda: not ray.processes("ServeReplica:rayloom-rare:ModelServer"))
    for _ in range(5):
        httpx.get(f"{sleepy['http']}/v1/predict")
        httpx.get(f"{sleepy['http']}/v2/models/stats")
        assert httpx.get(f"{sleepy['http']}/v2/models/sleepy/stats").json() == {"model_stats": []}
        assert httpx.get(f"{sleepy['http']}/v2/models/sleepy/ready").json() == {"name": "sleepy", "ready": True}
        with tritonclient.grpc.InferenceServerClient(sleepy["grpc"]) as client:
            assert client.is_model_ready("sleepy")
    time.sleep(2)  # a request would start a replica sooner
    assert not ray.processes("ServeReplica:rayloom-rare:ModelServer"), "neither lists nor probes wake it"
    assert state() == ("UNAVAILABLE", "pool rare has no replica: a request starts one")
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda _: ask(sleepy, "sleepy"), range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    assert all(is_right(answer.json(), expected(rows(2), 2)) for answer in answers)
    wait_until(lambda: state()[0] == "READY")


@pytest.mark.parametrize(
    ("name", "overrides", "reason"),
    [
        ("small", ["serve.pool=null"], "'small' is served by pool 'tiny', and serve.pool asks for the shared pool: un"),
        ("common", ["serve.pool=tiny"], "'common' is served by the shared pool, and serve.pool asks for pool 'tiny'"),
        (
            "small",
            ["serve.pool=tiny", "serve.labels={kind: none}"],
            "needs a node with the label kind: none, and none of the 1 nodes",
        ),
    ],
)
@pytest.mark.usefixtures("endpoint")
def test_a_pool_that_cannot_be_is_refused(
    cluster: dict[str, str], name: str, overrides: list[str], reason: str
) -> None:
    assert reason in deploy(cluster, name, *overrides, succeeds=False)["error"]
