"""What a power cut leaves, from the order of system calls that strace sees."""

from pathlib import Path

import pytest

from app.checksums import CHECKSUMS_FILE
from tests.durable_writes import CHECKPOINTS, PUBLISHED
from tests.power_cut import Call, Disk, calls_of


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Call]]:
    folder = tmp_path_factory.mktemp("disk") / "storage"
    return folder, list(calls_of("tests.durable_writes", folder))


@pytest.mark.debian("strace")
def test_a_checkpoint_is_on_the_disk_before_its_predecessor_is_removed(calls: tuple[Path, list[Call]]) -> None:
    folder, made = calls
    disk, newest, removed = Disk(folder), None, []
    for call in made:
        if call.name.startswith("rename") and call.paths[-1].name == CHECKSUMS_FILE:
            newest = call.paths[-1].parent
        if call.name in ("unlink", "unlinkat") and call.paths[-1].parent.parent == folder / CHECKPOINTS:
            removed.append(call.paths[-1].parent.name)
            assert newest is not None
            assert newest.name not in removed
            assert disk.missing(newest) == []
        disk.apply(call)
    assert sorted(set(removed)) == ["step_00000001", "step_00000002"]
    assert newest == folder / CHECKPOINTS / "step_00000003"


@pytest.mark.debian("strace")
def test_a_version_is_on_the_disk_when_it_is_published(calls: tuple[Path, list[Call]]) -> None:
    folder, made = calls
    disk, seen = Disk(folder), []
    for call in made:
        if call.name == "mkdir" and call.paths[-1].parent == folder / PUBLISHED:
            seen.append(call.paths[-1].name)
            assert disk.missing(folder / "models" / "digits" / seen[-1]) == []
        disk.apply(call)
    assert seen == ["1", "2"]
