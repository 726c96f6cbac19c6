"""Machines that Ray's autoscaler starts and ends: a floor that stays, and more of another kind above it."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import RayCluster, made_cluster
from tests.cluster.machines import Machine
from tests.cluster.training import Training
from tests.engine_contract import rows
from tests.helpers import ROOT, wait_until
from tests.load import Ask, load_of
from tests.node_provider import FolderNodeProvider, autoscaling, node_environment
from tests.tables import Faults
from tests.toy import body

pytestmark = pytest.mark.slow
EPOCHS = 20
"""So long that a machine starts meanwhile."""
IDLE_S = 10
"""How long a machine is idle before the autoscaler ends it."""
_PUBLISH = """
import os
from upath import UPath
from tests.engine_contract import exported
from tests.toy import publish
publish(UPath(os.environ["RAYLOOM_STORAGE"]), exported())
"""


class Cloud:
    """Starts and ends machines as the autoscaler wants them."""

    def __init__(self, cluster: RayCluster, wanted: Path) -> None:
        self._cluster, self._wanted, self._over = cluster, wanted, threading.Event()
        self._kinds: dict[str, tuple[str, Machine]] = {}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def kinds(self) -> list[str]:
        """The kinds of the machines that are there."""
        return sorted(kind for kind, _ in [*self._kinds.values()])

    def close(self) -> None:
        """End the thread, and with it all machines that it started."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.2):
            wanted = {file.name: file.read_text(encoding="utf-8").splitlines() for file in self._wanted.iterdir()}
            for address, lines in sorted(wanted.items()):
                if address not in self._kinds and lines:
                    kind, *options = lines
                    machine = self._cluster.join(options, **node_environment(address, kind))
                    assert machine.address == address
                    self._kinds[address] = kind, machine
            for address in self._kinds.keys() - wanted.keys():
                self._cluster.lose(self._kinds.pop(address)[1])


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A head without CPUs."""
    with made_cluster() as made:
        yield made


def kind(market: str, min_workers: int) -> dict[str, object]:
    """One machine at most, with a CPU."""
    return {
        "resources": {"CPU": 1},
        "labels": {"market": market},
        "node_config": {"options": ["--num-cpus=1", f"--labels=market={market}"]},
        "min_workers": min_workers,
        "max_workers": 1,
    }


@pytest.fixture(scope="module")
def cloud(cluster: RayCluster) -> Iterator[Cloud]:
    """What starts the machines of the cluster: one on demand that stays, and one on the spot market above it."""
    types = {"steady": kind("on-demand", 1), "spot": kind("spot", 0)}
    head = "10.99.0.1"
    scaling = autoscaling(FolderNodeProvider, types, IDLE_S, head=head, folder="/tmp/wanted")
    autoscaler = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_enable_autoscaler_v2": "1", "PYTHONPATH": str(ROOT)}
    cluster.start_head(scaling, before="mkdir /tmp/wanted", **autoscaler, **node_environment(head, "head"))
    started = Cloud(cluster, cluster.head.disk / "wanted")
    yield started
    started.close()


def test_a_training_grows_onto_a_machine_and_gives_it_back(
    cluster: RayCluster, cloud: Cloud, tmp_path: Path, faults: Faults
) -> None:
    with faults("N15", "a training of [1, 2] workers on a cluster of 1 to 2 machines", "1 worker, then 2") as fault:
        wait_until(lambda: cloud.kinds == ["steady"])
        training = Training(cluster, "growing", tmp_path, "train.workers=[1,2]", f"train.epochs={EPOCHS}")
        training.says("going on from step", 300)
        assert cloud.kinds == ["spot", "steady"]
        trained = training.trained()
        assert training.output.count("going on from step") == 1
        assert [each["step"] for each in trained.records if "loss" in each] == list(range(1, EPOCHS * 22 + 1))
        wait_until(lambda: cloud.kinds == ["steady"], timeout_s=120)
        fault.saw("2 after a saved state, all steps once; the machine ended after the training")


def test_replicas_get_machines_by_load_and_give_them_back(cluster: RayCluster, cloud: Cloud, faults: Faults) -> None:
    injected = "load on 1 of at most 2 replicas, each as large as a machine; then none"
    with faults("N14", injected, "a spot machine more, then only the steady one; none fails") as fault:
        wait_until(lambda: cloud.kinds == ["steady"])
        assert cluster.on_head("python", "-c", _PUBLISH).returncode == 0
        deployed = cluster.submit(
            *(
                "deploy",
                "recipes/reviews.yaml",
                "name=toy",
                "serve.version=1",
                "serve.replicas=[1,2]",
                "serve.cpus_per_replica=1",
            ),
            *("serve.labels={market: on-demand}", "serve.fallback_labels={market: spot}", "serve.threads=1"),
            *("serve.scaling={upscale_delay_s: 1, downscale_delay_s: 2, latency_target_ms: 0.05}",),
            "serve.host=0.0.0.0",
        )
        assert deployed["status"] == "succeeded"
        (steady,) = cluster.replicas()
        url = f"http://{cluster.head.address}:8000/v2/models/toy/infer"
        ask = Ask(url, json.dumps(body(rows(1))).encode(), cluster.endpoint_headers)
        with cluster.network.entered(), load_of(lambda: ask, 40) as sent:
            wait_until(lambda: len(cluster.replicas()) == 2, timeout_s=180)
            assert cloud.kinds == ["spot", "steady"]
        wait_until(lambda: cluster.replicas() == [steady], timeout_s=120)
        wait_until(lambda: cloud.kinds == ["steady"], timeout_s=120)
        fault.saw(f"so it was; {len(sent.failed)} of {len(sent.answers)} failed")
        assert not sent.failed
