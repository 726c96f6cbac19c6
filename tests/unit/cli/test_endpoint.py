"""What the command line learns from an endpoint."""

import json
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from app.cli.endpoint import EndpointClient, local_endpoint
from app.cluster.state import ClusterState
from tests.wording import refused

SERVED = {"name": "loaded", "version": "1", "state": "READY"}
COLD = {"name": "cold", "version": "1", "state": "UNAVAILABLE", "reason": "not loaded: the next request loads it"}
ASLEEP = {"name": "asleep", "state": "UNAVAILABLE", "reason": "pool rare has no replica: a request starts one"}
STAGE = {"name": "loaded/stage", "version": "2"}


class Handler(BaseHTTPRequestHandler):
    """A server that lists models, and breaks off in the middle of an answer. It is also the cluster's dashboard."""

    serve: ClassVar[dict[str, Any]] = {}
    """The state of Ray Serve."""

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/v2/repository/index":
            self.send([SERVED, COLD, ASLEEP])
        elif self.path == "/api/serve/applications/":
            self.send(self.serve)
        elif self.path == "/v2/models/stats":
            self.send({"model_stats": [STAGE]})
        else:
            self.send({"choices": [{"text": "Once"}]}, missing=1)

    def send(self, content: Any, missing: int = 0) -> None:
        body = f"data: {json.dumps(content)}\n\n" if missing else json.dumps(content)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body) + missing))
        self.end_headers()
        self.wfile.write(body.encode())

    do_GET = do_POST = answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[EndpointClient]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield EndpointClient(f"http://127.0.0.1:{server.server_port}", None)
    server.shutdown()


@pytest.fixture
def cluster(endpoint: EndpointClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterState:
    """A cluster whose dashboard is the server."""
    (tmp_path / "token").write_text("token", encoding="utf-8")
    monkeypatch.setattr("app.cluster.state.TOKEN_FILE", tmp_path / "token")
    own = int(endpoint.url.rpartition(":")[2])
    return ClusterState(
        id="mine", gcs_port=1, dashboard_port=own, serve_port=9, grpc_port=4, storage="/s", num_cpus=1, runtime=tmp_path
    )


@pytest.mark.parametrize(
    ("name", "version", "is_held"),
    [
        ("loaded", 1, True), ("loaded", 2, False), ("stage", 2, True), ("stage", 1, False), ("cold", 1, True),
        ("cold", 2, False), ("asleep", 3, True), ("other", 1, False),
    ],
)  # fmt: skip
def test_a_version_that_a_request_would_load_is_served(
    endpoint: EndpointClient, name: str, version: int, is_held: bool
) -> None:
    assert endpoint.holds(name, version) is is_held


@pytest.mark.parametrize(
    ("application", "models", "port", "is_held"),
    [
        ("rayloom", ["loaded"], None, True),
        ("rayloom-rare", ["loaded"], 9, None),
        ("rayloom", [], 9, False),  # the first deploy failed
        ("theirs", ["loaded"], 9, False),
        (None, [], 9, False),
    ],
)
def test_a_version_is_looked_for_where_ray_serve_listens(
    endpoint: EndpointClient,
    cluster: ClusterState,
    monkeypatch: pytest.MonkeyPatch,
    application: str | None,
    models: list[str],
    port: int | None,
    is_held: bool | None,
) -> None:
    own = int(endpoint.url.rpartition(":")[2])
    options = {"http_options": {"host": "0.0.0.0", "port": port or own}, "grpc_options": {}}
    deployment = {"deployment_config": {"user_config": {"models": {name: {} for name in models}}}}
    serve = {**options, "applications": {application: {"deployments": {"ModelServer": deployment}}}}
    monkeypatch.setattr(Handler, "serve", serve if application else {"applications": {}})
    with refused("endpoint.no_answer") if is_held is None else nullcontext():
        assert local_endpoint(cluster).holds("loaded", 1) is is_held
    ended = cluster.model_copy(update={"dashboard_port": 9})
    assert not local_endpoint(ended).holds("loaded", 1)


@pytest.mark.parametrize(
    ("host", "shown"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("10.0.0.1", "10.0.0.1")],
)
def test_the_local_addresses_are_reachable_from_this_machine(
    endpoint: EndpointClient, cluster: ClusterState, monkeypatch: pytest.MonkeyPatch, host: str, shown: str
) -> None:
    options = {"http_options": {"host": host, "port": 7}, "grpc_options": {"port": 8}}
    monkeypatch.setattr(Handler, "serve", {**options, "applications": {}})
    found = local_endpoint(cluster)
    assert (found.url, found.grpc) == (f"http://{shown}:7", f"{shown}:8")


def test_an_answer_that_breaks_off_does_not_ask_for_a_deployment(endpoint: EndpointClient) -> None:
    answer = endpoint.stream("completions", {})
    assert next(answer) == "Once"
    with refused("answer.cut"):
        next(answer)
