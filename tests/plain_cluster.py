"""A cluster of several nodes, started by ``ray start``, with no Rayloom setting except storage."""

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from app.ports import unused
from tests.helpers import run, wait_until
from tests.launch import MARK, processes_where


class PlainCluster:
    """A head without CPUs for work, and the nodes that join it. Each node has its own folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._gcs, dashboard, client = unused(3)
        token = folder / "token"
        token.write_text(secrets.token_hex(32), encoding="utf-8")
        token.chmod(0o600)
        self.storage = folder / "storage"
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
            "RAYLOOM_STORAGE": str(self.storage),
            "RAYLOOM_CACHE": str(folder / "cache"),
            "RAYLOOM_HOME": str(folder / "home"),
            "OMP_NUM_THREADS": "1",
            MARK: folder.name,
        }
        self._start("--head", f"--port={self._gcs}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
                    f"--ray-client-server-port={client}", "--num-cpus=0")  # fmt: skip

    def join(self, *options: str, before: str = "") -> None:
        """Start one more node. ``before`` is a shell command that runs first, in the node's private mount namespace."""
        nodes = len(self.nodes())
        self._start(f"--address=127.0.0.1:{self._gcs}", *options, before=before)
        wait_until(lambda: len(self.nodes()) == nodes + 1)

    def nodes(self) -> list[str]:
        """The ids of the living nodes."""
        return [node["node_id"] for node in self.listed("nodes") if node["state"] == "ALIVE"]

    def listed(self, kind: str) -> list[dict[str, Any]]:
        """Return what Ray's state API lists: nodes, actors or tasks. Empty while the dashboard starts."""
        token = (self._folder / "token").read_text(encoding="utf-8")
        url = f"{self.environment['RAY_API_SERVER_ADDRESS']}/api/v0/{kind}?detail=true&limit=10000"
        try:
            answer = httpx.get(url, headers={"Authorization": f"Bearer {token}"}, timeout=30)
        except httpx.TransportError:
            return []
        found: list[dict[str, Any]] = answer.json()["data"]["result"]["result"] if answer.is_success else []
        return found

    def stop(self) -> None:
        """Stop every process that one of the nodes has started."""
        while left := processes_where(lambda process: process.environ().get(MARK) == self._folder.name):
            for process in left:
                process.kill()
            psutil.wait_procs(left, timeout=5)

    def _start(self, *options: str, before: str = "") -> None:
        folder = tempfile.mkdtemp(prefix="n", dir=self._folder)
        ports = ("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0")
        command = ["ray", "start", "--disable-usage-stats", f"--temp-dir={folder}", *ports, *options]
        if before:
            command = ["/usr/bin/unshare", "--mount", "sh", "-c", f'{before} && exec "$@"', "sh", *command]
        started = run(*command, environment=self.environment)
        assert started.returncode == 0, started.stdout + started.stderr


@contextmanager
def plain_cluster() -> Iterator[PlainCluster]:
    """Yield a running cluster's head."""
    folder = Path(tempfile.mkdtemp(prefix="rlp-", dir="/tmp"))  # a short path, because Ray's socket paths are limited
    cluster = None
    try:
        cluster = PlainCluster(folder)
        wait_until(lambda: bool(cluster.nodes()))
        yield cluster
    finally:
        if cluster:
            cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
