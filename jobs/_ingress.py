"""The ingress: the addresses where Ray Serve listens for all applications of the cluster."""

import os
import socket
from dataclasses import dataclass

import ray
from ray import serve
from ray.serve.config import gRPCOptions

from app.config import ServeConfig
from app.errors import ClusterError
from app.ports import family_of, host_port
from app.serving.access import is_loopback
from app.serving.transport.grpc import SERVICER
from jobs._serve_internals import start_options
from jobs._tls import give_to_haproxy, haproxy_speaks_tls, require_possible, serve_options

DEFAULT_PORT, DEFAULT_GRPC_PORT = 8000, 8001
_HOSTS_OF_HAPROXY = ("127.0.0.1", "localhost", "0.0.0.0")  # noqa: S104
"""Hosts on which HAProxy reaches the replicas of its node: it connects to loopback."""


@dataclass(frozen=True)
class Address:
    """The address of Ray Serve."""

    host: str
    port: int
    grpc_port: int
    scheme: str

    @property
    def http(self) -> str:
        """The URL for HTTP."""
        return f"{self.scheme}://{host_port(self.host, self.port)}"

    @property
    def grpc(self) -> str:
        """The address for gRPC clients: HOST:PORT."""
        return host_port(self.host, self.grpc_port)


def require_address(config: ServeConfig) -> Address:
    """Return the address that Ray Serve has, or would have on this cluster.

    Raises:
        ClusterError: a port is taken, Serve already listens elsewhere, or TLS is not possible.
    """
    if config.tls:
        require_possible(config.tls)
    desired = Address(
        config.host,
        config.port or int(os.environ.get("RAYLOOM_SERVE_PORT", DEFAULT_PORT)),
        config.grpc_port or int(os.environ.get("RAYLOOM_GRPC_PORT", DEFAULT_GRPC_PORT)),
        "https" if config.tls else "http",
    )
    _require_reachable(desired)
    running = _listens_on()
    if running is None:
        _require_free(desired.host, desired.port, "serve.port")
        _require_free(desired.host, desired.grpc_port, "serve.grpc_port")
    elif running != desired:
        raise ClusterError(
            f"serve.port is {desired.port} and serve.grpc_port {desired.grpc_port}, on {desired.host} by "
            f"{desired.scheme}, and this cluster's endpoint listens on {running.port} and {running.grpc_port}, on "
            f"{running.host} by {running.scheme}, already: leave serve.host, serve.tls and the ports as they are, or "
            "restart the cluster"
        ).of("endpoint.elsewhere")
    return desired


def start_serve(config: ServeConfig) -> Address:
    """Start Ray Serve unless it is running, and return its address. Raises ClusterError as ``require_address`` does."""
    address = require_address(config)
    give_to_haproxy(config.tls)  # the certificate may be another one
    if start_options() is None:
        serve.start(
            http_options=serve.HTTPOptions(host=address.host, port=address.port, **serve_options(config.tls)),
            grpc_options=gRPCOptions(port=address.grpc_port, grpc_servicer_functions=[SERVICER]),
        )
    return address


def _require_reachable(desired: Address) -> None:
    """Raise ClusterError if requests to this host and these ports would not reach the replicas."""
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" and desired.host not in _HOSTS_OF_HAPROXY:
        raise ClusterError(
            f"serve.host is {desired.host}, where HAProxy would not find the replicas: set it to 0.0.0.0, and let a "
            "firewall limit the access, or to 127.0.0.1"
        ).of("host.unreachable", "serve.host")
    nodes = sum(node["Alive"] for node in ray.nodes())
    if nodes > 1 and is_loopback(desired.host):
        raise ClusterError(
            f"serve.host is {desired.host}, and the cluster has {nodes} nodes, none of which would reach the replicas "
            "of another: set it to 0.0.0.0, where the endpoint asks for a token"
        ).of("host.unreachable", "serve.host")
    if desired.port == desired.grpc_port:
        raise ClusterError(
            f"serve.port and serve.grpc_port are both {desired.port}: give two ports, or leave one out"
        ).of("ports.equal", "serve.grpc_port")


def _listens_on() -> Address | None:
    """Return the address of the running Serve; None if it does not run."""
    if (options := start_options()) is None:
        return None
    http, grpc = options
    return Address(http.host, http.port, grpc.port, "https" if http.ssl_certfile or haproxy_speaks_tls() else "http")


def _require_free(host: str, port: int, key: str) -> None:
    try:
        with socket.socket(family_of(host)) as probe:
            # Otherwise a port whose connections were just closed would count as taken.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise ClusterError(
            f"port {port} on {host} cannot be used ({error.strerror}): stop what listens there, or set {key}"
        ).of("port.unusable", key) from error
