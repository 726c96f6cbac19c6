"""Monitoring files: rules, dashboards and configuration pass the tools of Prometheus, and the page draws figures."""

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import yaml
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait
from starlette.testclient import TestClient

from app.cli.monitoring import write_files
from app.cluster.jobs import JobsApi
from app.cluster.state import ClusterState, Monitoring
from app.config import EmailConfig, NotifyConfig, WebhookConfig
from app.monitoring.configuration import FILES, Targets, write_configuration
from app.monitoring.exporter import ClusterWatch
from app.monitoring.server import create_app, dashboards
from app.ports import unused
from app.telemetry import catalog
from app.telemetry.metrics import Kind
from tests.helpers import ROOT, wait_until
from tests.pages import tables
from tests.wording import refused

OWN = re.compile(r"\b(?:ray_rayloom_\w+|rayloom_\w+)")
WEBHOOK = WebhookConfig(url="https://example.org/hook", secret="env:RAYLOOM_TEST_HOOK")
EMAIL = EmailConfig(host="mail.example.org", sender="rayloom@example.org", to=["me@example.org"])


def tool(*command: str, cwd: Path = FILES) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def expressions() -> list[str]:
    """Return every expression of the dashboards, as the page asks it."""
    panels = [panel for board in dashboards().values() for panel in board["panels"]]
    found = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    return [re.sub(r"\$(model|run)", ".*", found.replace("$__rate_interval", "1m")) for found in found]


def targets(folder: Path) -> Targets:
    token = folder / "token"
    token.write_text("secret", encoding="utf-8")
    return Targets(
        "http://127.0.0.1:8265", token, "127.0.0.1:9090", "127.0.0.1:9093", "127.0.0.1:9187", "127.0.0.1:9100"
    )


@pytest.mark.debian("prometheus")
def test_the_rules_pass_their_unit_tests() -> None:
    tool("promtool", "check", "rules", "rules.yml")
    tool("promtool", "test", "rules", "rules_test.yml")


def test_every_alert_has_a_test_and_a_runbook() -> None:
    rules = yaml.safe_load((FILES / "rules.yml").read_text(encoding="utf-8"))
    alerts = [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    tests = yaml.safe_load((FILES / "rules_test.yml").read_text(encoding="utf-8"))["tests"]
    assert {rule["alert"] for rule in alerts} == {test["name"] for test in tests}
    page = (FILES.parent / "docs/how-to/respond_to_alerts.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (\w+)$", page, re.MULTILINE)
    assert headings == [rule["alert"] for rule in alerts]
    for rule in alerts:
        assert rule["annotations"]["runbook"] == f"docs/how-to/respond_to_alerts.md#{rule['alert'].lower()}"


@pytest.mark.debian("prometheus")
def test_every_expression_of_the_dashboards_is_one(tmp_path: Path) -> None:
    rules = [{"record": f"panel_{number}", "expr": found} for number, found in enumerate(expressions())]
    assert len(rules) > 50
    (tmp_path / "boards.yml").write_text(yaml.safe_dump({"groups": [{"name": "boards", "rules": rules}]}))
    tool("promtool", "check", "rules", "boards.yml", cwd=tmp_path)


def test_rules_and_dashboards_ask_for_metrics_that_exist() -> None:
    declared = (*catalog.SERVING, *catalog.GENERATION, *catalog.TRAINING, *catalog.TUNING)
    suffixes = {Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
    known = {metric.exported + suffix for metric in declared for suffix in suffixes.get(metric.kind, ("",))}
    known |= {"rayloom_jobs", "rayloom_job_failed_timestamp_seconds", "rayloom_nodes", "rayloom_nodes_lost_total",
              "rayloom_actors_lost_total"}  # fmt: skip
    rules = [line for line in (FILES / "rules.yml").read_text(encoding="utf-8").splitlines() if "expr:" in line]
    asked = {name for text in (*expressions(), *rules) for name in OWN.findall(text)}
    assert asked <= known
    assert len(asked) > 40


def test_the_dashboards_are_those_that_are_built() -> None:
    from monitoring.build import BOARDS, to_json

    for name, board in BOARDS.items():
        assert (FILES / "dashboards" / f"{name}.json").read_text(encoding="utf-8") == to_json(name, board)
    assert set(dashboards()) == set(BOARDS)


@pytest.mark.debian("prometheus", "prometheus-alertmanager")
def test_the_configuration_passes_the_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYLOOM_TEST_HOOK", "hook-secret")
    folder = tmp_path / "monitoring"
    write_configuration(folder, targets(tmp_path), NotifyConfig(webhook=WEBHOOK, email=EMAIL))
    tool("promtool", "check", "config", "prometheus.yml", cwd=folder)
    tool("amtool", "check-config", "alertmanager.yml", cwd=folder)
    written = (folder / "alertmanager.yml").read_text(encoding="utf-8")
    assert "hook-secret" in written
    assert (folder / "alertmanager.yml").stat().st_mode & 0o777 == 0o600
    assert json.loads((folder / "dashboards/serving.json").read_text(encoding="utf-8"))["uid"] == "rayloom-serving"


def test_given_addresses_replace_those_of_the_monitored_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Monitoring(prometheus=1, alertmanager=2, server=3)
    cluster = ClusterState(
        id="mine", gcs_port=1, dashboard_port=2, serve_port=9, grpc_port=4, storage="/s", num_cpus=1, runtime=tmp_path,
        monitoring=watched,
    )  # fmt: skip
    monkeypatch.setattr("app.cli.monitoring.read_state", lambda: cluster)
    write_files(tmp_path, token_file=Path("/their/token"), exporter="0.0.0.0:99")
    written = (tmp_path / "prometheus.yml").read_text(encoding="utf-8")
    found = [given in written for given in ("127.0.0.1:2", "/their/token", "0.0.0.0:99", "127.0.0.1:3", "0.0.0.0:9187")]
    assert found == [True, True, True, False, False], written


def test_a_missing_secret_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with refused("secret.missing", "notify.webhook.secret"):
        write_configuration(tmp_path / "monitoring", targets(tmp_path), NotifyConfig(webhook=WEBHOOK))
    assert not (tmp_path / "monitoring").exists()


class FakeDashboard:
    """Answers as Ray's dashboard does, with what a test sets."""

    def __init__(self) -> None:
        self.jobs: Any = []
        self.nodes = [{"node_id": "n1", "state": "ALIVE"}, {"node_id": "n2", "state": "ALIVE"}]
        self.actors: list[dict[str, Any]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                listed = {"/api/v0/nodes": fake.nodes, "/api/v0/actors": fake.actors}
                found: Any = fake.jobs if path == "/api/jobs/" else {"data": {"result": {"result": listed[path]}}}
                body = json.dumps(found).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def api(self) -> JobsApi:
        return JobsApi(f"http://127.0.0.1:{self.server.server_port}", "token", "test")


@pytest.fixture
def dashboard() -> Iterator[FakeDashboard]:
    fake = FakeDashboard()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


def values(watch: ClusterWatch) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value for family in watch.collect() for sample in family.samples
    }


def actor(number: int, class_name: str, reason: str) -> dict[str, Any]:
    cause = {"actor_died_error_context": {"reason": reason}}
    return {"actor_id": f"a{number}", "class_name": class_name, "state": "DEAD", "death_cause": cause}


def job(number: int, entrypoint: str, status: str, end_time: int | None) -> dict[str, Any]:
    return {
        "type": "SUBMISSION", "submission_id": f"job-{number}", "status": status, "entrypoint": entrypoint,
        "start_time": 1_000, "end_time": end_time, "metadata": {},
    }  # fmt: skip


def test_what_is_lost_is_counted_from_the_first_look_on(dashboard: FakeDashboard) -> None:
    watch = ClusterWatch(dashboard.api, clock=lambda: 100.0)
    dashboard.actors = [actor(1, "ServeReplica:rayloom:ModelServer", "WORKER_DIED")]
    dashboard.jobs = [
        job(1, "python -m jobs.train recipes/digits.yaml", "FAILED", 90_000),
        job(2, "python -m jobs.train recipes/digits.yaml", "RUNNING", None),
        job(3, "python mine.py", "FAILED", -2_000_000),
    ]
    watch.look()
    assert values(watch)["rayloom_actors_lost_total", "replica"] == 0
    dashboard.actors += [
        actor(2, "ServeReplica:rayloom:ModelServer", "WORKER_DIED"),
        actor(3, "ServeReplica:rayloom:ModelServer", "RAY_KILL"),
        actor(4, "RayTrainWorker", "NODE_DIED"),
    ]
    dashboard.nodes[1]["state"] = "DEAD"
    watch.look()
    watch.look()
    found = values(watch)
    assert {name: value for name, value in found.items() if "lost" in name[0]} == {
        ("rayloom_actors_lost_total", "replica"): 1,
        ("rayloom_actors_lost_total", "train_worker"): 1,
        ("rayloom_actors_lost_total", "proxy"): 0,
        ("rayloom_actors_lost_total", "trial"): 0,
        ("rayloom_actors_lost_total", "other"): 0,
        ("rayloom_nodes_lost_total",): 1,
    }
    assert (found["rayloom_nodes", "alive"], found["rayloom_nodes", "dead"]) == (1, 1)
    assert (found["rayloom_jobs", "train", "failed"], found["rayloom_jobs", "train", "running"]) == (1, 1)
    assert found["rayloom_job_failed_timestamp_seconds", "train", "job-1"] == 90
    assert not any("job-3" in name for name in found)  # it failed long ago
    listed = [row[:3] for table in tables(ROOT / "docs/reference/metrics.md") for row in table[1:]]
    families = [(family.samples[0], family.type) for family in watch.collect()]
    assert [row for row in listed if row[0].startswith("rayloom_")] == [
        [sample.name, kind, ", ".join(sample.labels)] for sample, kind in families
    ]
    dashboard.server.shutdown()
    dashboard.server.server_close()
    watch.look()
    assert values(watch)["rayloom_failed_looks_total",] == 1


def test_one_odd_item_takes_no_other_away(dashboard: FakeDashboard) -> None:
    watch = ClusterWatch(dashboard.api, clock=lambda: 100.0)
    dashboard.jobs = [
        job(1, "echo it's", "RUNNING", None),
        job(2, "bash -c 'python -m jobs.tune recipes/it\\'s.yaml", "FAILED", 90_000),
        job(3, "python -m jobs.train recipes/digits.yaml", "RUNNING", None) | {"metadata": None, "start_time": None},
        job(4, "\ud800", "FAILED", 90_000),
        {"type": "SUBMISSION"},
        {},
    ]
    dashboard.nodes += [{"node_id": "n3", "state": None}]
    dashboard.actors = [{"actor_id": "a0", "class_name": None}]
    watch.look()
    dashboard.actors += [{"actor_id": "a1"}, actor(2, "RayTrainWorker", "NODE_DIED")]
    watch.look()
    with TestClient(create_app(watch, "http://127.0.0.1:9"), "http://127.0.0.1:9091") as client:
        page = client.get("/metrics")
    assert page.status_code == 200
    found = values(watch)
    running = {name[1]: value for name, value in found.items() if name[0] == "rayloom_jobs" and name[2] == "running"}
    assert running == {"other": 1, "train": 1, "tune": 0}
    assert found["rayloom_job_failed_timestamp_seconds", "tune", "job-2"] == 90
    assert found["rayloom_nodes", "alive"] == 2
    assert found["rayloom_actors_lost_total", "train_worker"] == 1
    assert found["rayloom_failed_looks_total",] == 0


def test_a_list_that_the_cluster_cannot_give_takes_no_other_away(dashboard: FakeDashboard) -> None:
    watch = ClusterWatch(dashboard.api, clock=lambda: 100.0)
    dashboard.jobs = "not a list"
    watch.look()
    dashboard.actors = [actor(1, "RayTrainWorker", "NODE_DIED")]
    watch.look()
    found = values(watch)
    assert (found["rayloom_nodes", "alive"], found["rayloom_actors_lost_total", "train_worker"]) == (2, 1)
    assert found["rayloom_failed_looks_total",] == 2


@contextmanager
def prometheus(folder: Path, port: int, target: str) -> Iterator[None]:
    configuration = {
        "global": {"scrape_interval": "200ms"},
        "scrape_configs": [{"job_name": "rayloom", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    options = ["--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.path=tsdb"]
    process = subprocess.Popen(["prometheus", *options], cwd=folder, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize("path", ["/metrics", "/monitoring", "/api/v1/query"])
def test_a_request_for_another_name_than_this_machines_is_refused(dashboard: FakeDashboard, path: str) -> None:
    with TestClient(create_app(ClusterWatch(dashboard.api), "http://127.0.0.1:9"), "http://127.0.0.1:9091") as client:
        assert client.get(path).status_code in (200, 502)
        refused = client.get(path, headers={"host": "evil.example:9091"})
        assert refused.status_code == 401
        assert "Host is 'evil.example:9091'" in refused.json()["error"]


@pytest.mark.debian("prometheus")
def test_the_page_draws_what_prometheus_has(tmp_path: Path, dashboard: FakeDashboard, browser: WebDriver) -> None:
    port, own = unused(2)
    watch = ClusterWatch(dashboard.api)
    watch.look()
    url = f"http://127.0.0.1:{own}"
    server = uvicorn.Server(
        uvicorn.Config(create_app(watch, f"http://127.0.0.1:{port}"), port=own, log_level="warning")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    with prometheus(tmp_path, port, f"127.0.0.1:{own}"):
        wait_until(lambda: _asked(url, "rayloom_nodes") >= 3)
        browser.get_log("browser")  # type: ignore[no-untyped-call]  # of earlier tests
        try:
            browser.get(f"{url}/monitoring#nodes")
            wait = WebDriverWait(browser, 60)
            wait.until(lambda found: len(found.find_elements(By.CSS_SELECTOR, "figure svg polyline")) >= 2)
            figures = {
                figure.find_element(By.TAG_NAME, "figcaption").text: figure
                for figure in browser.find_elements(By.TAG_NAME, "figure")
            }
            nodes = [entry.text.split() for entry in figures["Nodes"].find_elements(By.TAG_NAME, "li")]
            assert nodes == [["alive", "2"], ["dead", "0"]]
            assert "no data" in figures["CPU"].text
            browser.find_element(By.CSS_SELECTOR, "[data-name=training]").click()
            wait.until(lambda found: "Loss" in found.find_element(By.TAG_NAME, "main").text)
            errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
            assert [entry for entry in errors if "favicon" not in entry["message"]] == []
        finally:
            server.should_exit = True
            thread.join()


def _asked(url: str, query: str) -> int:
    """Return how many values Prometheus has of a series within the last minute."""
    try:
        answer = httpx.get(f"{url}/api/v1/query", params={"query": f"count_over_time({query}[1m])"}).json()
    except (httpx.HTTPError, json.JSONDecodeError):
        time.sleep(0.2)
        return 0
    found = answer.get("data", {}).get("result", [])
    return int(found[0]["value"][1]) if found else 0
