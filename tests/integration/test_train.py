"""Training under Ray Train and under torchrun: the same, whoever runs it."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from upath import UPath

from app.cluster.state import ClusterState
from app.training.weights import load_weights
from tests.helpers import BIN, ROOT, SGD, losses, result_of, run, train_alone


@pytest.fixture(scope="module")
def one(home: Path) -> list[float]:
    """The losses of one process."""
    return losses(train_alone(*SGD, f"storage={home / 'storage'}"))


def test_one_and_two_workers_and_ray_draw_the_same_curve(cluster: dict[str, str], one: list[float]) -> None:
    two = losses(train_alone(*SGD, processes=2))
    submitted = run("rayloom", "submit", "train", "recipes/digits.yaml", *SGD, environment=cluster)
    ray = losses(result_of(submitted.stdout))
    assert len(one) == 20
    assert one[-1] < 0.9 * one[0]
    assert two == pytest.approx(one, abs=1e-4)
    assert ray == pytest.approx(one, abs=1e-4)


def test_the_best_weights_are_kept_and_checked() -> None:
    result = train_alone("train.epochs=3", "train.early_stopping.patience=1")
    trained = load_weights(UPath(result["artifacts"]["weights"]))
    assert trained.labels == [str(digit) for digit in range(10)]
    assert result["metrics"]["val_accuracy"] > 0.5
    folder = Path(result["artifacts"]["weights"])
    changed = bytearray((folder / "model.safetensors").read_bytes())
    changed[-1] ^= 1
    (folder / "model.safetensors").write_bytes(changed)
    with pytest.raises(Exception, match=r"model\.safetensors.* was changed"):
        load_weights(UPath(folder))


def test_a_killed_worker_is_replaced_and_goes_on_from_the_last_checkpoint(cluster: dict[str, str]) -> None:
    overrides = ["train.epochs=8", "train.early_stopping=null", "name=killed"]
    command = [str(BIN / "rayloom"), "submit", "train", "recipes/digits.yaml", *overrides]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **cluster}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        victim = _wait_for_worker(cluster)
        os.kill(victim, signal.SIGKILL)
        output = job.communicate(timeout=180)[0]
    result = result_of(output)
    assert result["status"] == "succeeded", output
    assert result["metrics"]["resumed_from_step"] >= 22
    assert result["metrics"]["epochs"] == 8
    assert result["metrics"]["val_accuracy"] > 0.95


def _wait_for_worker(cluster: dict[str, str]) -> int:
    """The pid of a training worker whose run has stored a checkpoint."""
    state = json.loads((Path(cluster["RAYLOOM_HOME"]) / "cluster/cluster.json").read_text(encoding="utf-8"))
    stored = "runs/train/*-killed-*/checkpoints/step_*/SHA256SUMS"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if list(Path(cluster["RAYLOOM_STORAGE"]).glob(stored)):
            for process in ClusterState(**state).processes():
                with contextlib.suppress(psutil.NoSuchProcess):  # it ended while we looked
                    if "RayTrainWorker" in " ".join(process.cmdline()):
                        return process.pid
        time.sleep(0.2)
    pytest.fail("no training worker with a checkpoint appeared")
