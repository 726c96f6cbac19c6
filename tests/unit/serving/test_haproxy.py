"""HAProxy with what the installed Ray Serve writes for it, edited where Ray has no setting."""

import subprocess
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import ray.serve
from ray.serve._private.common import RequestProtocol
from ray.serve._private.constants import HTTP_PROXY_TIMEOUT, PROXY_HEALTH_CHECK_UNHEALTHY_THRESHOLD
from ray.serve._private.haproxy import BackendConfig

from app.serving.ingress.haproxy import files_in, prepare
from app.serving.ingress.haproxy_script import UNARY_BACKEND, Edit, When, edits, quoted
from app.serving.pools import APPLICATION
from tests.helpers import wait_until
from tests.ingress import Ingress, backend

HTTP = backend(RequestProtocol.HTTP, APPLICATION, 2, 30000)
GRPC = backend(RequestProtocol.GRPC, APPLICATION, 2, 31000)
POOL = (
    backend(RequestProtocol.HTTP, f"{APPLICATION}-small", 1, 30010),
    backend(RequestProtocol.GRPC, f"{APPLICATION}-small", 1, 31010),
)
OTHER_GRPC = backend(RequestProtocol.GRPC, "other", 1, 31005)


@pytest.fixture
def ingress(tmp_path: Path) -> Ingress:
    return Ingress(tmp_path)


def without_effect(group: Iterable[Edit], ingress: Ingress, *backends: BackendConfig) -> list[str]:
    """Those edits without which HAProxy would start with the same configuration."""
    script, edited = ingress.script.read_text(encoding="utf-8"), ingress.start(*backends)
    found = []
    for edit in group:
        without = script.replace(quoted(edit), "''")
        assert script != without, "the script does not make this edit"
        ingress.script.write_text(without, encoding="utf-8")
        if ingress.run(*backends)[0] == edited:  # HAProxy may refuse it
            found.append(edit.why)
    ingress.script.write_text(script, encoding="utf-8")
    return found


def test_every_edit_finds_what_it_changes_in_what_the_installed_ray_writes(ingress: Ingress) -> None:
    groups = edits(files_in(ingress.folder))
    assert without_effect(groups.pop(When.STARTING), ingress) == []
    assert without_effect(groups.pop(When.ALWAYS), ingress, HTTP) == []
    assert without_effect([*groups.pop(When.GRPC), *UNARY_BACKEND], ingress, HTTP, GRPC) == []
    assert without_effect([*groups.pop(When.POOLS), *groups.pop(When.SEVERAL)], ingress, HTTP, GRPC, *POOL) == []
    ingress.show_certificate()
    assert without_effect(groups.pop(When.TLS), ingress, HTTP, GRPC) == []
    assert not groups


def test_an_edit_that_no_longer_matches_is_found(ingress: Ingress) -> None:
    renamed = Edit("s/ mode 644 / mode 600 /", "Ray has changed the mode")
    script = ingress.script.read_text(encoding="utf-8")
    ingress.script.write_text(script.replace("s/ mode 666 / mode 600 /", renamed.expression), encoding="utf-8")
    assert without_effect([renamed], ingress, HTTP) == [renamed.why]


def test_the_installed_ray_knows_every_setting_of_its_ingress(ingress: Ingress) -> None:
    folder = Path(ray.serve.__file__).parent / "_private"
    source = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    names = [name for name in ingress.settings if name.startswith("RAY_")]
    assert [name for name in names if f'"{name}"' not in source] == []


def test_what_is_not_for_clients_is_for_this_machine_and_user_alone(ingress: Ingress) -> None:
    config = ingress.start(HTTP)
    assert "    bind 127.0.0.1:18101" in config
    assert "  bind 127.0.0.1:18404" in config
    assert "    bind *:18000" in config, "where the user opened it"
    assert "mode 600" in config


def test_who_gets_no_answer_is_told_to_come_again(ingress: Ingress) -> None:
    config = ingress.start()
    assert f"    errorfile 502 {ingress.folder}/503.http" in config
    assert "    http-request return status 503 default-errorfiles" in config
    answer = (ingress.folder / "503.http").read_text(encoding="utf-8")
    assert answer.startswith("HTTP/1.1 503 ")
    assert "retry-after: 1\n" in answer
    assert '{"error":' in answer


def test_after_a_crash_the_replicas_of_before_are_tried(ingress: Ingress) -> None:
    before = ingress.start(HTTP)
    assert "404" in before, "the path, and not the replicas, is not known"
    assert ingress.start() == before
    assert "127.0.0.1:32001" in ingress.start(backend(RequestProtocol.HTTP, APPLICATION, 2, 32000))


def test_what_is_added_is_there_once_also_after_another_start(ingress: Ingress) -> None:
    ingress.start(HTTP)
    config = ingress.start(HTTP)
    assert config.count("option dontlog-normal") == 1
    assert config.count("timeout http-request 30s") == config.count("timeout http-request") == 1
    assert config == ingress.start(), "also of what was kept"


def test_no_request_waits_for_a_machine_that_is_lost(ingress: Ingress) -> None:
    """``tests/cluster/test_ingress.py`` loses one. HAProxy 2.8 ignores tcp-ut where it is a default of servers."""
    config = ingress.start(HTTP, GRPC, *POOL)
    servers = [line for line in config.splitlines() if line.startswith("    server ")]
    assert len(servers) == 14
    assert config.count("    http-request wait-for-body time 30s if { req.hdr_val(content-length) lt 16384 }") == 2
    assert all(" tcp-ut 7s" in server for server in servers)
    assert "    timeout connect 7s" in config


def test_with_a_certificate_clients_of_both_protocols_speak_tls(ingress: Ingress) -> None:
    ingress.show_certificate()
    config = ingress.start(HTTP)
    assert f"    bind *:18000 ssl crt {ingress.folder}/tls.pem\n" in config
    assert f"    bind *:18001 proto h2 ssl crt {ingress.folder}/tls.pem\n" in config
    assert config.count(" ssl crt ") == 2
    assert ingress.start(HTTP) == config, "also when the cluster's head is started again"


def test_unary_grpc_calls_go_to_the_http_listeners(ingress: Ingress) -> None:
    config, checked = ingress.run(HTTP, GRPC)
    assert checked.returncode == 0, checked.stderr
    unary = config.partition("backend unary-rayloom\n")[2].splitlines()
    assert [line.split() for line in unary if "server " in line] == [
        ["timeout", "server", "9s"],
        ["server", "r0", "127.0.0.1:30000", "tcp-ut", "7s", "track", "http-rayloom/r0"],
        ["server", "r1", "127.0.0.1:30001", "tcp-ut", "7s", "track", "http-rayloom/r1"],
    ]
    before, _, after = config.partition("    default_backend grpc-rayloom\n")
    assert after
    assert before.splitlines()[-1].startswith("    use_backend unary-rayloom if { path_beg /inference.GRPC")
    assert "all gRPC calls go" not in checked.stderr
    assert ingress.start(HTTP, GRPC) == config


def test_a_client_cannot_teach_haproxy_where_a_model_is(ingress: Ingress) -> None:
    """HAProxy reads another model than the replica in a body that names two, and another path than it decodes."""
    reached: list[tuple[str, str]] = []

    class Replica(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        name = "shared"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            reached.append((self.name, self.path))
            self.send_response(200)
            if self.name == "shared" and (b'"there"' in body or "%74here" in self.path):
                self.send_header("x-rayloom-pool", "small")
                self.send_header("x-rayloom-model", "there")
            self.send_header("content-length", "0")
            self.end_headers()

        do_GET = do_POST

    class Small(Replica):
        name = "small"

    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Replica) as shared,
        ThreadingHTTPServer(("127.0.0.1", 0), Small) as small,
    ):
        for server in (shared, small):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        pool = backend(RequestProtocol.HTTP, f"{APPLICATION}-small", 1, small.server_port)
        with ingress.running(backend(RequestProtocol.HTTP, APPLICATION, 1, shared.server_port), pool) as address:
            wait_until(lambda: {name for name, _ in reached} == {"shared", "small"})
            chat = f"{address}/v1/chat/completions"
            answer = httpx.post(chat, content=b'{"model":"here","model":"there"}')
            assert not [name for name in answer.headers if name.startswith("x-rayloom")]
            httpx.post(f"{address}/v2/models/%74here/infer")
            httpx.post(chat, content=b'{"model":"here"}')
            httpx.post(f"{address}/v2/models/there/infer")
            httpx.post(chat, content=b'{"model":"there/1"}')
        for server in (shared, small):
            server.shutdown()
    assert [found for found in reached if found[1] != "/-/healthz"] == [
        ("shared", "/v1/chat/completions"),
        ("shared", "/v2/models/%74here/infer"),
        ("shared", "/v1/chat/completions"),
        ("small", "/v2/models/there/infer"),
        ("small", "/v1/chat/completions"),
    ]


def test_a_path_of_grpc_reaches_no_replica_by_the_port_for_http(ingress: Ingress) -> None:
    reached = []

    class Replica(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            reached.append(self.path)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        do_POST = do_GET

    paths = ["/inference.GRPCInferenceService/ModelInfer", "/inference.GRPCInferenceService/", "/v2"]
    with ThreadingHTTPServer(("127.0.0.1", 0), Replica) as replica, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(replica.serve_forever)
        try:
            with ingress.running(backend(RequestProtocol.HTTP, APPLICATION, 1, replica.server_port)) as address:
                wait_until(lambda: "/-/healthz" in reached)
                replies = [httpx.post(address + path) for path in paths]
        finally:
            replica.shutdown()
        serving.result()
    assert [reply.status_code for reply in replies] == [404, 404, 200]
    assert "serve.grpc_port" in replies[0].json()["error"]
    assert set(reached) - {"/-/healthz"} == {"/v2"}


@pytest.mark.parametrize("others", [[], [OTHER_GRPC]])
def test_a_missing_http_listener_for_unary_calls_is_reported(ingress: Ingress, others: list[BackendConfig]) -> None:
    """No replica listens for HTTP: alone, and beside another application."""
    config, checked = ingress.run(GRPC, *others)
    assert checked.returncode == 0, checked.stderr
    assert "unary-" not in config
    assert "all gRPC calls go" in checked.stderr


def test_other_arguments_of_ray_than_the_known_are_refused(ingress: Ingress) -> None:
    command = [str(ingress.script), "-W", "-f", str(ingress.config)]
    started = subprocess.run(command, capture_output=True, text=True, check=False)
    assert started.returncode == 64
    assert "with other arguments" in started.stderr


def test_haproxy_is_not_killed_while_the_first_deploy_waits_for_it(tmp_path: Path) -> None:
    check_s = float(prepare(tmp_path)["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"])
    assert check_s * PROXY_HEALTH_CHECK_UNHEALTHY_THRESHOLD >= HTTP_PROXY_TIMEOUT
