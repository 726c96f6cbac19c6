"""The endpoint takes room from training while it is busy, and training comes back."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from upath import UPath

from tests.engine_contract import exported, rows
from tests.faults.ledger import expected, written_in
from tests.helpers import local_cluster, steps_of, submit, wait_until
from tests.launch import INTERRUPTED, Cluster, Job, Launch, Trained
from tests.load import load
from tests.tables import Tables
from tests.toy import body, publish

pytestmark = pytest.mark.slow

RATE, EPOCHS = 20, 10
NO_CHECKPOINTS = "train.checkpoint.every_steps=100000"
"""Checkpoints are saved only at the end of an epoch, and on request."""


class Shared:
    """Three CPUs for two replicas of one CPU each, and for training."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.ray = Cluster(environment)
        (version,) = publish(UPath(environment["RAYLOOM_STORAGE"]), exported())
        ranged = [
            "serve.replicas=[1, 2]",
            "serve.scaling={latency_target_ms: 0.01, upscale_delay_s: 1, downscale_delay_s: 2}",
        ]
        recipe = ["recipes/reviews.yaml", "name=toy", f"serve.version={version}", "serve.threads=1", *ranged]
        first = ["serve.above_training=true", "serve.cpus_per_replica=1"]
        self._url = submit(environment, "deploy", *recipe, *first)["artifacts"]["http"]

    def replicas(self, known: str = "replica_id") -> int:
        """The number of replicas that have this key in Serve's details: ``node_id`` once they have a node."""
        token = Path(self.ray.environment["RAY_AUTH_TOKEN_PATH"]).read_text(encoding="utf-8").strip()
        url = f"{self.ray.environment['RAY_API_SERVER_ADDRESS']}/api/serve/applications/"
        answer = httpx.get(url, headers={"Authorization": f"Bearer {token}"}, timeout=30).json()
        replicas = answer["applications"]["rayloom"]["deployments"]["ModelServer"]["replicas"]
        return sum(bool(replica.get(known)) for replica in replicas)

    @contextmanager
    def burst(self) -> Iterator[None]:
        """Send requests in the block. With one replica, all of them miss the target of latency."""
        with load(f"{self._url}/v2/models/toy/infer", body(rows(1)), RATE) as sent:
            yield
        assert not sent.failed


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    home = Path(tempfile.mkdtemp(prefix="rayloom-test-"))
    try:
        with local_cluster(home, "--num-cpus=3") as environment:
            yield Shared(environment)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def seconds_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> float:
    began_s = time.monotonic()
    wait_until(condition, timeout_s)
    return time.monotonic() - began_s


def test_an_elastic_training_shrinks_and_grows_back(
    shared: Shared, launch: Launch, tmp_path: Path, tables: Tables
) -> None:
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    elastic = ["train.workers=[1, 2]", f"train.epochs={EPOCHS}", "model.factory=tests.faults.models:LedgerCnn"]
    job = Job(
        *(shared.ray, launch, "elastic", *INTERRUPTED, *elastic, NO_CHECKPOINTS),
        *(f"model.args.folder={ledger}", "model.args.pause_s=0.3"),
    )

    def has_trained(processes: int) -> bool:
        return job.has_ended or len(list(ledger.iterdir())) == processes

    wait_until(lambda: has_trained(2), timeout_s=120)
    time.sleep(5)
    with shared.burst():
        wait_until(lambda: shared.replicas() == 2)
        placed_s = seconds_until(lambda: shared.replicas("node_id") == 2)
        on_s = placed_s + seconds_until(lambda: has_trained(3))
        time.sleep(5)
    fewer_s = seconds_until(lambda: shared.replicas() == 1)
    grown_s = seconds_until(lambda: has_trained(5))
    result = job.client.result()
    (folder,) = Path(shared.ray.environment["RAYLOOM_STORAGE"]).glob("runs/train/*-elastic-*")
    steps, seen = [record["step"] for record in steps_of(folder)], written_in(ledger)
    wanted = expected(EPOCHS)
    row = [f"{seconds:.1f} s" for seconds in (placed_s, on_s, fewer_s, grown_s)]
    head = ["replica placed", "training goes on", "replica gone after the load", "grown back", "again", "left out"]
    tables.add("priority", head, [[*row, str((seen - wanted).total()), str((wanted - seen).total())]])
    assert (result["status"], result["metrics"]["workers"]) == ("succeeded", 2), job.output
    assert steps == list(range(1, EPOCHS * 22 + 1))
    assert seen == wanted
    assert placed_s <= 15
    assert on_s <= 30
    assert grown_s <= 30


def test_a_training_of_fixed_size_pauses_and_goes_on(
    shared: Shared, launch: Launch, uninterrupted: Trained, tables: Tables
) -> None:
    slower = ["model.args.pause_s=0.3", NO_CHECKPOINTS]
    job = Job(shared.ray, launch, "fixed", *INTERRUPTED, *slower)
    job.client.says("epoch 1")
    with shared.burst():
        wait_until(lambda: shared.replicas() == 2)
        placed_s = seconds_until(lambda: shared.replicas("node_id") == 2)
        job.client.says("saved at step")
        time.sleep(10)
        assert not shared.ray.processes("RayTrainWorker")
    wait_until(lambda: shared.replicas() == 1)
    back_s = seconds_until(lambda: "going on from step" in job.output or job.has_ended)
    tables.add("priority, fixed", ["replica placed", "goes on"], [[f"{placed_s:.1f} s", f"{back_s:.1f} s"]])
    assert Trained.of(job.client.result()) == uninterrupted
    assert placed_s <= 15
