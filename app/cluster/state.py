"""The state of the local cluster, in ``~/.rayloom/cluster``."""

import contextlib
import os
import secrets
import shutil
from pathlib import Path

import psutil
from pydantic import BaseModel, ValidationError

from app.errors import ClusterError, NoClusterError
from app.ports import LOOPBACK
from app.storage import HOME

FOLDER = HOME / "cluster"
TOKEN_FILE = FOLDER / "token"
SUPERVISOR_LOG = FOLDER / "supervisor.log"
_STATE_FILE = FOLDER / "cluster.json"
MARK = "RAYLOOM_CLUSTER"
"""The environment variable with the cluster's id, which every process of the cluster inherits."""

WATCHER_MARK = "RAYLOOM_WATCHER"
"""The environment variable of the processes that watch the cluster. They outlive a restart of the cluster."""

GCS = "gcs_server"
"""The process name of Ray's control store."""
SUPERVISOR = "app.cluster.supervisor"
"""The module that the cluster's supervisor runs."""


class Monitoring(BaseModel):
    """The ports of the processes that watch a cluster, on loopback."""

    prometheus: int
    alertmanager: int
    server: int
    """Of ``app.monitoring.server``."""
    node_exporter: int | None = None

    @property
    def page(self) -> str:
        """The address of the page with the dashboards."""
        return f"http://{LOOPBACK}:{self.server}/monitoring"

    @property
    def prometheus_url(self) -> str:
        """The address of Prometheus."""
        return f"http://{LOOPBACK}:{self.prometheus}"


class ClusterState(BaseModel):
    """A cluster that was started."""

    id: str
    gcs_port: int
    dashboard_port: int
    serve_port: int
    grpc_port: int
    storage: str
    num_cpus: int | None
    start_s: float | None = None
    """How long the start took, in seconds; None while it starts."""
    runtime: Path
    """The folder of Ray's own files. Its name is short, because the system limits the paths of sockets."""
    autoscaler_metrics_port: int = 0
    dashboard_metrics_port: int = 0
    """Both are Ray's, for Prometheus. Ray's own defaults are the same for every cluster of a machine."""
    monitoring: Monitoring | None = None
    """None: nothing watches the cluster."""

    @property
    def ports(self) -> list[int]:
        """Every port that was chosen for the cluster."""
        watchers = self.monitoring.model_dump(exclude_none=True).values() if self.monitoring else ()
        metrics = self.autoscaler_metrics_port, self.dashboard_metrics_port
        return [self.gcs_port, self.dashboard_port, self.serve_port, self.grpc_port, *metrics, *watchers]

    @property
    def dashboard(self) -> str:
        """The address of the dashboard, and of the jobs API."""
        return f"http://{LOOPBACK}:{self.dashboard_port}"

    @property
    def endpoint(self) -> str:
        """The address of the endpoint, which answers once a model is deployed."""
        return f"http://{LOOPBACK}:{self.serve_port}"

    @property
    def grpc_endpoint(self) -> str:
        """The endpoint's address for gRPC clients."""
        return f"{LOOPBACK}:{self.grpc_port}"

    def client_environment(self) -> dict[str, str]:
        """Return the environment variables with which ``ray job submit`` reaches this cluster."""
        return {
            "RAY_API_SERVER_ADDRESS": self.dashboard,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(TOKEN_FILE),
        }

    def processes(self) -> list[psutil.Process]:
        """Return every process of this cluster except the calling one: those with its mark, and their children.

        Children are included because a long process title overwrites the environment, and with it the mark.
        """
        return self._marked(MARK)

    def watchers(self) -> list[psutil.Process]:
        """Return every process that watches this cluster from outside: Prometheus, Alertmanager and what they read."""
        return self._marked(WATCHER_MARK)

    def supervisors(self) -> list[psutil.Process]:
        """Return the supervisor: one process, or none if it has ended."""
        return [process for process in self.processes() if _runs(process, SUPERVISOR)]

    def clients(self) -> list[psutil.Process]:
        """Return every process except Ray's control store, the GCS."""
        return [process for process in self.processes() if not _is_gcs(process)]

    def forget(self) -> None:
        """Remove everything that this cluster left on disk."""
        # The folder of the state goes last. It is the lock, so no other start begins before.
        shutil.rmtree(self.runtime, ignore_errors=True)
        shutil.rmtree(FOLDER, ignore_errors=True)

    def _marked(self, mark: str) -> list[psutil.Process]:
        found: set[psutil.Process] = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # another user's, or ended while we looked
                if process.environ().get(mark) == self.id:
                    found |= {process, *process.children(recursive=True)}
        return [process for process in found if process.pid != os.getpid()]

    def save(self) -> None:
        """Write the state to disk."""
        _STATE_FILE.write_text(self.model_dump_json(indent=1), encoding="utf-8")


def _is_gcs(process: psutil.Process) -> bool:
    try:
        return process.name() == GCS
    except psutil.Error:  # it has ended meanwhile
        return False


def _runs(process: psutil.Process, module: str) -> bool:
    try:
        return module in process.cmdline()
    except psutil.Error:  # it has ended meanwhile
        return False


def read_state() -> ClusterState | None:
    """Return the cluster that was started on this machine; it may have ended. None if there is none."""
    try:
        return ClusterState.model_validate_json(_STATE_FILE.read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


def running_cluster() -> ClusterState:
    """Return the local cluster. Raise ClusterError if none is up."""
    state = read_state()
    if state is None or not state.processes():
        raise NoClusterError("no local cluster is up: start one with 'rayloom up'").of("cluster.none")
    return state


def claim() -> None:
    """Create the state's folder with a token that only its owner can read.

    Raises:
        ClusterError: the folder exists or cannot be created, or others could read the token.
    """
    try:
        # The folder is also the lock: of two starts at the same time, one fails here.
        FOLDER.mkdir(mode=0o700, parents=True)
        with open(os.open(TOKEN_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(32))
    except FileExistsError as error:
        raise ClusterError(
            f"{str(FOLDER)!r} exists already: another 'rayloom up' is starting a cluster, or another version of "
            "Rayloom has started one; if no Ray runs on this machine, remove the folder"
        ).of("folder.taken") from error
    except OSError as error:
        raise ClusterError(
            f"the token {str(TOKEN_FILE)!r} cannot be written ({error.strerror}), and without it anybody on this "
            "machine could run commands through Ray: set RAYLOOM_HOME to a folder of your own"
        ).of("token.not_written") from error
    if (mode := TOKEN_FILE.stat().st_mode & 0o777) != 0o600:
        shutil.rmtree(FOLDER)
        raise ClusterError(
            f"the token {str(TOKEN_FILE)!r} has mode {mode:o}, expected 600: set RAYLOOM_HOME to a folder on a file "
            "system that keeps modes"
        ).of("token.mode")
