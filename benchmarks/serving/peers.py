"""The servers that a user would pick instead, run as their own documentation does; each ``server.py`` says more."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from app.cluster.ports import LOOPBACK, unused
from benchmarks.serving.environments import PEERS, interpreter, version_of
from benchmarks.serving.models import ServedModel
from benchmarks.serving.processes import running
from benchmarks.serving.wire import BinaryTensors, JsonTensors, NamedLists, StackedList, Wire
from benchmarks.serving.workloads import EXACT, Tolerance

_ROOT = Path(__file__).parents[2]
_MODEL = "model"
"""What servers that name models call the one they serve."""


def _nothing(_: Path) -> dict[str, str]:
    return {}


def _this_checkout(_: Path) -> dict[str, str]:
    """For a server that imports Rayloom's own modules."""
    return {"PYTHONPATH": str(_ROOT)}


def _ray(folder: Path) -> dict[str, str]:
    """A Ray of its own, whatever else runs on the machine."""
    return {
        "RAY_ADDRESS": "",
        "RAY_FOLDER": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "on-loopback-only",
    }


def _ray_with_fast_ingress(folder: Path) -> dict[str, str]:
    """HAProxy in front, requests straight to the replica; with files and ports of its own."""
    metrics, stats, fallback = unused(3)
    return {
        **_ray(folder),
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
    }


@dataclass(frozen=True)
class Server:
    """A model server: ``server.py`` in a folder beside this file."""

    name: str
    folder: str
    package: str
    """Whose version is reported."""

    wire: Wire
    note: str
    """How it is set beside its batching, for the report."""

    environment: Callable[[Path], Mapping[str, str]] = _nothing
    """Variables that it needs beside those that every server is given; it may write into the folder."""


LITSERVE = Server("LitServe", "litserve", "litserve", NamedLists("/predict"), "fast_queue")
BENTOML = Server("BentoML", "bentoml", "bentoml", StackedList("/predict"), "one worker")
MLSERVER = Server("MLServer", "mlserver", "mlserver", JsonTensors(_MODEL), "parallel_workers 0")
TRITON = Server("NVIDIA Triton", "triton", "nvidia-pytriton", BinaryTensors(_MODEL), "Python backend")
_RAY_LIMIT = "max_ongoing_requests 256"
RAY_SERVE = Server("Ray Serve", "ray_serve", "ray", NamedLists("/"), _RAY_LIMIT, _ray)
RAY_SERVE_FAST = Server(
    "Ray Serve, fast ingress", "ray_serve", "ray", NamedLists("/"), _RAY_LIMIT, _ray_with_fast_ingress
)
SERVERS = (LITSERVE, BENTOML, MLSERVER, TRITON, RAY_SERVE, RAY_SERVE_FAST)

EAGER = Server(
    "PyTorch eager, FastAPI", "fastapi_torch", "fastapi", NamedLists("/predict"), "one thread", _this_checkout
)


@dataclass(frozen=True)
class Batching:
    """How a server joins requests, in the terms that all of them share."""

    max_size: int = 1
    wait_us: int | None = None
    """That the first request of a batch waits for more; None if the server sees to it itself."""

    def __str__(self) -> str:
        if self.max_size == 1:
            return "one request at a time"
        waits = "waits as it sees fit" if self.wait_us is None else f"waits {self.wait_us} µs"
        return f"batches of {self.max_size} at most, {waits}"


ALONE = Batching()


@dataclass(frozen=True)
class Peer:
    """A server with a model behind it."""

    server: Server
    model: ServedModel
    batching: Batching
    environments: Path
    """Folder of the peers' virtual environments."""

    @property
    def name(self) -> str:
        """The server's, and whether it joins requests."""
        return self.server.name + (", batching" if self.batching.max_size > 1 else "")

    @property
    def setting(self) -> str:
        """Its batching, and what else was set."""
        return f"{self.batching}; {self.server.note}"

    @property
    def wire(self) -> Wire:
        """The server's."""
        return self.server.wire

    @property
    def tolerance(self) -> Tolerance:
        """It runs the float32 file."""
        return EXACT

    @contextlib.contextmanager
    def serve(self, folder: Path) -> Iterator[str]:
        """Start a copy of its files, since some servers write beside them."""
        python, (port,) = interpreter(self.server.folder, self.environments), unused(1)
        copied = shutil.copytree(PEERS / self.server.folder, folder / "server")
        url = f"http://{LOOPBACK}:{port}"
        environment = {
            "PORT": str(port),
            "MODEL_FILE": str(self.model.onnx),
            "WEIGHTS": str(self.model.weights),
            "MAX_BATCH_SIZE": str(self.batching.max_size),
            "MAX_WAIT_US": str(self.batching.wait_us or 0),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": "",  # its environment is its own
            "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)]),
            **self.server.environment(folder),
        }
        with running([str(python), "server.py"], environment, copied, lambda: self._answers(url)):
            yield url

    def _answers(self, url: str) -> bool:
        request = self.wire.request(self.model.blank_row)
        answer = httpx.post(f"{url}{request.path}", content=request.body, headers=dict(request.headers), timeout=5.0)
        return answer.is_success


def version_in(server: Server, environments: Path) -> str:
    """What is measured; its environment is made first, if it is not there."""
    return f"{server.package} {version_of(server.package, interpreter(server.folder, environments))}"
