"""Nodes that join a cluster and are lost, under a run."""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.ledger import expected, written_in
from tests.helpers import run, steps_of, wait_until
from tests.launch import EVERY_STEPS, INTERRUPTED, Cluster, Job, Launch, Trained, newest_step
from tests.tables import Faults


class Node:
    """Another node of a cluster, on the same machine.

    It has its own folder. Raylets that shared a folder would remove each other's unpacked job files.
    """

    def __init__(self, cluster: Cluster, cpus: int, *options: str) -> None:
        before = raylets(cluster)
        folder = tempfile.mkdtemp(prefix="node-", dir=cluster.state.runtime)
        ports = ("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0")
        joined = run(
            *("ray", "start", f"--address=127.0.0.1:{cluster.state.gcs_port}", f"--num-cpus={cpus}"),
            *(f"--temp-dir={folder}", *ports, *options),
            environment=min(before, key=lambda process: process.create_time()).environ(),
        )
        assert joined.returncode == 0, joined.stdout + joined.stderr
        joined_raylets = raylets(cluster) - before
        self.raylet = min(
            joined_raylets, key=lambda process: process.create_time()
        )  # its forks bear its name for a moment

    @property
    def id(self) -> str:
        """As Ray names it."""
        return next(word.removeprefix("--node_id=") for word in self.raylet.cmdline() if word.startswith("--node_id="))

    def announce_its_end(self, cluster: Cluster, within_s: int) -> None:
        """What a cloud's notice becomes in Ray: the node is drained, and goes within a time."""
        drained = run(
            *("ray", "drain-node", f"--address=127.0.0.1:{cluster.state.gcs_port}", f"--node-id={self.id}"),
            *("--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=taken back"),
            f"--deadline-remaining-seconds={within_s}",
            environment=cluster.environment,
        )
        assert drained.returncode == 0, drained.stdout + drained.stderr

    def holds(self, pid: int) -> bool:
        """Whether a process is a worker of this node."""
        return pid in [process.pid for process in self.raylet.children(recursive=True)]


def raylets(cluster: Cluster) -> set[psutil.Process]:
    return {process for process in cluster.processes("raylet", "--raylet_socket_name") if process.name() == "raylet"}


@pytest.fixture
def cpus(ray: Cluster) -> int:
    """Of the head: a worker that takes them all has a node to itself."""
    wait_until(lambda: ray.cpus()[1] > 0)
    return int(ray.cpus()[1])


@pytest.fixture
def join(ray: Cluster, cpus: int) -> Iterator[Callable[[], Node]]:
    nodes: list[Node] = []

    def start() -> Node:
        nodes.append(Node(ray, cpus))
        wait_until(lambda: ray.cpus()[1] == cpus * (1 + sum(node.raylet.is_running() for node in nodes)))
        return nodes[-1]

    yield start
    for node in nodes:
        if node.raylet.is_running():
            node.raylet.kill()
    wait_until(lambda: ray.cpus() == (0, cpus))


def test_a_lost_node_is_a_lost_worker(
    ray: Cluster,
    cpus: int,
    join: Callable[[], Node],
    launch: Launch,
    tmp_path: Path,
    uninterrupted: Trained,
    faults: Faults,
) -> None:
    storage = Path(ray.environment["RAYLOOM_STORAGE"])
    ranks = [tmp_path / "0", tmp_path / "1"]
    with faults("T3", "Ray: SIGKILL of a second node's raylet", "trains on in 60 s on a third; the same bits") as fault:
        nodes = [join(), join()]
        job = Job(ray, launch, "moving", *INTERRUPTED, f"train.cpus_per_worker={cpus}", f"model.args.ranks={tmp_path}")
        wait_until(lambda: newest_step(storage, "moving") > EVERY_STEPS or job.has_ended, timeout_s=300)
        pids = [int(file.read_text(encoding="utf-8")) for file in ranks]
        lost = next(node for node in nodes if any(node.holds(pid) for pid in pids))
        struck = time.time()
        lost.raylet.kill()
        wait_until(lambda: min(file.stat().st_mtime for file in ranks) > struck, timeout_s=60)
        fault.saw(f"trains on after {max(file.stat().st_mtime for file in ranks) - struck:.1f} s")
        assert Trained.of(job.client.result()) == uninterrupted
        wait_until(ray.is_idle)


def test_a_node_that_is_about_to_go_stops_the_run_in_time(
    ray: Cluster,
    cpus: int,
    join: Callable[[], Node],
    launch: Launch,
    uninterrupted: Trained,
    faults: Faults,
) -> None:
    storage = Path(ray.environment["RAYLOOM_STORAGE"])
    with faults("stop", "Ray: notice that a node goes in 60 s", "stopped in 30 s; resumes with the same bits") as fault:
        node = join()
        announced = [*INTERRUPTED, f"train.cpus_per_worker={cpus}"]
        job = Job(ray, launch, "announced", *announced)
        wait_until(lambda: newest_step(storage, "announced") > EVERY_STEPS or job.has_ended, timeout_s=300)
        struck = time.time()
        node.announce_its_end(ray, within_s=60)
        stopped = job.client.result()
        fault.saw(f"stopped after {time.time() - struck:.1f} s")
        assert (job.client.ends(), stopped["status"]) == (1, "stopped"), job.output
        assert stopped["metrics"]["steps"] == newest_step(storage, "announced")
        assert time.time() - struck < 30
        wait_until(lambda: not node.raylet.is_running(), timeout_s=90)
        join()
        resumed = Job(ray, launch, "announced", *announced).client.result()
        assert Trained.of(resumed) == uninterrupted
        wait_until(ray.is_idle)


def test_a_run_shrinks_and_grows_with_the_cluster(
    ray: Cluster, cpus: int, join: Callable[[], Node], launch: Launch, tmp_path: Path, faults: Faults
) -> None:
    storage, ledger, epochs = Path(ray.environment["RAYLOOM_STORAGE"]), tmp_path / "ledger", 6
    ledger.mkdir()
    with faults("T12", "Ray: workers [1, 2], a node lost, one joins", "1, then 2; no sample left out") as fault:
        node = join()
        elastic = ["train.workers=[1, 2]", f"train.epochs={epochs}", "model.factory=tests.faults.models:LedgerCnn"]
        args = [f"model.args.folder={ledger}", "model.args.pause_s=0.3", f"train.cpus_per_worker={cpus}"]
        job = Job(ray, launch, "elastic", *INTERRUPTED, *elastic, *args)
        wait_until(lambda: newest_step(storage, "elastic") > EVERY_STEPS or job.has_ended, timeout_s=300)
        assert len(list(ledger.iterdir())) == 2
        struck = time.time()
        node.raylet.kill()
        job.client.says("going on from step", 90)
        shrunk_s = time.time() - struck
        join()
        job.client.says("going on from step", 90, times=2)
        result = job.client.result()
        (folder,) = storage.glob("runs/train/*-elastic-*")
        seen, wanted = written_in(ledger), expected(epochs)
        again = seen - wanted
        fault.saw(f"on with 1 after {shrunk_s:.1f} s; {again.total()} samples done again")
        assert (result["status"], result["metrics"]["workers"]) == ("succeeded", 2)
        assert len(list(ledger.iterdir())) == 2 + 1 + 2
        steps = [record["step"] for record in steps_of(folder)]
        assert steps == list(range(1, epochs * 22 + 1))
        assert not wanted - seen
        assert again.total() <= 2 * 2 * EVERY_STEPS * 64
        wait_until(ray.is_idle)
