"""Machines that are lost, announced or cut off under a training."""

import shlex
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.cluster.conftest import RayCluster
from tests.cluster.training import FIRST_EPOCH, Training
from tests.helpers import SGD, train_alone, write_sums
from tests.launch import Trained
from tests.tables import Faults

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("workers")]


def test_a_lost_machine_is_a_lost_worker(
    cluster: RayCluster, uninterrupted: Trained, tmp_path: Path, faults: Faults
) -> None:
    cluster.join()
    with faults("N1", "power of a training machine lost", "trains on in 120 s on another; the same bits") as fault:
        training = Training(cluster, "moving", tmp_path)
        training.says(FIRST_EPOCH)
        lost = training.machine()
        struck_s = time.monotonic()
        cluster.lose(lost)
        training.says("going on from step", 180)
        took_s = time.monotonic() - struck_s
        fault.saw(f"trains on after {took_s:.1f} s")
        assert training.trained() == uninterrupted
        assert took_s <= 120, "Ray notices the loss after 65 s"


def test_a_job_starts_although_ray_has_not_noticed_a_lost_machine(cluster: RayCluster, faults: Faults) -> None:
    with faults("N5", "a job submitted as a machine's power is lost", "runs on the other") as fault:
        cluster.lose(cluster.workers[-1])
        began_s = time.monotonic()
        one = ["recipes/digits.yaml", "name=soon", "train.workers=1", "train.epochs=1", "train.resources={worker: 1}"]
        result = cluster.submit("train", *one)
        fault.saw(f"ended after {time.monotonic() - began_s:.1f} s")
        assert result["status"] == "succeeded"


def test_a_notice_of_preemption_stops_a_run_that_resumes_elsewhere(
    cluster: RayCluster, uninterrupted: Trained, tmp_path: Path, faults: Faults
) -> None:
    with faults("N3", "notice that a training machine goes in 60 s", "stopped in 30 s; resumes: same bits") as fault:
        training = Training(cluster, "announced", tmp_path)
        training.says(FIRST_EPOCH)
        leaving = training.machine()
        announced_s = cluster.drain(leaving, within_s=60)
        training.says("stopped at step")
        fault.saw(f"state kept after {time.monotonic() - announced_s:.1f} s")
        assert training.ends() == 0, training.output
        took_s = time.monotonic() - announced_s
        fault.saw(f"ended after {took_s:.1f} s")
        cluster.lose(leaving)
        cluster.join()
        assert Training(cluster, "announced", tmp_path).trained() == uninterrupted
        assert took_s <= 30


def test_a_training_outlives_a_network_that_is_cut_for_20_s(
    cluster: RayCluster, uninterrupted: Trained, tmp_path: Path, faults: Faults
) -> None:
    with faults("N4", "a training machine unreachable for 20 s", "trains on in 120 s; the same bits") as fault:
        training = Training(cluster, "split", tmp_path)
        training.says(FIRST_EPOCH)
        cut = training.machine()
        cut.unplug()
        time.sleep(20)
        cut.plug()
        struck_s = time.monotonic()
        trained = training.trained()
        fault.saw(f"ended {time.monotonic() - struck_s:.1f} s after the network was back")
        assert trained == uninterrupted


def test_a_slow_network_changes_no_bit(
    cluster: RayCluster, uninterrupted: Trained, tmp_path: Path, faults: Faults
) -> None:
    with faults("N9", "20 Mbit/s between all machines", "the same bits") as fault:
        for machine in cluster.workers:
            machine.limit("20mbit")
        try:
            began_s = time.monotonic()
            trained = Training(cluster, "slow", tmp_path).trained()
            fault.saw(f"ended after {time.monotonic() - began_s:.1f} s")
        finally:
            for machine in cluster.workers:
                machine.unlimit()
        assert trained == uninterrupted


def test_a_distant_machine_changes_no_bit(
    cluster: RayCluster, uninterrupted: Trained, tmp_path: Path, faults: Faults
) -> None:
    with faults("N13", "20 ms in each direction between a training machine and all others", "the same bits") as fault:
        cluster.lose(cluster.workers[-1])
        distant = cluster.join(delay_s=0.02)
        began_s = time.monotonic()
        assert Training(cluster, "distant", tmp_path).trained() == uninterrupted
        fault.saw(f"ended after {time.monotonic() - began_s:.1f} s")
        cluster.lose(distant)


def test_a_pipeline_crosses_machines_and_a_split_matrix_does_not(
    cluster: RayCluster, tmp_path: Path, faults: Faults
) -> None:
    keys = ["data.block_length=32", "data.tokenizer={kind: bytes}", "train.precision=fp32", *SGD]
    keys.append("model.args={layers: 2, width: 32, heads: 2}")
    corpus = write_sums(tmp_path / "sums")
    with faults("N16", "pipeline 2 x tensor 2 on 2 machines", "the loss of one process within 1e-4") as fault:
        alone = train_alone(f"data.source={corpus}", *keys, f"storage={tmp_path}", recipe="recipes/stdlib_gpt.yaml")
        source, split = cluster.upload(corpus, "sums"), ["train.workers=4", "train.plan={pipeline: 2, tensor: 2}"]
        result = cluster.submit("train", "recipes/stdlib_gpt.yaml", f"data.source={source}", *keys, *split)
        actors = cluster.listed("actors", "class_name=RayTrainWorker")
        last = max(actor["job_id"] for actor in actors)
        nodes = Counter(actor["node_id"] for actor in actors if actor["job_id"] == last)
        fault.saw(f"{result['val_loss']} with {[*nodes.values()]} workers, {alone['metrics']['val_loss']:.5f} alone")
        assert [*nodes.values()] == [2, 2]
        assert result["val_loss"] == pytest.approx(alone["metrics"]["val_loss"], abs=1e-4)


AHEAD = """
import sys, time
with open("/tmp/ahead/started", "a") as started:
    print(*sys.orig_argv, file=started)
now, now_ns = time.time, time.time_ns
time.time = lambda: now() + 30
time.time_ns = lambda: now_ns() + 30 * 10**9
"""
"""What Python runs at its start. A namespace has no clock of its own, and libfaketime makes time.sleep fail."""


def test_clocks_may_differ(cluster: RayCluster, uninterrupted: Trained, tmp_path: Path, faults: Faults) -> None:
    with faults("N11", "Python's clock 30 s ahead on a training machine", "the same bits") as fault:
        cluster.lose(cluster.workers[-1])
        write = f"mkdir /tmp/ahead && echo {shlex.quote(AHEAD)} > /tmp/ahead/sitecustomize.py"
        ahead = cluster.join(before=write, PYTHONPATH="/tmp/ahead")
        began_s = time.monotonic()
        assert Training(cluster, "ahead", tmp_path).trained() == uninterrupted
        assert "default_worker.py" in (ahead.disk / "ahead/started").read_text(encoding="utf-8")
        fault.saw(f"ended after {time.monotonic() - began_s:.1f} s")
        cluster.lose(ahead)
