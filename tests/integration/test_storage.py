"""Checkpoints on storage that fails: torn writes, damaged files, a full disk."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from upath import UPath

from app.published.weights import load_weights
from app.training.checkpoints.names import WEIGHT, parameter
from app.training.publication import export_checkpoint
from tests.faults.torn_writes import require_survival
from tests.helpers import flip, in_fork, rayloom, records_of, result_of, steps_of, train_alone, wait_until
from tests.launch import Launch, newest_checkpoint, newest_step, tensors_of
from tests.tables import Faults

pytestmark = pytest.mark.faults
TRAIN = ["-m", "app.training", "recipes/digits.yaml", "train.resume=latest", "train.epochs=2", "train.workers=1",
         "train.early_stopping=null", "train.checkpoint.every_steps=4", "train.checkpoint.num_to_keep=9",
         "model.factory=tests.faults.models:DropoutCnn", "model.args.pause_s=0.1"]  # fmt: skip


def test_a_kill_while_checkpoints_are_written_leaves_none_that_is_bad(
    launch: Launch, tmp_path: Path, faults: Faults
) -> None:
    with faults("T6", "ranks are killed at each moment of a commit", "0 bad checkpoints are read") as fault:
        kills = require_survival(launch, tmp_path, kills=5)
        fault.saw(f"{len(kills)} kills, {sum(bool(kill.torn) for kill in kills)} while writing, 0 bad")


def assert_holds(weights: Path, checkpoint: Path) -> None:
    """The exported weights are those of the checkpoint."""
    saved = tensors_of(checkpoint)
    for name, part in load_weights(UPath(weights)).model.named_parameters():
        assert torch.equal(part.flatten(), saved[parameter(name, WEIGHT)].flatten())


@pytest.fixture
def full(launch: Launch, tmp_path: Path, faults: Faults) -> Path:
    """The folder of a run that has ended because there was no room for a checkpoint."""
    storage = tmp_path / "storage"
    with faults("T8", "torchrun: no room for a checkpoint", "error names path and bytes; the good ones stay") as fault:
        full = launch("python", *TRAIN)
        wait_until(lambda: newest_step(storage) > 0)
        resource.prlimit(full.pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))  # as a quota would
        assert full.ends() == 1
        folder: Path
        (folder,) = storage.glob("runs/train/*")
        error = full.result()["error"]
        assert f"checkpoint '{folder}/checkpoints/step_000000" in error
        assert "cannot be written: [Errno 27] File too large; this process's part takes 1," in error
        assert "bytes are free there. Earlier checkpoints are whole: resume from them with train.resume=latest" in error
        assert len(list(folder.glob("checkpoints/step_*"))) == newest_step(storage) / 4, "the torn one is gone"
        fault.saw(error.partition(": ")[2])
    return folder


def test_a_full_disk_ends_the_run_with_what_is_missing_and_it_goes_on_once_there_is_room(
    full: Path, tmp_path: Path, faults: Faults
) -> None:
    kept = newest_step(tmp_path / "storage")
    with faults("T8", "the same, with room again", "goes on from the last good one") as fault:
        result = train_alone(*TRAIN[3:])
        assert result["status"] == "succeeded"
        assert result["metrics"]["resumed_from_step"] == kept
        assert [step["step"] for step in steps_of(full)] == list(range(1, 45))
        assert json.loads((full / "result.json").read_text(encoding="utf-8"))["run_id"] == full.name
        fault.saw(f"went on from step {kept}")


@pytest.mark.slow
def test_checkpoints_before_a_full_disk_are_exported_and_damaged_ones_are_named(
    full: Path, tmp_path: Path, faults: Faults
) -> None:
    storage, exported = tmp_path / "storage", tmp_path / "exported"
    kept = newest_step(storage)
    told = rayloom("export", full.name, str(exported), "--step", "4", "--storage", str(storage))
    assert told.stdout == f"the weights after step 4 of {full.name} are in {exported}\n"
    assert_holds(exported, full / "checkpoints/step_00000004")
    assert export_checkpoint(UPath(full), UPath(tmp_path / "newest")).step == kept
    assert_holds(tmp_path / "newest", newest_checkpoint(full))

    with faults("T7", "torchrun: one bit flipped in each checkpoint", "each is named; no new start") as fault:
        damaged = tmp_path / "damaged"
        shutil.copytree(storage, damaged)
        for file in damaged.glob("runs/train/*/checkpoints/step_*/__0_0.distcp"):
            flip(file)
        refused = in_fork("app.training", *TRAIN[2:], f"storage={damaged}")
        assert refused.returncode == 1
        assert "are damaged: restore one of them" in result_of(refused.stdout)["error"]
        assert records_of(damaged / full.relative_to(storage)) == records_of(full), "nothing was done over"
        fault.saw(f"{(refused.stdout + refused.stderr).count('is damaged and left out')} of {kept // 4} named")
