"""The cost of Rayloom's own parts on clusters of many nodes, which are simulated: each has one rank and one replica."""

import json
import pickle
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from ray.serve._private.common import RequestProtocol
from ray.serve.schema import ServeInstanceDetails
from ray.util.state.common import ActorState, NodeState
from torch import Tensor, distributed
from upath import UPath

from app.checksums import CHECKSUMS_FILE, VerifiedFolder, write_checksums
from app.cluster.jobs import JobsApi
from app.monitoring.exporter import ClusterWatch
from app.serving.demand import Demand, Scaling
from app.serving.pool_configs import PoolConfigs
from app.serving.pools import APPLICATION, SHARED
from app.storage import open_storage
from app.torch_internals import default_store
from app.training.checkpoints.store import Checkpoint, CheckpointStore
from app.training.coordination.sync import LocalStep, StepSync
from app.training.coordination.watchdog import Watchdog
from app.training.coordination.watchdog import _key as key_of
from app.training.engine import StepResult
from app.training.engine.deepspeed_engine import Factors
from app.training.stop_request import StopRequest
from app.training.worker import Worker
from benchmarks.many.measures import counted
from benchmarks.markdown import table
from jobs._cluster import require
from jobs._endpoint import require_room

COUNTS = (10, 100, 1000)
_CONSTANT = 1.2
"""Largest growth of the cost per node, from the fewest to the most nodes, that counts as constant."""
_REPEATS = 5
_SHA256 = "0" * 64
_GIB = 2**30


@dataclass(frozen=True)
class NodeCost:
    """What one call costs."""

    seconds: float
    bytes: int | None = None
    requests: int = 0
    """To the object store."""

    def __str__(self) -> str:
        parts = [f"{self.seconds * 1e3:,.1f} ms" if self.seconds >= 1e-3 else f"{self.seconds * 1e6:.0f} µs"]
        if self.bytes is not None:
            parts.append(f"{self.bytes / 1e3:,.1f} kB")
        return ", ".join([*parts, *([f"{self.requests} requests"] if self.requests else [])])


@dataclass(frozen=True)
class Part:
    """Something that Rayloom does on a cluster."""

    what: str
    when: str
    is_shared: bool
    """Whether one process does it for all nodes, so that its cost may grow as they do."""
    measure: Callable[[int], NodeCost]
    """Returns the cost on this number of nodes."""
    note: str = ""
    """Why it grows, or what was done about it."""

    def row(self) -> list[str]:
        """Measure the part, and return its row of the table."""
        costs = [self.measure(count) for count in COUNTS]
        growth = self._of_a_node(costs[-1], COUNTS[-1]) / self._of_a_node(costs[0], COUNTS[0])
        verdict = "constant" if growth <= _CONSTANT else "**grows**"
        where = "one for all" if self.is_shared else "each node"
        return [
            self.what,
            self.when,
            where,
            *map(str, costs),
            f"x {growth:.{1 if growth < 10 else 0}f}, {verdict}",
            self.note,
        ]

    def _of_a_node(self, cost: NodeCost, count: int) -> float:
        own = cost.seconds if cost.bytes is None else cost.bytes
        return own / count if self.is_shared else own


def nodes_table() -> str:
    """Measure all parts, and return their table."""
    header = [
        "",
        "when",
        "where",
        *(f"{count:,} nodes" for count in COUNTS),
        f"per node: {COUNTS[-1]:,} / {COUNTS[0]}",
        "",
    ]
    return table(header, [part.row() for part in PARTS])


def _median_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def _ids(kind: str, count: int) -> list[str]:
    return [f"{kind}{number:0{56 - len(kind)}x}" for number in range(count)]


# The watch of the cluster


def _watch(count: int) -> NodeCost:
    """Ask a server that answers as Ray's dashboard does."""
    nodes = [
        NodeState(
            node_id=name, node_ip="10.0.0.1", is_head_node=False, state="ALIVE", state_message="", node_name="10.0.0.1",
            resources_total={"CPU": 16.0, "memory": 6.4e10, "object_store_memory": 2e10, "node:10.0.0.1": 1.0},
            labels={"ray.io/node-id": name}, start_time_ms=1, end_time_ms=0,
        )
        for name in _ids("a", count)
    ]  # fmt: skip
    dead = [
        ActorState(
            actor_id=name, class_name="ServeReplica:rayloom:ModelServer", state="DEAD", job_id="01000000", name=name,
            node_id=name, pid=1, ray_namespace="serve", serialized_runtime_env="{}", required_resources={"CPU": 1.0},
            death_cause={"actor_died_error_context": {"error_message": "x" * 300, "reason": "WORKER_DIED"}},
            is_detached=True, placement_group_id=None, repr_name="", num_restarts=0,
            num_restarts_due_to_lineage_reconstruction=0, num_restarts_due_to_node_preemption=0, call_site=None,
        )
        for name in _ids("b", count)
    ]  # fmt: skip
    answers = {"nodes": _listed(nodes), "actors": _listed(dead), "jobs": b"[]"}
    with _dashboard(answers) as address:
        watch = ClusterWatch(JobsApi(address, "", ""))
        seconds = _median_s(watch.look)
    return NodeCost(seconds, sum(map(len, answers.values())))


def _listed(entries: Sequence[Any]) -> bytes:
    return json.dumps({"data": {"result": {"result": [asdict(entry) for entry in entries]}}}).encode()


@contextmanager
def _dashboard(answers: dict[str, bytes]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0].strip("/").rpartition("/")[2]
            self.send_response(200)
            self.send_header("content-length", str(len(answers[path])))
            self.end_headers()
            self.wfile.write(answers[path])

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


# Deploys


def _nodes(count: int) -> list[dict[str, Any]]:
    resources = {"CPU": 16.0, "memory": 64.0 * _GIB}
    return [{"Alive": True, "NodeID": name, "Resources": resources, "Labels": {}} for name in _ids("a", count)]


def _room(count: int) -> NodeCost:
    """Check that a replica with a language model fits on each node."""
    nodes = _nodes(count)
    demand = Demand(scaling=Scaling(min_replicas=count, max_replicas=count, cpus=1.0), memory_bytes=8 * _GIB)
    with patch("ray.nodes", lambda: nodes):
        return NodeCost(_median_s(lambda: require_room(PoolConfigs(), SHARED, demand)))


def _resources(count: int) -> NodeCost:
    nodes = _nodes(count)
    with patch("ray.nodes", lambda: nodes):
        return NodeCost(_median_s(lambda: require({"CPU": float(count)}, "train.workers")))


def _serve_status(count: int) -> NodeCost:
    """Parse the details that Serve's controller returns, with a replica and a proxy on each node."""
    actor = {"node_ip": "10.0.0.1", "node_instance_id": "i-0", "actor_name": "a" * 40, "worker_id": "c" * 56}
    replicas, proxies = (
        [
            actor | {"node_id": name, "actor_id": name[:32], "log_file_path": "/serve/" + "l" * 80}
            for name in _ids(kind, count)
        ]
        for kind in ("b", "a")
    )
    deployment = {
        "name": "ModelServer",
        "status": "HEALTHY",
        "status_trigger": "CONFIG_UPDATE_COMPLETED",
        "message": "",
        "deployment_config": {"name": "ModelServer", "num_replicas": count},
        "target_num_replicas": count,
        "required_resources": {"CPU": 1},
        "replicas": [
            replica | {"replica_id": f"r{number}", "state": "RUNNING", "pid": 1, "start_time_s": 1.0}
            for number, replica in enumerate(replicas)
        ],
    }
    application = {
        "name": APPLICATION,
        "route_prefix": "/",
        "docs_path": None,
        "status": "RUNNING",
        "message": "",
        "last_deployed_time_s": 1.0,
        "deployed_app_config": None,
        "source": "imperative",
        "deployments": {"ModelServer": deployment},
        "external_scaler_enabled": False,
        "deployment_topology": None,
    }
    details: dict[str, Any] = {
        "controller_info": actor | {"node_id": "a", "actor_id": "a", "log_file_path": "l"},
        "proxy_location": "EveryNode",
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "grpc_options": {"port": 8001},
        "proxies": {proxy["node_id"]: proxy | {"status": "HEALTHY"} for proxy in proxies},
        "applications": {APPLICATION: application},
        "target_capacity": None,
        "target_groups": [],
    }
    return NodeCost(_median_s(lambda: ServeInstanceDetails(**details)._get_status()), len(pickle.dumps(details)))


def _haproxy(count: int) -> NodeCost:
    """Edit the configuration that Ray writes when replicas change, and have HAProxy read it."""
    from tests.ingress import Ingress, backend

    hosts = [f"10.0.{number // 250}.{number % 250 + 1}" for number in range(count)]
    backends = [
        backend(protocol, APPLICATION, 1, port, hosts)
        for protocol, port in ((RequestProtocol.HTTP, 30000), (RequestProtocol.GRPC, 31000))
    ]
    with tempfile.TemporaryDirectory(prefix="rlh-", dir="/tmp") as folder:
        ingress = Ingress(Path(folder))
        size = len(ingress.start(*backends).encode())
        return NodeCost(_median_s(partial(ingress.run, *backends)), size)


# Training


@contextmanager
def _watched(count: int) -> Iterator[tuple[Watchdog, int]]:
    """Yield the watchdog of rank 0 beside the beats of all others in a real store, and the bytes of one."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    watchdog = Watchdog(Worker(0, count, torch.device("cpu")), 3600.0, print)
    try:
        others = default_store()
        watchdog._send_beat()
        beat = others.get(key_of(0))
        for rank in range(1, count):
            others.set(key_of(rank), json.dumps(json.loads(beat) | {"rank": rank}))
        yield watchdog, len(beat)
    finally:
        watchdog.close()
        distributed.destroy_process_group()


def _beat(count: int) -> NodeCost:
    with _watched(count) as (watchdog, size):
        return NodeCost(_median_s(watchdog._send_beat), size)


def _blame(count: int) -> NodeCost:
    """Read the beats of all ranks, as before a hanging run is ended."""
    with _watched(count) as (watchdog, size):
        return NodeCost(_median_s(watchdog._query_store), size * count)


@dataclass(frozen=True)
class _LoneWorker(Worker):
    """A worker whose sums are its own values. It notes what it would send around a ring."""

    sent: list[int] = field(default_factory=list)

    def all_reduce(self, values: Tensor) -> Tensor:
        self.sent.append(round(values.nbytes * 2 * (self.size - 1) / self.size))
        return values


def _sync(count: int) -> NodeCost:
    """Exchange 20 steps."""
    result = StepResult(torch.tensor(1.0), Factors(1e-3, None), 1.0, is_applied=True)
    step = LocalStep(0, result, busy_s=0.1, data_s=0.0, seconds=0.1, mfu=None, samples=1)
    worker = _LoneWorker(0, count, torch.device("cpu"))
    sync = StepSync(worker, [lambda: StopRequest.NONE], lambda: False)

    def work() -> None:
        sync.steps = [step] * 20
        sync.run()

    seconds = _median_s(work)
    return NodeCost(seconds, worker.sent[-1])


# Checkpoints, with a file and its checksums from each rank


@cache
def _checkpoint(count: int) -> tuple[CheckpointStore, Checkpoint, dict[str, str]]:
    """Write a checkpoint of this number of ranks to S3. Return it with the checksums of its files."""
    store = CheckpointStore(open_storage(f"s3://many/nodes-{count}") / "checkpoints")
    names = [name for rank in range(count) for name in (f"__{rank}_0.distcp", f"__{rank}_0.distcp.sums")]
    folder = store.folder_of(Checkpoint(1))
    folder.fs.pipe({(folder / name).path: b"0" for name in names})
    return store, Checkpoint(1), dict.fromkeys(names, _SHA256)


def _commit(count: int) -> NodeCost:
    store, checkpoint, sums = _checkpoint(count)
    folder = store.folder_of(checkpoint)
    return _on_s3(lambda: write_checksums(folder, sums), _sums_bytes(folder))


def _sums_bytes(folder: UPath) -> Callable[[], int]:
    return lambda: len((folder / CHECKSUMS_FILE).read_bytes())


def _on_s3(work: Callable[[], object], size: Callable[[], int] | None = None) -> NodeCost:
    with counted() as requests:
        work()
        number = len(requests)
    return NodeCost(_median_s(work), size() if size else None, number)


def _restore(count: int) -> NodeCost:
    """Read the checksums, as each rank does before it reads its part."""
    store, checkpoint, sums = _checkpoint(count)
    folder = store.folder_of(checkpoint)
    write_checksums(folder, sums)
    return _on_s3(lambda: VerifiedFolder(folder), _sums_bytes(folder))


def _gathered(count: int) -> NodeCost:
    """Unpickle the checksums of all ranks' files, which the first rank receives and writes."""
    own = pickle.dumps({f"__{count}_0.distcp": _SHA256, f"__{count}_0.distcp.sums": _SHA256})
    return NodeCost(_median_s(lambda: [pickle.loads(own) for _ in range(count)]), len(own) * count)  # noqa: S301


def _remove(count: int) -> NodeCost:
    """Remove a checkpoint that a newer one replaces."""
    store, checkpoint, _ = _checkpoint(count)
    with counted() as requests:
        began_s = time.perf_counter()
        store.remove(checkpoint)
        cost = NodeCost(time.perf_counter() - began_s, None, len(requests))
    _checkpoint.cache_clear()
    return cost


PARTS = (
    Part("cluster watch for Prometheus: nodes, dead actors, jobs", "every 3 s", True, _watch),
    Part("train: check the resources for the workers", "a job", True, _resources),
    Part(
        "deploy: check the memory for the replicas", "a deploy", True, _room,
        "took 206 ms for 1,000 nodes when each replica scanned all nodes; a heap now finds the node with the most room",
    ),
    Part(
        "deploy: check whether each replica is ready", "10 times a second", True, _serve_status,
        "Serve lists all its actors; each poll now waits at least ten times as long as the last one took",
    ),
    Part(
        "list of models with those of other pools: check which pools run", "a second at most", False, _serve_status,
        "the same answer from Serve, in each replica that gets a list request; inference does not wait for it",
    ),
    Part(
        "HAProxy: edit and read its configuration", "a change of replicas", False, _haproxy,
        "Ray Serve starts one HAProxy per node, and each checks all replicas",
    ),
    Part("watchdog: send a heartbeat", "1 s", False, _beat),
    Part(
        "watchdog: read all heartbeats", "a hang", False, _blame,
        "two calls to the store by all ranks at once; two calls per rank took 30 ms",
    ),
    Part(
        "sync of the workers: losses, requests, stragglers", "1 s", False, _sync,
        "the straggler is found with 8 bytes per rank; the gradients of one second are many times larger",
    ),
    Part(
        "checkpoint: gather checksums", "a checkpoint", True, _gathered,
        "all ranks used to receive them; now only the first rank does, and writes them",
    ),
    Part("checkpoint: commit on S3", "a checkpoint", True, _commit),
    Part(
        "checkpoint: read checksums on S3", "a start", False, _restore,
        "each rank reads the single file that lists all checksums",
    ),
    Part("checkpoint: remove on S3", "a checkpoint", True, _remove),
)  # fmt: skip
