"""A watched cluster: every panel has data, and what breaks reaches the receivers through a real Alertmanager."""

import json
import math
import os
import re
import subprocess
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from aiosmtpd.controller import Controller
from aiosmtpd.handlers import Message
from ray.dashboard.modules.metrics import grafana_dashboard_factory
from upath import UPath

from app.cluster.state import ClusterState
from app.monitoring.server import dashboards
from app.ports import unused
from app.telemetry import catalog
from app.telemetry.metrics import LATENCY_BOUNDS_S, Kind, Metric
from tests.cascades import publish_stages
from tests.engine_contract import exported, rows
from tests.faults.test_nodes import Node
from tests.faults.test_tune import TRAINS
from tests.helpers import ROOT, local_cluster, run, wait_until
from tests.jobs import run_job
from tests.launch import Cluster
from tests.receiver import HttpReceiver
from tests.tables import Faults
from tests.toy import answering, body, deploy, publish
from tests.unit.monitoring.test_monitoring import expressions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.debian("prometheus", "prometheus-alertmanager", "prometheus-node-exporter"),
]
MAX_S = 60.0
"""From a cause to the received webhook, for alerts without a window."""
ABSENT = ("node_gpu", "node_gram", "fragmentation", "tokens_per_second", "generation")
"""In what has no data here: it is of GPUs, or of language models."""
RAY_BOARDS = ("default", "serve", "serve_deployment", "train")
RAY_ABSENT = ("gpu", "GPU", "gram", "tpu", "grpc", "autoscaler", "ray_data", "multiplexed")
"""Parts of queries without data here: no GPU, autoscaler or gRPC call, and parts of Ray that Rayloom leaves alone."""
RAY_UNHARMED = ('IsRetry!="0"', "worker_eviction", "error_counter")
"""Parts of queries about what does not happen here: a retried task, a worker out of memory, an error in a replica."""
TRAINING = [
    "recipes/digits.yaml", "train.workers=2", "train.epochs=8", "train.early_stopping=null", "train.max_failures=1",
    "train.checkpoint.every_steps=5", "train.profile={wait: 1, warmup: 1, active: 2}",
    "model.factory=tests.faults.models:DropoutCnn", "model.args.pause_s=0.2",
    "alerts=[{metric: loss, not_finite: true, do: [notify]}]",
]  # fmt: skip


SHADOW = "RayloomShadowDisagrees"
SILENCE = "nothing reported for 5 s"
NOT_FINITE = ["train.workers=1", "train.optimizer.lr=1e20"]
REPEAT_S = 5.0
"""How often Prometheus looks."""


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


@pytest.fixture(scope="module")
def endpoint(watched: dict[str, str]) -> str:
    """The URL of an endpoint with a canary, a shadow and a cascade."""
    storage = publish_stages(UPath(watched["RAYLOOM_STORAGE"]))
    publish(storage, exported(), answering(1))
    beside = ["serve.canary={percent: 30, version: 2}", "serve.shadow={percent: 100, version: 3}"]
    cascade = "serve.cascade={before: [tiny], accuracy_floor: 0.8}"
    scaling = ["serve.replicas=[2, 3]", "serve.scaling.latency_target_ms=500", "serve.cpus_per_replica=0.1"]
    url: str = deploy(watched, 1, *beside, cascade, *scaling, "serve.threads=1")["http"]
    return url


def ask(state: ClusterState, query: str, **window: float) -> list[dict[str, Any]]:
    """Return Prometheus's answer for now, or for each ``step`` from ``start`` to ``end``."""
    assert state.monitoring
    url = f"{state.monitoring.prometheus_url}/api/v1/query{'_range' if window else ''}"
    answer = httpx.get(url, params={"query": query, **window}).json()
    assert answer["status"] == "success", (query, answer)
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


def ray_expressions() -> set[str]:
    """Return every expression of Ray's own dashboards of the core, Serve and Train."""
    boards = [
        json.loads(getattr(grafana_dashboard_factory, f"generate_{name}_grafana_dashboard")()[0]) for name in RAY_BOARDS
    ]
    rows = [panel for board in boards for panel in board["panels"]]
    panels = [inner for row in rows for inner in (row, *row.get("panels", []))]
    found = {target["expr"] for panel in panels for target in panel.get("targets", [])}
    asked = {re.sub(r"\$\w+", ".*", expression.replace("$window", "1m")) for expression in found}
    return {expression for expression in asked if not expression.isdecimal()}  # a line at 100 %


def selector(metric: Metric) -> str:
    """Return the expression of the series of a metric that have all of its labels."""
    labels = ", ".join(f'{label}=~".+"' for label in metric.labels if label not in ("model", "version"))
    return f"{metric.exported}{'_bucket' if metric.kind is Kind.HISTOGRAM else ''}{{{labels}}}"


@dataclass(frozen=True)
class Site:
    """Where faults are injected, and what the webhook is told of them."""

    environment: dict[str, str]
    hook: HttpReceiver
    folder: Path
    """An empty folder."""

    @property
    def there(self) -> Cluster:
        return Cluster(self.environment)

    def told(self) -> Counter[str]:
        """How often the webhook was told that each alert fires: by Alertmanager, and by runs themselves."""
        posts = [json.loads(content) for _, content in self.hook.requests]
        alerts = [alert for post in posts for alert in post.get("alerts", []) if alert["status"] == "firing"]
        own = [post["rule"] for post in posts if "rule" in post]
        return Counter([*(alert["labels"]["alertname"] for alert in alerts), *own])

    def await_alert(self, name: str, timeout_s: float = MAX_S) -> float:
        """Wait until the webhook is told of an alert once more. Return how long that took."""
        before, began_s = self.told()[name], time.monotonic()
        wait_until(lambda: self.told()[name] > before, timeout_s)
        return time.monotonic() - began_s


@contextmanager
def training(site: Site) -> Iterator[Callable[[int], psutil.Process]]:
    """Train with an alert of the run's own. Yield what returns the process of a rank. Killing one ends the run."""
    alert = {"nothing_reported_for": "5 s", "do": ["notify"]}
    own = [f"alerts={json.dumps([alert])}", f"notify.webhook={json.dumps({'url': site.hook.url})}"]
    long = ["train.epochs=200", "train.max_failures=0", f"model.args.ranks={site.folder}"]
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(run_job, site.environment, "train", *TRAINING, *own, *long, succeeds=False)
        wait_until(lambda: (site.folder / "1").exists(), timeout_s=90.0)
        yield lambda rank: psutil.Process(int((site.folder / str(rank)).read_text(encoding="utf-8")))
        assert ended.result()["status"] == "failed"


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Mount a small disk, which only root may, and fill it."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], check=True)
    try:
        (folder / "file").write_bytes(bytes(2_000_000))
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_every_metric_and_panel_has_data(watched: dict[str, str], state: ClusterState, endpoint: str) -> None:
    """Of the endpoint, a run that loses a worker, and a search."""
    with ThreadPoolExecutor() as pool:
        training = pool.submit(run_job, watched, "train", *TRAINING)
        for number in range(60):
            tensors = rows(1 + number % 3)
            assert httpx.post(f"{endpoint}/v2/models/toy/infer", json=body(tensors)).status_code == 200
            httpx.post(f"{endpoint}/v2/models/toy/infer", json=body({"input_ids": tensors["input_ids"]}))
            assert httpx.post(f"{endpoint}/v2/models/toy/infer", json=body(tensors, timeout=1)).status_code == 504
            time.sleep(0.1)
        assert httpx.post(f"{endpoint}/v1/models/toy/predict", json={"inputs": "fine"}).status_code == 200
        wait_until(lambda: bool(ask(state, "ray_rayloom_train_checkpoint_seconds")), timeout_s=90.0)
        Cluster(watched).processes("RayTrainWorker")[0].kill()
        assert training.result()["status"] == "succeeded"
    # Its task has metrics besides the loss and accuracy.
    regression = run_job(watched, "train", "recipes/diabetes.yaml", "train.workers=1", "train.epochs=2")
    assert regression["status"] == "succeeded"
    short = ["train.workers=1", "tune.trials=3", "tune.epochs=2"]
    tuned = run("rayloom", "submit", "tune", "recipes/digits.yaml", *short, environment=watched)
    assert tuned.returncode == 0, tuned.stdout
    series = {selector(metric) for metric in (*catalog.SERVING, *catalog.TRAINING, *catalog.TUNING)}
    missing = {query for query in (*series, *expressions()) if not any(word in query for word in ABSENT)}
    assert len(missing) > 100

    def nothing_is_missing() -> bool:
        missing.difference_update({query for query in missing if ask(state, f"last_over_time(({query})[5m:5s])")})
        return not missing

    with suppress(TimeoutError, AssertionError):
        wait_until(nothing_is_missing, timeout_s=30.0)
    assert not missing
    empty = {query for query in ray_expressions() if not ask(state, f"last_over_time(({query})[5m:5s])")}
    assert sorted(query for query in empty if not any(word in query for word in RAY_ABSENT + RAY_UNHARMED)) == []


@pytest.mark.usefixtures("endpoint")
def test_each_fault_is_told_once_within_a_minute(
    watched: dict[str, str], state: ClusterState, hook: HttpReceiver, mails: Controller, tmp_path: Path, faults: Faults
) -> None:
    site, seconds = Site(watched, hook, tmp_path), dict[str, float]()
    wait_until(lambda: not ask(state, "ALERTS{alertstate='firing'}"), timeout_s=150.0)  # of the tests before
    before = site.told()

    def saw(fault: str, alert: str) -> None:
        with faults("monitoring", fault, f"{alert} in {MAX_S:g} s, once") as row:
            seconds[alert] = site.await_alert(alert)
            row.saw(f"after {seconds[alert]:.0f} s")

    site.there.replicas()[0].kill()
    saw("SIGKILL of a replica", "RayloomReplicaLost")
    site.there.processes("ProxyActor")[0].kill()
    saw("SIGKILL of a proxy", "RayloomProxyLost")
    with training(site) as process_of:
        process_of(1).suspend()
        saw("SIGSTOP of a worker", SILENCE)
        process_of(1).kill()
        saw("SIGKILL of a worker", "RayloomWorkerLost")
    node = Node(site.there, 1)
    wait_until(lambda: bool(ask(state, "rayloom_nodes{state='alive'} == 2")))
    node.raylet.kill()
    saw("SIGKILL of a node's raylet", "RayloomNodeLost")
    failed = run("rayloom", "submit", "train", "recipes/digits.yaml", *NOT_FINITE, environment=watched)
    assert "is not finite" in failed.stdout
    saw("a loss that is not finite", "RayloomRunFailed")
    if os.geteuid() == 0:
        with full_disk(tmp_path / "disk"), faults("monitoring", "a full disk", "RayloomDiskFills after 60 s") as row:
            seconds["RayloomDiskFills"] = site.await_alert("RayloomDiskFills", 60.0 + MAX_S)
            row.saw(f"after {seconds['RayloomDiskFills']:.0f} s")
    time.sleep(2 * REPEAT_S)
    told_alerts = site.told() - before
    # The shadow answers otherwise than the cascade, so the first test's requests are the cause of a right alert. Its
    # window is five minutes, so it comes in this test only on a slow machine.
    assert told_alerts.pop(SHADOW, 0) <= 1
    assert told_alerts == Counter([*seconds])
    assert dict(hook.requests[0][0])["Authorization"] == "Bearer a-secret"
    told = [alert for _, content in hook.requests for alert in json.loads(content).get("alerts", [])]
    (run_failed,) = [alert for alert in told if alert["labels"]["alertname"] == "RayloomRunFailed"]
    assert run_failed["labels"]["job"] == "train"
    assert run_failed["annotations"]["summary"].startswith("job train-")
    wait_until(lambda: any("RayloomReplicaLost" in subject for subject in mails.handler.subjects))


def test_the_dashboard_of_ray_knows_prometheus(watched: dict[str, str], state: ClusterState) -> None:
    token = (Path(watched["RAYLOOM_HOME"]) / "cluster/token").read_text(encoding="utf-8")
    headers = {"Authorization": f"Bearer {token}"}
    assert httpx.get(f"{state.dashboard}/api/prometheus_health", headers=headers).status_code == 200
    assert state.monitoring
    assert httpx.get(state.monitoring.page).status_code == 200
    assert set(httpx.get(state.monitoring.page.replace("monitoring", "dashboards")).json()) == set(dashboards())


def test_series_stay_long_after_their_last_change(
    watched: dict[str, str], state: ClusterState, endpoint: str, hook: HttpReceiver, tmp_path: Path
) -> None:
    """Pause a run and a search, and send one request to version 2 every 40 s."""
    site, sent = Site(watched, hook, tmp_path), body(rows(1))
    assert httpx.post(f"{endpoint}/v2/models/toy/infer", json=sent).status_code == 200
    slow = ["model.factory=tests.faults.models:DropoutCnn", "model.args.pause_s=0.5"]
    searched = ["train.workers=1", "tune.trials=2", "tune.epochs=4", *slow]
    with ThreadPoolExecutor() as pool, training(site) as process_of:
        wait_until(lambda: bool(ask(state, selector(catalog.TRAIN_CHECKPOINT_SECONDS))), timeout_s=90.0)
        search = pool.submit(run_job, watched, "tune", "recipes/digits.yaml", *searched)
        wait_until(lambda: bool(ask(state, selector(catalog.TUNE_TRIALS))), timeout_s=90.0)
        trials = site.there.processes(*TRAINS)
        assert trials
        stopped = [process_of(1), *trials]
        for process in stopped:
            process.suspend()
        time.sleep(20.0)  # wait until Ray has exported the last change
        before, began_s = exported_series(state), time.time()
        assert {name for name, *_ in before} > {metric.exported for metric in (catalog.WAITING, catalog.TRAIN_LOSS)}
        seen = [one_observation(state, f"{endpoint}/v2/models/toy/versions/2/infer", sent) for _ in range(4)]
        assert before - exported_series(state) == set()
        for process in stopped:
            process.resume()
        process_of(1).kill()
        assert search.result()["status"] == "succeeded"
    places = [bisect_left(LATENCY_BOUNDS_S, seconds) for seconds in seen]
    lowest, highest = (0.0, *LATENCY_BOUNDS_S)[min(places)], LATENCY_BOUNDS_S[max(places)]
    window = {"start": began_s + 60, "end": time.time() - REPEAT_S, "step": REPEAT_S}
    (quantiles,) = ask(state, "rayloom:request_seconds:p99_1m{model='toy'}", **window)
    values = [float(value) for _, value in quantiles["values"]]
    assert len(values) == 1 + int((window["end"] - window["start"]) / REPEAT_S)
    finite = [value for value in values if math.isfinite(value)]
    assert len(finite) > 0.7 * len(values)
    assert all(lowest <= value <= highest for value in finite), (seen, finite)


def exported_series(state: ClusterState) -> set[tuple[str, ...]]:
    """Return the documented series: names and labels, without the exporting process."""
    found = ask(state, "{__name__=~'ray_rayloom_.+'}")
    labels = {label for metric in (*catalog.SERVING, *catalog.TRAINING, *catalog.TUNING) for label in metric.labels}
    return {
        (series["metric"]["__name__"], *(series["metric"].get(label, "") for label in (*sorted(labels), "le")))
        for series in found
    }


def one_observation(state: ClusterState, url: str, sent: dict[str, Any]) -> float:
    """Send one request, and wait for the rest of 40 s. Return its latency in Prometheus by then, in seconds."""
    total, began_s = "sum(ray_rayloom_request_seconds_sum{model='toy', version='2'})", time.monotonic()
    before = float(ask(state, total)[0]["value"][1])
    assert httpx.post(url, json=sent).status_code == 200
    time.sleep(40.0 - (time.monotonic() - began_s))
    return float(ask(state, total)[0]["value"][1]) - before
