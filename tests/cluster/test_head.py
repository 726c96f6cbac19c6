"""The head of a cluster that keeps its state in memory, which is lost."""

import time
from pathlib import Path

import pytest

from tests.cluster.conftest import DIGITS, RayCluster
from tests.cluster.test_serving_machines import asked
from tests.cluster.test_whole_way import ask
from tests.cluster.training import FIRST_EPOCH, Training
from tests.launch import Trained
from tests.tables import Faults

pytestmark = pytest.mark.slow
ALONE_S = 20


def test_a_new_cluster_goes_on_where_one_ended_whose_head_is_lost(
    cluster: RayCluster, url: str, uninterrupted: Trained, tmp_path: Path, faults: Faults
) -> None:
    expected = f"answers for {ALONE_S} s; a new cluster resumes with the same bits, and deploys again"
    with faults("N12", "power of the head lost, and of all machines later", expected) as fault:
        before = ask(cluster, cluster.workers[0].address).json()["outputs"]
        training = Training(cluster, "orphaned", tmp_path)
        training.says(FIRST_EPOCH)
        with asked(cluster, url, 50, fault):
            cluster.head.lose()
            time.sleep(ALONE_S)
        for machine in [*cluster.workers]:
            cluster.lose(machine)
        began_s = time.monotonic()
        cluster.start()
        assert Training(cluster, "orphaned", tmp_path).trained() == uninterrupted
        fault.saw(f"trained to its end {time.monotonic() - began_s:.1f} s after the start")
        cluster.submit("deploy", *DIGITS)
        assert [ask(cluster, machine.address).json()["outputs"] for machine in cluster.workers] == [before] * 2
