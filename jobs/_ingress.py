"""Where Ray Serve listens, for every application of the cluster."""

import os
import socket
from dataclasses import dataclass

import ray
from ray import serve
from ray.serve.config import gRPCOptions

from app.config import ServeConfig
from app.errors import ClusterError
from app.serving.access import is_loopback
from app.serving.transport.grpc import SERVICER
from jobs._serve_internals import start_options
from jobs._tls import haproxy_speaks_tls, require_possible, serve_options, show_to_haproxy

DEFAULT_PORT, DEFAULT_GRPC_PORT = 8000, 8001
_HOSTS_OF_HAPROXY = ("127.0.0.1", "localhost", "0.0.0.0")  # noqa: S104
"""It asks the replicas of its node on loopback, and they listen where ``serve.host`` says."""


@dataclass(frozen=True)
class Address:
    """Where Ray Serve listens."""

    host: str
    port: int
    grpc_port: int
    scheme: str

    @property
    def http(self) -> str:
        """As a URL."""
        return f"{self.scheme}://{self.host}:{self.port}"

    @property
    def grpc(self) -> str:
        """As clients of gRPC write it."""
        return f"{self.host}:{self.grpc_port}"


def start_serve(config: ServeConfig) -> Address:
    """Start Ray Serve, unless it runs, and return where it listens.

    Raises:
        ClusterError: a port is taken, Serve listens elsewhere already, or cannot speak TLS as it is to.
    """
    if config.tls:
        require_possible(config.tls)
    wanted = Address(
        config.host,
        config.port or int(os.environ.get("RAYLOOM_SERVE_PORT", DEFAULT_PORT)),
        config.grpc_port or int(os.environ.get("RAYLOOM_GRPC_PORT", DEFAULT_GRPC_PORT)),
        "https" if config.tls else "http",
    )
    _require_reachable(wanted)
    running = _listens_on()
    if running is None:
        _require_free(wanted.host, wanted.port, "serve.port")
        _require_free(wanted.host, wanted.grpc_port, "serve.grpc_port")
        show_to_haproxy(config.tls)
        serve.start(
            http_options=serve.HTTPOptions(host=wanted.host, port=wanted.port, **serve_options(config.tls)),
            grpc_options=gRPCOptions(port=wanted.grpc_port, grpc_servicer_functions=[SERVICER]),
        )
    elif running != wanted:
        raise ClusterError(
            f"serve.port is {wanted.port} and serve.grpc_port {wanted.grpc_port}, on {wanted.host} by {wanted.scheme}, "
            f"and this cluster's endpoint listens on {running.port} and {running.grpc_port}, on {running.host} by "
            f"{running.scheme}, already: leave serve.host, serve.tls and the ports as they are, or restart the cluster"
        )
    else:
        show_to_haproxy(config.tls)  # it may be another one
    return wanted


def _require_reachable(wanted: Address) -> None:
    """Refuse a host or ports by which a request would not come to a replica. Raises ClusterError."""
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" and wanted.host not in _HOSTS_OF_HAPROXY:
        raise ClusterError(
            f"serve.host is {wanted.host}, where HAProxy would not find the replicas: set it to 0.0.0.0, and let a "
            "firewall say who reaches it, or to 127.0.0.1"
        )
    nodes = sum(node["Alive"] for node in ray.nodes())
    if nodes > 1 and is_loopback(wanted.host):
        raise ClusterError(
            f"serve.host is {wanted.host}, and the cluster has {nodes} nodes, of which none would reach the replicas "
            "of another: set it to 0.0.0.0, where the endpoint asks for a token"
        )
    if wanted.port == wanted.grpc_port:
        raise ClusterError(f"serve.port and serve.grpc_port are both {wanted.port}: give two ports, or leave one out")


def _listens_on() -> Address | None:
    """Where the Serve that runs on this cluster listens, if one does."""
    if (options := start_options()) is None:
        return None
    http, grpc = options
    return Address(http.host, http.port, grpc.port, "https" if http.ssl_certfile or haproxy_speaks_tls() else "http")


def _require_free(host: str, port: int, key: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ClusterError(
                f"port {port} on {host} cannot be used ({error.strerror}): stop what listens there, or set {key}"
            ) from error
