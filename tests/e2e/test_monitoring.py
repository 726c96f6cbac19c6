"""A watched cluster: every panel has data, and what breaks reaches the receivers through a real Alertmanager."""

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from aiosmtpd.controller import Controller
from aiosmtpd.handlers import Message
from upath import UPath

from app.cluster.ports import unused
from app.cluster.state import ClusterState
from app.monitoring.server import dashboards
from app.telemetry import catalog
from app.telemetry.metrics import Kind, Metric
from tests.cascades import publish_stages
from tests.engine_contract import exported, rows
from tests.helpers import ROOT, local_cluster, run, wait_until
from tests.jobs import run_job
from tests.launch import Cluster
from tests.receiver import HttpReceiver
from tests.tables import Faults
from tests.toy import answering, body, deploy, publish
from tests.unit.test_monitoring import expressions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("prometheus-alertmanager"), reason="Prometheus is not installed"),
]
MAX_S = 60.0
"""From a cause to the received webhook, for alerts without a window."""
ABSENT = ("gpu", "gram", "fragmentation", "tokens")
"""In what has no data here: it is of GPUs, or of language models."""
TRAINING = [
    "recipes/digits.yaml", "train.workers=2", "train.epochs=8", "train.early_stopping=null", "train.max_failures=1",
    "train.checkpoint.every_steps=5", "train.profile={wait: 1, warmup: 1, active: 2}",
    "model.factory=tests.faults.models:DropoutCnn", "model.args.pause_s=0.2",
    "alerts=[{metric: loss, not_finite: true, do: [notify]}]",
]  # fmt: skip


class Mails(Message):
    """Keeps the subjects of mails."""

    def __init__(self) -> None:
        super().__init__()
        self.subjects: list[str] = []

    def handle_message(self, message: Any) -> None:
        self.subjects.append(message["subject"])


@pytest.fixture(scope="module")
def mails() -> Iterator[Controller]:
    controller = Controller(Mails(), hostname="127.0.0.1", port=unused(1)[0])
    controller.start()
    yield controller
    controller.stop()


@pytest.fixture(scope="module")
def hook() -> Iterator[HttpReceiver]:
    receiver = HttpReceiver(200)
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()


@pytest.fixture(scope="module")
def watched(home: Path, hook: HttpReceiver, mails: Controller) -> Iterator[dict[str, str]]:
    """A cluster with monitoring, and the receivers of a recipe."""
    secret = home / "secret"
    secret.write_text("a-secret", encoding="utf-8")
    recipe = yaml.safe_load((ROOT / "recipes/digits.yaml").read_text(encoding="utf-8"))
    recipe["notify"] = {
        "webhook": {"url": hook.url, "secret": f"file:{secret}"},
        "email": {"host": "127.0.0.1", "port": mails.port, "security": "none", "sender": "a@x.org", "to": ["b@x.org"]},
    }
    (home / "notify.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    with local_cluster(home / "watched", "--monitoring", f"--notify={home / 'notify.yaml'}", "--num-cpus=4") as cluster:
        watchers = Cluster(cluster).state.watchers()
        assert len(watchers) >= 3
        yield cluster
    assert not any(process.is_running() for process in watchers)


@pytest.fixture(scope="module")
def state(watched: dict[str, str]) -> ClusterState:
    return Cluster(watched).state


def ask(state: ClusterState, query: str) -> list[dict[str, Any]]:
    """Return what Prometheus answers."""
    assert state.monitoring
    answer = httpx.get(f"{state.monitoring.prometheus_url}/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", (query, answer)
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


def selector(metric: Metric) -> str:
    """Return the expression of the series of a metric that have all of its labels."""
    labels = ", ".join(f'{label}=~".+"' for label in metric.labels if label not in ("model", "version"))
    return f"{metric.exported}{'_bucket' if metric.kind is Kind.HISTOGRAM else ''}{{{labels}}}"


def sent(hook: HttpReceiver, name: str, status: str = "firing") -> list[dict[str, Any]]:
    """Return the alerts of a name that the webhook was sent."""
    posts = [json.loads(content) for _, content in hook.requests]
    return [
        alert
        for post in posts
        for alert in post["alerts"]
        if alert["labels"]["alertname"] == name and alert["status"] == status
    ]


def test_every_metric_and_panel_has_data(watched: dict[str, str], state: ClusterState) -> None:
    """Of an endpoint with a canary, a shadow and a cascade, a run that loses a worker, and a search."""
    storage = publish_stages(UPath(watched["RAYLOOM_STORAGE"]))
    publish(storage, exported(), answering(1))
    beside = ["serve.canary={percent: 30, version: 2}", "serve.shadow={percent: 100, version: 3}"]
    cascade = "serve.cascade={before: [tiny], accuracy_floor: 0.8}"
    scaling = ["serve.replicas=[2, 3]", "serve.scaling.latency_target_ms=500", "serve.cpus_per_replica=0.1"]
    url = deploy(watched, 1, *beside, cascade, *scaling, "serve.threads=1")["http"]
    with ThreadPoolExecutor() as pool:
        training = pool.submit(run_job, watched, "train", *TRAINING)
        for number in range(60):
            tensors = rows(1 + number % 3)
            assert httpx.post(f"{url}/v2/models/toy/infer", json=body(tensors)).status_code == 200
            httpx.post(f"{url}/v2/models/toy/infer", json=body({"input_ids": tensors["input_ids"]}))
            time.sleep(0.1)
        assert httpx.post(f"{url}/v1/models/toy/predict", json={"inputs": "fine"}).status_code == 200
        wait_until(lambda: bool(ask(state, "ray_rayloom_train_checkpoint_seconds")), timeout_s=90.0)
        Cluster(watched).processes("RayTrainWorker")[0].kill()
        assert training.result()["status"] == "succeeded"
    run_job(watched, "tune", "recipes/digits.yaml", "train.workers=1", "tune.trials=3", "tune.epochs=2")
    series = {selector(metric) for metric in (*catalog.SERVING, *catalog.TRAINING, *catalog.TUNING)}
    missing = {query for query in (*series, *expressions()) if not any(word in query for word in ABSENT)}
    assert len(missing) > 100

    def nothing_is_missing() -> bool:
        missing.difference_update({query for query in missing if ask(state, f"last_over_time(({query})[5m:5s])")})
        return not missing

    with suppress(TimeoutError, AssertionError):
        wait_until(nothing_is_missing, timeout_s=30.0)
    assert not missing


def test_what_breaks_is_told_once_within_a_minute(
    watched: dict[str, str], state: ClusterState, hook: HttpReceiver, mails: Controller, faults: Faults
) -> None:
    there = Cluster(watched)
    wait_until(lambda: len(there.replicas()) == 2)
    before_s = time.monotonic()
    there.replicas()[0].kill()
    wait_until(lambda: bool(sent(hook, "RayloomReplicaLost")), timeout_s=MAX_S)
    replica_s = time.monotonic() - before_s
    before_s = time.monotonic()
    failed = run("rayloom", "submit", "train", "recipes/digits.yaml", "data.source=builtin:none", environment=watched)
    assert failed.returncode == 1, failed.stdout
    failed_s = time.monotonic()
    wait_until(lambda: bool(sent(hook, "RayloomRunFailed")), timeout_s=MAX_S)
    run_s = time.monotonic() - failed_s
    with faults("monitoring", "SIGKILL of a replica, then a run that fails", f"webhook in {MAX_S:g} s") as seen:
        seen(f"replica lost after {replica_s:.0f} s, run failed after {run_s:.0f} s")
    headers = dict(hook.requests[0][0])
    assert headers["Authorization"] == "Bearer a-secret"
    (alert,) = sent(hook, "RayloomRunFailed")
    assert alert["labels"]["job"] == "train"
    assert alert["annotations"]["summary"].startswith("job train-")
    assert len(sent(hook, "RayloomReplicaLost")) == 1
    wait_until(lambda: any("RayloomReplicaLost" in subject for subject in mails.handler.subjects))


def test_the_dashboard_of_ray_knows_prometheus(watched: dict[str, str], state: ClusterState) -> None:
    token = (Path(watched["RAYLOOM_HOME"]) / "cluster/token").read_text(encoding="utf-8")
    headers = {"Authorization": f"Bearer {token}"}
    assert httpx.get(f"{state.dashboard}/api/prometheus_health", headers=headers).status_code == 200
    assert state.monitoring
    assert httpx.get(state.monitoring.page).status_code == 200
    assert set(httpx.get(state.monitoring.page.replace("monitoring", "dashboards")).json()) == set(dashboards())
