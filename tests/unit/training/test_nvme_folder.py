"""The folder on a disk in which a worker keeps what is offloaded to NVMe."""

import os
import signal
from pathlib import Path

import pytest

from app.training.engine.nvme import with_own_folder
from tests.wording import refused


def own_folder(shared: Path) -> Path:
    made = with_own_folder({"zero_optimization": {"offload_param": {"nvme_path": str(shared)}}})
    return Path(made["zero_optimization"]["offload_param"]["nvme_path"])


def killed_in(shared: Path) -> None:
    """Make a folder with a file in a process that is killed."""
    if (child := os.fork()) == 0:
        (own_folder(shared) / "0.swp").write_bytes(b"gigabytes")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_what_a_killed_worker_has_left_is_removed_and_what_others_hold_stays(tmp_path: Path) -> None:
    kept = tmp_path / "rayloom-swap-of-another-machine"
    kept.mkdir()
    mine = own_folder(tmp_path)
    killed_in(tmp_path)
    killed_in(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3, "the second has removed what the first had left"
    other = own_folder(tmp_path)
    assert set(tmp_path.iterdir()) == {kept, mine, other}


@pytest.mark.parametrize(
    "place", ["file", "file/within", "dangling", "nul\0"], ids=["file", "within", "dangling", "nul"]
)
def test_a_place_without_room_for_a_folder_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    with refused("nvme.folder", "train.plan.nvme_path"):
        own_folder(tmp_path / place)
