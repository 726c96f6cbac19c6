"""The servers that a user would pick instead, run as their own documentation does; each ``server.py`` says more."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from app.ports import unused
from benchmarks.serving.wire import BinaryTensors, GrpcTensors, JsonTensors, NamedLists, StackedList, Wire

MODEL = "model"
"""What servers that name models call the one they serve."""

_ROOT = Path(__file__).parents[2]
_RAY_LIMIT = "max_ongoing_requests 256"


@dataclass(frozen=True)
class Batching:
    """A server's batching, in terms that all servers share."""

    max_size: int
    wait_us: int | None
    """Microseconds for which a batch's first request waits for others; None if the server decides itself."""

    def __str__(self) -> str:
        if self.max_size == 1:
            return "one request at a time"
        delay = "adaptive delay" if self.wait_us is None else f"delay {self.wait_us} µs"
        return f"batch size at most {self.max_size}, {delay}"


ALONE = Batching(max_size=1, wait_us=0)
_ALONE_OR_JOINED = (ALONE, Batching(max_size=32, wait_us=1000))


@dataclass(frozen=True)
class Server:
    """A model server: ``server.py`` in a folder of ``peers``."""

    name: str
    folder: str
    package: str
    """Whose version is reported."""

    wire: Wire
    note: str
    """Its other settings, for the report."""

    batchings: Sequence[Batching]
    """The ways in which it is run: which is faster depends on the model and on the load."""

    environment: Callable[[Path], Mapping[str, str]] = lambda _: {}
    """Variables that it needs, beside those that every server is given, to start in a folder of its own."""


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


def _ray_with_this_checkout(folder: Path) -> dict[str, str]:
    """For a server that imports Rayloom's own modules."""
    return {**_ray_with_fast_ingress(folder), "PYTHONPATH": str(_ROOT)}


SERVERS: Mapping[str, Server] = {
    "litserve": Server("LitServe", "litserve", "litserve", NamedLists("/predict"), "fast_queue", _ALONE_OR_JOINED),
    "bentoml": Server(
        "BentoML", "bentoml", "bentoml", StackedList("/predict"), "one worker", (ALONE, Batching(32, wait_us=None))
    ),
    "mlserver": Server("MLServer", "mlserver", "mlserver", JsonTensors(MODEL), "parallel_workers 0", _ALONE_OR_JOINED),
    "triton": Server(
        "NVIDIA Triton",
        "triton",
        "nvidia-pytriton",
        BinaryTensors(MODEL),
        "Python backend",
        (ALONE, Batching(32, wait_us=0)),
    ),
    "triton_json": Server(
        "NVIDIA Triton, JSON",
        "triton",
        "nvidia-pytriton",
        JsonTensors(MODEL),
        "Python backend",
        (Batching(32, wait_us=0),),
    ),
    "ray_serve": Server("Ray Serve", "ray_serve", "ray", NamedLists("/"), _RAY_LIMIT, (ALONE,), _ray),
    "ray_serve_fast": Server(
        "Ray Serve, fast ingress",
        "ray_serve",
        "ray",
        NamedLists("/"),
        _RAY_LIMIT,
        _ALONE_OR_JOINED,
        _ray_with_fast_ingress,
    ),
}
"""By the name that the command line takes."""

TRITON_GRPC = replace(SERVERS["triton"], name="NVIDIA Triton, gRPC", wire=GrpcTensors(MODEL))

EAGER = Server(
    "PyTorch eager",
    "eager_torch",
    "torch",
    NamedLists("/"),
    "behind Ray Serve with its fast ingress, padding removed",
    (ALONE,),
    _ray_with_this_checkout,
)
"""What a person writes first, behind the HTTP server that Rayloom is behind."""
