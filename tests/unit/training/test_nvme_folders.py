"""The folders on a disk to which processes offload: of each alone, and gone once they have ended in any way."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.training.engine.nvme import remove_own_folders, with_own_folder
from tests.wording import refused

SCRIPT = """
import os, signal, sys
from pathlib import Path
from app.training.engine.nvme import with_own_folder
from tests.unit.training.test_nvme_folders import folder_in
(folder_in(Path(sys.argv[1])) / "0.swp").touch()
print("made", flush=True)
signal.pause()
"""


def folder_in(disk: Path) -> Path:
    section = {"nvme_path": str(disk), "device": "nvme"}
    given: dict[str, Any] = {"zero_optimization": {"offload_param": section, "offload_optimizer": section}}
    found = with_own_folder(given)["zero_optimization"]
    assert found["offload_param"] == found["offload_optimizer"]
    return Path(found["offload_param"]["nvme_path"])


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A disk on which another process has a folder, and so has a user who is none of ours."""
    (tmp_path / "rayloom-notes").mkdir()
    return tmp_path


def test_a_killed_process_leaves_its_folder_only_until_the_next_one_starts(disk: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", SCRIPT, disk], stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    (theirs,) = (folder for folder in disk.iterdir() if (folder / "0.swp").exists())
    first = folder_in(disk)
    assert theirs.exists(), "its process lives"
    other.send_signal(signal.SIGKILL)
    other.wait()
    second = folder_in(disk)
    assert {first, second, disk / "rayloom-notes"} == set(disk.iterdir())
    remove_own_folders()
    assert list(disk.iterdir()) == [disk / "rayloom-notes"]


@pytest.mark.parametrize(
    "place", ["file", "file/within", "dangling", "nul\0"], ids=["file", "within", "dangling", "nul"]
)
def test_a_place_that_can_hold_no_folder_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    with refused("nvme.folder", "train.plan.nvme_path"):
        folder_in(tmp_path / place)
