"""The optimizer's state and the parameters on a disk.

Among the long tests because DeepSpeed compiles for minutes at the first use.
"""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.helpers import latest, wait_until
from tests.launch import Launch, Launched, Trained, newest_step
from tests.tables import Faults

RUN = ["train.workers=2", "train.max_steps=16", "train.early_stopping=null", "train.resume=latest",
       "train.checkpoint.every_steps=4", "train.plan.zero_stage=3",
       "model.factory=tests.faults.models:WideMlp", "model.args.pause_s=0"]  # fmt: skip
SLOWLY = "model.args.pause_s=0.3"
pytestmark = pytest.mark.debian("libaio-dev")  # DeepSpeed compiles against this package


def train(launch: Launch, storage: Path, *overrides: str) -> Launched:
    keys = latest([*RUN, f"storage={storage}", *overrides])
    return launch.torchrun("-m", "app.training", "recipes/digits.yaml", *keys)


@pytest.mark.parametrize(
    ("what", "moved", "precision"),
    [
        ("optimizer", {"offload": "nvme"}, "fp32"),
        ("parameters", {"offload": "cpu", "offload_param": "nvme"}, "bf16"),
        ("optimizer and parameters", {"offload": "nvme", "offload_param": "nvme"}, "fp32"),
    ],
)
def test_it_is_the_model_of_offload_to_the_cpu_and_goes_on_with_the_same_bits(
    what: str, moved: dict[str, str], precision: str, launch: Launch, tmp_path: Path, faults: Faults
) -> None:
    model, disk = ["model.args.width=1024", f"train.precision={precision}"], tmp_path / "disk"
    plan = [f"train.plan.{key}={place}" for key, place in moved.items()]
    nvme = [*model, SLOWLY, *plan, f"train.plan.nvme_path={disk}"]
    expected = Trained.of(train(launch, tmp_path / "cpu", *model, "train.plan.offload=cpu").result())
    with faults("T1", f"torchrun: SIGKILL of a rank, {what} on NVMe", "resumes with the same bits") as fault:
        killed = train(launch, tmp_path / "nvme", *nvme)
        wait_until(lambda: newest_step(tmp_path / "nvme") >= 4 or killed.process.poll() is not None, timeout_s=600)
        os.kill(killed.ranks()[1], signal.SIGKILL)
        assert killed.ends() != 0
        swapped = {file.parent.name for file in disk.rglob("*.swp") if file.stat().st_size >= 2**20}
        assert ("parameters" in swapped) == ("offload_param" in moved), "not swapped"
        assert bool(swapped - {"parameters"}) == (moved["offload"] == "nvme"), "not swapped"
        result = train(launch, tmp_path / "nvme", *nvme).result()
        assert result["metrics"]["resumed_from_step"] >= 4
        assert Trained.of(result) == expected
        assert len(list(disk.iterdir())) <= 1, "more than the killed rank left its folder"
        fault.saw("the bits of a run with offload to the CPU")


def test_a_model_that_swapping_would_change_is_refused(launch: Launch, tmp_path: Path) -> None:
    narrow = ["model.args.width=1010", "train.plan.offload=nvme", f"train.plan.nvme_path={tmp_path / 'disk'}"]
    run = train(launch, tmp_path, *narrow)
    assert run.ends() != 0
    assert "DeepSpeed's swapping takes a multiple of 256" in run.output
    assert not newest_step(tmp_path)


@pytest.mark.parametrize("moved", [["offload=nvme"], ["offload=cpu", "offload_param=nvme"]])
def test_a_disk_without_room_ends_training_with_an_error(moved: list[str], launch: Launch, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    plan = [f"train.plan.{key}" for key in [*moved, f"nvme_path={disk}"]]
    keys = latest([*RUN, f"storage={tmp_path}", "model.args.width=1024", *plan])
    limited = ["--no-python", "prlimit", f"--fsize={3 * 2**19}", sys.executable]
    run = launch.torchrun(*limited, "-m", "app.training", "recipes/digits.yaml", *keys)
    assert run.ends() != 0
    assert re.search(rf"bytes cannot be written to '{disk}/\S+' \(File too large\): free space there", run.output)
    assert "SIGABRT" not in run.output
