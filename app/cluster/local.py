"""Start and stop a Ray head on this machine."""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path

import psutil

from app import ports
from app.cluster import state
from app.cluster.node import node_settings
from app.cluster.packages import default_storage
from app.cluster.state import MARK, ClusterState, Monitoring
from app.errors import ClusterError
from app.ports import LOOPBACK
from app.serving.ingress import haproxy

_STOP_TIMEOUT_S = 5.0
_PERIOD_S = 0.05


def start(
    dashboard_port: int | None,
    serve_port: int | None,
    grpc_port: int | None,
    num_cpus: int | None,
    watched_by: Collection[str] = (),
) -> ClusterState:
    """Start a head with token authentication and the dashboard on loopback. Choose the ports that are not given.

    ``watched_by`` are the fields of ``Monitoring`` for which ports are chosen. The caller starts these processes.

    Raises:
        ClusterError: a cluster is up already, a port is taken, no token can be made, or Ray does not start.
    """
    started = time.monotonic()
    _require_none()
    dashboard = ports.choose(dashboard_port, 8265, "--dashboard-port")
    serve = ports.choose(serve_port, 8000, "--serve-port", besides=(dashboard,))
    grpc = ports.choose(grpc_port, 8001, "--grpc-port", besides=(dashboard, serve))
    state.claim()
    # All at once, so that no two of them are the same port.
    gcs, autoscaler, metrics, *others = ports.unused(3 + len(watched_by), besides=(dashboard, serve, grpc))
    cluster = ClusterState(
        id=secrets.token_hex(8),
        gcs_port=gcs,
        dashboard_port=dashboard,
        serve_port=serve,
        grpc_port=grpc,
        storage=default_storage(),
        num_cpus=num_cpus,
        # A short path: those of Unix sockets, which Ray and HAProxy make below it, are limited.
        runtime=Path(tempfile.mkdtemp(prefix="rl-", dir="/tmp")),
        autoscaler_metrics_port=autoscaler,
        dashboard_metrics_port=metrics,
        monitoring=Monitoring(**dict(zip(watched_by, others, strict=True))) if watched_by else None,
    )
    try:
        cluster.save()  # for the supervisor, and for 'rayloom down' if this process is killed
        _start_head(cluster)
        _start_supervisor(cluster)
        cluster = cluster.model_copy(update={"start_s": round(time.monotonic() - started, 3)})
        cluster.save()
    except BaseException:
        stop(cluster)
        raise
    return cluster


def _require_none() -> None:
    """Forget a cluster that has ended. Raises ClusterError if one is up."""
    known = state.read_state()
    if known and known.processes():
        raise ClusterError(
            f"a cluster is up already, dashboard {known.dashboard}: use it, or stop it with 'rayloom down'"
        ).of("cluster.running")
    if known:
        known.forget()  # it ended without 'rayloom down', for example with the machine


def stop(cluster: ClusterState) -> int:
    """End every process of ``cluster``, first with SIGTERM and then with SIGKILL. Return how many there were."""
    # The watchers end first, because what ends next is nothing to be told of.
    ended = _end(cluster.watchers)
    # The supervisor would restart the others.
    ended |= _end(cluster.supervisors)
    # These end before the GCS, because Ray's monitor reports its end there, and would wait.
    ended |= _end(cluster.clients)
    ended |= _end(cluster.processes)
    cluster.forget()
    return len(ended)


def restart(cluster: ClusterState) -> None:
    """Kill the rest of a cluster and restart its head, with the same ports, token, options and stored state.

    Nothing gets SIGTERM: Ray would record that its actors ended on purpose, and not restart them.

    Raises:
        ClusterError: Ray does not start.
    """
    # A process may have started another just before it was killed.
    while processes := cluster.processes():
        for process in processes:
            _signal(process.kill)
        psutil.wait_procs(processes, timeout=_STOP_TIMEOUT_S)
    _start_head(cluster)


def _end(find: Callable[[], list[psutil.Process]]) -> set[psutil.Process]:
    """End the processes that ``find`` returns until there are none. A process may start another while it ends."""
    ended: set[psutil.Process] = set()
    while processes := find():
        ended.update(processes)
        for process in processes:
            _signal(process.terminate)
        _, alive = psutil.wait_procs(processes, timeout=_STOP_TIMEOUT_S)
        for process in alive:
            _signal(process.kill)
        psutil.wait_procs(alive, timeout=_STOP_TIMEOUT_S)
    return ended


def _signal(send: Callable[[], None]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        send()


def _start_head(cluster: ClusterState) -> None:
    taken = cluster.ports
    # New ones at each start, because only Ray's processes use them. Clients know the others, which stay.
    client, *ingress = ports.unused(5, besides=taken)
    command = [
        *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--disable-usage-stats"),
        f"--port={cluster.gcs_port}",
        f"--dashboard-host={LOOPBACK}",
        f"--dashboard-port={cluster.dashboard_port}",
        # 0 takes a free port. Ray's default is one port for all clusters of a machine.
        "--dashboard-agent-listen-port=0",
        f"--ray-client-server-port={client}",
        "--min-worker-port=0",
        "--max-worker-port=0",
        f"--temp-dir={cluster.runtime / 'ray'}",
        *([f"--num-cpus={cluster.num_cpus}"] if cluster.num_cpus is not None else []),
        f"--system-config={json.dumps(_store(cluster))}",
    ]
    folder, log = cluster.runtime / "haproxy", cluster.runtime / "start.log"
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            command,
            env=_environment(cluster) | node_settings(folder) | haproxy.local_settings(folder, *ingress),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in this terminal must not reach the cluster
            check=False,
        )
    if done.returncode:
        raise ClusterError(f"Ray did not start:\n{log.read_text(encoding='utf-8').strip()}").of("cluster.not_started")


def _store(cluster: ClusterState) -> dict[str, str]:
    """Return the settings that keep Ray's control store on disk. Without it, a killed GCS loses the cluster."""
    return {"gcs_storage": "rocksdb", "gcs_storage_path": str(cluster.runtime / "store")}


def _start_supervisor(cluster: ClusterState) -> None:
    """Start the supervisor, and wait until it logs. Raise ClusterError if it ends instead."""
    with state.SUPERVISOR_LOG.open("w", encoding="utf-8") as log:
        supervisor = subprocess.Popen(
            # With -P, Python does not import a package 'app' of the current folder.
            [sys.executable, "-P", "-m", state.SUPERVISOR],
            env=_environment(cluster),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    while supervisor.poll() is None and not state.SUPERVISOR_LOG.stat().st_size:
        time.sleep(_PERIOD_S)
    if supervisor.poll() is not None:
        raise ClusterError(f"the supervisor ended: {state.SUPERVISOR_LOG.read_text(encoding='utf-8').strip()}").of(
            "supervisor.ended"
        )


def _environment(cluster: ClusterState) -> dict[str, str]:
    """Return the environment that every process of the cluster inherits."""
    return {
        **os.environ,
        **cluster.client_environment(),
        MARK: cluster.id,
        "RAYLOOM_STORAGE": cluster.storage,
        "RAYLOOM_SERVE_PORT": str(cluster.serve_port),
        "RAYLOOM_GRPC_PORT": str(cluster.grpc_port),
        "AUTOSCALER_METRIC_PORT": str(cluster.autoscaler_metrics_port),
        "DASHBOARD_METRIC_PORT": str(cluster.dashboard_metrics_port),
        **({"RAY_PROMETHEUS_HOST": cluster.monitoring.prometheus_url} if cluster.monitoring else {}),
    }
