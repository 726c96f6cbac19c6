"""HAProxy with what Ray Serve 2.60 writes for it, changed where Ray has no setting."""

import subprocess
from pathlib import Path

import pytest
import trustme
from ray.serve._private.common import RequestProtocol
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions, gRPCOptions

from app.cluster.haproxy import APPLICATION, TLS_FILE, prepare
from app.serving.transport.grpc import SERVICER

WRITTEN = """\
global
    stats socket {folder}/admin.sock mode 666 level admin expose-fd listeners
defaults
    mode http
    timeout connect 5s
    timeout client 5s
    timeout server 5s
    timeout http-request 7s
    errorfile 502 {folder}/500.http
    errorfile 503 {folder}/500.http
frontend prometheus
    bind :18101
    no log
frontend http_frontend
    bind *:18000
    default_backend default_backend
frontend grpc_frontend
    # in `mode http` when `proto h2` is on the bind line.
    bind *:18001 proto h2
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path '%[path]' not found."
{backends}listen stats
  bind *:18404
  stats enable
"""
BACKEND = "backend http-rayloom\n    server a 127.0.0.1:40000\n"


def started(folder: Path, backends: str, certificate: bytes | None = None) -> str:
    """What HAProxy is started with when Ray Serve knows these backends; HAProxy itself says that it takes it."""
    settings, config = prepare(folder, 18101, 18404, 18500, 18501), folder / "haproxy.cfg"
    if certificate:
        Path(settings[TLS_FILE]).write_bytes(certificate)
    config.write_text(WRITTEN.format(folder=folder, backends=backends), encoding="utf-8")
    command = [settings["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(config), "-c"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    return config.read_text(encoding="utf-8")


def test_what_is_not_for_clients_is_for_this_machine_and_user_alone(tmp_path: Path) -> None:
    config = started(tmp_path, BACKEND)
    assert "    bind 127.0.0.1:18101" in config
    assert "  bind 127.0.0.1:18404" in config
    assert "    bind *:18000" in config, "where the user opened it"
    assert "mode 600" in config


def test_who_gets_no_answer_is_told_to_come_again(tmp_path: Path) -> None:
    config = started(tmp_path, "")
    assert f"    errorfile 502 {tmp_path}/503.http" in config
    assert "    http-request return status 503 default-errorfiles" in config
    answer = (tmp_path / "503.http").read_text(encoding="utf-8")
    assert answer.startswith("HTTP/1.1 503 ")
    assert "retry-after: 1\n" in answer
    assert '{"error":' in answer


def test_after_a_crash_the_replicas_of_before_are_tried(tmp_path: Path) -> None:
    before = started(tmp_path, BACKEND)
    assert "404" in before, "the path, and not the replicas, is not known"
    assert started(tmp_path, "") == before
    assert "40001" in started(tmp_path, BACKEND.replace("40000", "40001"))


def test_only_what_fails_is_logged(tmp_path: Path) -> None:
    assert started(tmp_path, BACKEND).count("option dontlog-normal") == 1
    (tmp_path / "haproxy.cfg").unlink()
    assert started(tmp_path, "").count("option dontlog-normal") == 1, "also of what was kept"


def test_who_does_not_end_its_headers_is_waited_for_half_a_minute(tmp_path: Path) -> None:
    config = started(tmp_path, BACKEND)
    assert config.count("timeout http-request 30s") == 1
    (tmp_path / "haproxy.cfg").unlink()
    assert started(tmp_path, "").count("timeout http-request") == 1, "also of what was kept"


def test_with_a_certificate_clients_of_both_protocols_speak_tls(tmp_path: Path) -> None:
    config = started(tmp_path, BACKEND, trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.bytes())
    assert f"    bind *:18000 ssl crt {tmp_path}/tls.pem\n" in config
    assert f"    bind *:18001 proto h2 ssl crt {tmp_path}/tls.pem\n" in config
    assert config.count(" ssl crt ") == 2
    assert started(tmp_path, BACKEND) == config, "also when the cluster's head is started again"


def backend(protocol: RequestProtocol, application: str, replicas: int, first_port: int) -> BackendConfig:
    servers = [ServerConfig(f"r{number}", "127.0.0.1", first_port + number) for number in range(replicas)]
    spare = ServerConfig("spare", "127.0.0.1", 18500)
    name = f"{protocol.value.lower()}-{application}"
    return BackendConfig(
        name, "/", app_name=application, servers=servers, fallback_server=spare, protocol=protocol, timeout_server_s=9
    )


def of_serve(folder: Path, *backends: BackendConfig) -> tuple[str, str]:
    """Return the configuration that HAProxy starts with for these backends, and what was printed meanwhile."""
    settings, config = prepare(folder, 18101, 18404, 18500, 18501), folder / "haproxy.cfg"
    written = HAProxyConfig(
        socket_path=str(folder / "admin.sock"),
        http_options=HTTPOptions(port=18000),
        grpc_options=gRPCOptions(port=18001, grpc_servicer_functions=[SERVICER]),
    )
    HAProxyApi(written, {entry.name: entry for entry in backends}, str(config))._generate_config_file_internal()
    command = [settings["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(config), "-c"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    return config.read_text(encoding="utf-8"), checked.stderr


def test_unary_grpc_calls_go_to_the_http_listeners(tmp_path: Path) -> None:
    both = [
        backend(RequestProtocol.HTTP, APPLICATION, 2, 30000),
        backend(RequestProtocol.GRPC, APPLICATION, 2, 31000),
    ]
    config, said = of_serve(tmp_path, *both)
    unary = config.partition("backend unary-rayloom\n")[2].splitlines()
    assert [line.split() for line in unary if "server " in line] == [
        ["timeout", "server", "9s"],
        ["server", "r0", "127.0.0.1:30000", "track", "http-rayloom/r0"],
        ["server", "r1", "127.0.0.1:30001", "track", "http-rayloom/r1"],
    ]
    before, _, after = config.partition("    default_backend grpc-rayloom\n")
    assert after
    assert before.splitlines()[-1].startswith("    use_backend unary-rayloom if { path_beg /inference.GRPC")
    assert "all gRPC calls go" not in said
    assert of_serve(tmp_path, *both)[0] == config


@pytest.mark.parametrize("others", [[], [backend(RequestProtocol.GRPC, "other", 1, 31005)]])
def test_a_missing_http_listener_for_unary_calls_is_reported(tmp_path: Path, others: list[BackendConfig]) -> None:
    """No replica listens for HTTP: alone, and beside another application."""
    config, said = of_serve(tmp_path, backend(RequestProtocol.GRPC, APPLICATION, 1, 31000), *others)
    assert "unary-" not in config
    assert "all gRPC calls go" in said
