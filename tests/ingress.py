"""HAProxy with the configuration that the installed Ray Serve writes, edited as on every node."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import trustme
from ray.serve._private.common import RequestProtocol
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions, gRPCOptions

from app.ports import LOOPBACK, is_free, unused
from app.serving.ingress.haproxy import TLS_FILE, local_settings, prepare
from app.serving.transport.grpc import SERVICER
from tests.helpers import wait_until


def backend(
    protocol: RequestProtocol, application: str, replicas: int, first_port: int, hosts: Sequence[str] = (LOOPBACK,)
) -> BackendConfig:
    """An application with so many replicas on each host, at ports that follow each other."""
    addresses = product(hosts, range(first_port, first_port + replicas))
    servers = [ServerConfig(f"r{number}", *address) for number, address in enumerate(addresses)]
    spare = ServerConfig("spare", "127.0.0.1", 18500)
    name = f"{protocol.value.lower()}-{application}"
    return BackendConfig(
        name, "/", app_name=application, servers=servers, fallback_server=spare, protocol=protocol, timeout_server_s=9
    )


@dataclass
class Ingress:
    """HAProxy as 'rayloom up' prepares it and Ray Serve configures it."""

    folder: Path
    ports: Sequence[int] = (18000, 18001, 18101, 18404)
    """Ports for HTTP, gRPC, metrics and statistics."""

    def __post_init__(self) -> None:
        self.settings = prepare(self.folder) | local_settings(self.folder, 18101, 18404, 18500, 18501)
        self.script = Path(self.settings["RAY_SERVE_HAPROXY_BINARY_PATH"])
        self.config = self.folder / "haproxy.cfg"

    def written(self, *backends: BackendConfig) -> str:
        """What Ray writes for these backends."""
        http, grpc, metrics, stats = self.ports
        given = HAProxyConfig(
            socket_path=str(self.folder / "admin.sock"),
            metrics_port=metrics,
            stats_port=stats,
            http_options=HTTPOptions(host="0.0.0.0", port=http),
            grpc_options=gRPCOptions(port=grpc, grpc_servicer_functions=[SERVICER]),
            is_head=True,
            # Ray has read these from its environment when it was imported.
            nbthread=int(self.settings["RAY_SERVE_HAPROXY_NBTHREAD"]),
            timeout_connect_s=int(self.settings["RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S"]),
            health_check_inter=self.settings["RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER"],
            retry_on=self.settings["RAY_SERVE_HAPROXY_RETRY_ON"],
            retries=int(self.settings["RAY_SERVE_HAPROXY_RETRIES"]),
        )
        api = HAProxyApi(given, config_file_path=str(self.config))
        api.set_backend_configs({entry.name: entry for entry in backends})
        api.set_grpc_fallback_server(ServerConfig("proxy", "127.0.0.1", 18501))
        api._generate_config_file_internal()
        return self.config.read_text(encoding="utf-8")

    def run(self, *backends: BackendConfig) -> tuple[str, subprocess.CompletedProcess[str]]:
        """Let HAProxy check what it would start with."""
        self.written(*backends)
        command = [str(self.script), "-db", "-f", str(self.config), "-c"]
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
        return self.config.read_text(encoding="utf-8"), checked

    def start(self, *backends: BackendConfig) -> str:
        """What HAProxy starts with, and accepts."""
        config, checked = self.run(*backends)
        assert checked.returncode == 0, checked.stderr
        return config

    @contextmanager
    def running(self, *backends: BackendConfig) -> Iterator[str]:
        """Start HAProxy on free ports, and yield its URL."""
        self.ports = http, *_ = unused(4)
        self.written(*backends)
        process = subprocess.Popen([str(self.script), "-db", "-f", str(self.config)])
        try:
            wait_until(lambda: not is_free(http))
            yield f"http://127.0.0.1:{http}"
        finally:
            process.terminate()
            process.wait()

    def show_certificate(self) -> None:
        certificate = trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.bytes()
        Path(self.settings[TLS_FILE]).write_bytes(certificate)
