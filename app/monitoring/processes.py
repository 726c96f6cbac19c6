"""Starting Prometheus, Alertmanager and what they read, beside a local cluster."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from app.cluster.state import FOLDER, TOKEN_FILE, WATCHER_MARK, ClusterState
from app.config import NotifyConfig
from app.errors import ClusterError
from app.monitoring.configuration import ALERTMANAGER_FILE, PROMETHEUS_FILE, Targets, write_configuration
from app.ports import LOOPBACK
from app.storage import HOME

CONFIGURATION = FOLDER / "monitoring"
DATA = HOME / "monitoring"
"""Where Prometheus and Alertmanager keep what they know. It stays when the cluster goes."""
_PROMETHEUS, _ALERTMANAGER, _NODE_EXPORTER = (
    ("prometheus",),
    ("prometheus-alertmanager", "alertmanager"),
    ("prometheus-node-exporter", "node_exporter"),
)
_START_TIMEOUT_S = 30.0
_PERIOD_S = 0.1


def programs() -> list[str]:
    """Return what can be started, as the fields of ``Monitoring``. The node exporter is optional.

    Raises:
        ClusterError: Prometheus or Alertmanager is not installed. It says how to install them.
    """
    missing = [names[0] for names in (_PROMETHEUS, _ALERTMANAGER) if _find(names) is None]
    if missing:
        raise ClusterError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not on the path: install them, on Debian "
            "with 'apt-get install prometheus prometheus-alertmanager prometheus-node-exporter', or leave out "
            "--monitoring"
        ).of("monitoring.not_installed")
    return ["prometheus", "alertmanager", "server", *(["node_exporter"] if _find(_NODE_EXPORTER) else [])]


def start(cluster: ClusterState, notify: NotifyConfig, retention: str) -> None:
    """Start all of it, and wait until it answers. Its processes end with ``rayloom down``.

    Args:
        retention: how long Prometheus keeps figures, such as ``15d``.

    Raises:
        ClusterError: a process does not answer.
        DeliveryError: a secret of the receivers cannot be read.
    """
    ports = cluster.monitoring
    assert ports is not None
    write_configuration(CONFIGURATION, targets_of(cluster), notify)
    prometheus, alertmanager = f"{LOOPBACK}:{ports.prometheus}", f"{LOOPBACK}:{ports.alertmanager}"
    _launch(
        cluster,
        # With -P, Python does not import a package 'app' of the current folder.
        [sys.executable, "-P", "-m", "app.monitoring.server"],
        [f"--port={ports.server}", f"--prometheus=http://{prometheus}"],
    )
    _launch(
        cluster,
        [_path(_ALERTMANAGER)],
        [
            f"--config.file={CONFIGURATION / ALERTMANAGER_FILE}",
            f"--web.listen-address={alertmanager}",
            f"--web.external-url=http://{alertmanager}",
            "--cluster.listen-address=",  # it has no peers
            f"--storage.path={DATA / 'alertmanager'}",
        ],
    )
    _launch(
        cluster,
        [_path(_PROMETHEUS)],
        [
            f"--config.file={CONFIGURATION / PROMETHEUS_FILE}",
            f"--web.listen-address={prometheus}",
            f"--web.external-url=http://{prometheus}",
            f"--storage.tsdb.path={DATA / 'prometheus'}",
            f"--storage.tsdb.retention.time={retention}",
        ],
    )
    if ports.node_exporter:
        _launch(cluster, [_path(_NODE_EXPORTER)], [f"--web.listen-address={LOOPBACK}:{ports.node_exporter}"])
    for url in (f"http://{prometheus}/-/ready", f"http://{alertmanager}/-/ready", f"{ports.page}"):
        _await(url)


def targets_of(cluster: ClusterState) -> Targets:
    """Return where the parts of a cluster are that is watched."""
    ports = cluster.monitoring
    assert ports is not None
    return Targets(
        dashboard=cluster.dashboard,
        token_file=TOKEN_FILE,
        prometheus=f"{LOOPBACK}:{ports.prometheus}",
        alertmanager=f"{LOOPBACK}:{ports.alertmanager}",
        exporter=f"{LOOPBACK}:{ports.server}",
        node_exporter=f"{LOOPBACK}:{ports.node_exporter}" if ports.node_exporter else None,
    )


def _launch(cluster: ClusterState, program: Sequence[str], arguments: Sequence[str]) -> None:
    name = Path(program[0] if len(program) == 1 else program[-1]).name
    DATA.mkdir(parents=True, exist_ok=True)
    with (CONFIGURATION / f"{name}.log").open("w", encoding="utf-8") as log:
        subprocess.Popen(
            [*program, *arguments],
            # With the cluster's own mark, a restart of the cluster would end these processes, too.
            env={**os.environ, WATCHER_MARK: cluster.id},
            cwd=DATA,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl+C in this terminal must not end the process.
            start_new_session=True,
        )


def _await(url: str) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            if httpx.get(url).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(_PERIOD_S)
    raise ClusterError(
        f"{url} does not answer after {_START_TIMEOUT_S:g} s: look at the logs in {str(CONFIGURATION)!r}"
    ).of("monitoring.no_answer")


def _find(names: Sequence[str]) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


def _path(names: Sequence[str]) -> str:
    path = _find(names)
    assert path is not None  # 'programs' was asked
    return path
