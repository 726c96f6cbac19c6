"""Checkpoints in storage: which of them are whole, what is kept, and what is written again."""

import weakref
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from upath import UPath

from app.checksums import CHECKSUMS_FILE, write_checksums
from app.config import CheckpointConfig
from app.training.checkpoints.snapshot import Snapshot
from app.training.checkpoints.store import Checkpoint, CheckpointStore
from app.training.checkpoints.writer import CheckpointWriter
from tests.checkpointing import snapshot_at, steps, write
from tests.helpers import flip, wait_until
from tests.tables import Faults
from tests.wording import refused


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    made = CheckpointStore(UPath(tmp_path if request.param == "local" else f"memory://{tmp_path}"))
    for step in (10, 20, 30):
        write(made, step)
    return made


def truncate(file: UPath) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def lose(file: UPath) -> None:
    file.unlink()


def empty(file: UPath) -> None:
    file.write_bytes(b"")


@pytest.mark.faults
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json", CHECKSUMS_FILE])
@pytest.mark.parametrize("damage", [truncate, flip, lose, empty])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    store: CheckpointStore,
    name: str,
    damage: Callable[[UPath], None],
    capsys: pytest.CaptureFixture[str],
    faults: Faults,
) -> None:
    with faults("T7", "any file cut, flipped, lost or emptied", "named; the one before is taken") as fault:
        damage(store.folder_of(Checkpoint(30)) / name)
        assert store.newest_intact() == Checkpoint(20)
        if not (name == CHECKSUMS_FILE and damage is lose):  # then it was never finished, which is no damage
            assert "step_00000030" in capsys.readouterr().err
        fault.saw("it was")


def test_nothing_but_damaged_checkpoints_is_an_error_and_no_new_start(store: CheckpointStore) -> None:
    for checkpoint in store.committed():
        flip(store.folder_of(checkpoint) / "state.json")
    with refused("checkpoints.damaged"):
        store.newest_intact()


@pytest.mark.faults
def test_the_checkpoint_of_a_step_is_found_or_those_that_are_there_are_named(store: CheckpointStore) -> None:
    assert store.intact_of(20) == Checkpoint(20)
    again = write(store, 20)
    assert store.intact_of(20) == again
    truncate(store.folder_of(again) / "__0_0.distcp")
    assert store.intact_of(20) == Checkpoint(20)
    truncate(store.folder_of(Checkpoint(20)) / "__0_0.distcp")
    with refused("checkpoint.no_step"):
        store.intact_of(20)


def test_a_run_goes_on_however_often_the_same_step_is_damaged(store: CheckpointStore) -> None:
    for _ in range(3):
        flip(store.folder_of(store.committed()[-1]) / "state.json")
        found = store.newest_intact()
        assert found == Checkpoint(20)
        store.sweep(after=found)
        assert steps(store) == [10, 20]
        write(store, 30)
    aside = sorted(path.name for path in store.folder.iterdir() if path.name.startswith("damaged_"))
    assert aside == [f"damaged_step_00000030{number}" for number in ("", "-2", "-3")]
    assert all((store.folder / name / "state.json").exists() for name in aside)


@pytest.mark.faults
def test_what_cannot_be_cleared_up_is_no_end_of_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(tmp_path / "storage.zip", "w") as archive:  # which can be read and not written
        archive.writestr(f"checkpoints/step_00000010/{CHECKSUMS_FILE}", "")
        archive.writestr(f"checkpoints/step_00000020/{CHECKSUMS_FILE}", "no checksum  state.json")
        archive.writestr("checkpoints/step_00000030/state.json", "never finished")
    store = CheckpointStore(UPath("zip://checkpoints", fo=str(tmp_path / "storage.zip")))
    store.sweep(after=store.newest_intact())
    warnings = capsys.readouterr().err
    assert "damaged checkpoint step_00000020 cannot be renamed" in warnings
    assert "checkpoint step_00000030 cannot be removed" in warnings


@pytest.mark.parametrize("best", [[10, 20], [5, 10, 20]], ids=["there", "gone"])
def test_the_newest_and_the_best_existing_checkpoint_are_kept(store: CheckpointStore, best: list[int]) -> None:
    store.prune(Checkpoint(30), num_to_keep=1, best=best)
    assert steps(store) == [10, 30]


def test_what_was_just_written_is_kept_beside_later_ones_that_are_damaged(store: CheckpointStore) -> None:
    store.prune(Checkpoint(20), num_to_keep=1)
    assert steps(store) == [20, 30]


def test_a_step_that_is_kept_again_replaces_the_first_once_it_is_whole(store: CheckpointStore) -> None:
    again = write(store, 30)
    assert store.committed()[-2:] == [Checkpoint(30), again]
    lose(store.folder_of(again) / CHECKSUMS_FILE)
    assert store.newest_intact() == Checkpoint(30)
    write_checksums(store.folder_of(again))
    assert store.newest_intact() == again
    store.prune(again, num_to_keep=2)
    assert store.committed() == [Checkpoint(20), again]
    assert store.next(30) > again


@pytest.mark.usefixtures("_process_group")
def test_many_runs_in_one_process_leave_no_threads(tmp_path: Path) -> None:
    """A search trains hundreds of configurations in the process of one actor."""
    threads = Path("/proc/self/task")
    before = len(list(threads.iterdir()))
    for _ in range(3):
        CheckpointWriter(CheckpointStore(UPath(tmp_path)), CheckpointConfig()).close()
    assert len(list(threads.iterdir())) == before


def test_what_was_never_finished_is_swept(store: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> None:
    lose(store.folder_of(Checkpoint(30)) / CHECKSUMS_FILE)
    store.sweep(after=store.newest_intact())
    assert steps(store) == [10, 20]
    assert not store.folder_of(Checkpoint(30)).exists()
    assert "step_00000030 was never finished" in capsys.readouterr().err


@pytest.mark.usefixtures("_process_group")
def test_a_folder_that_cannot_be_made_is_named_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(b"")  # root may write into any folder, but not into a file
    writer = CheckpointWriter(CheckpointStore(UPath(tmp_path / "run" / "checkpoints")), CheckpointConfig())
    writer.save(partial(snapshot_at, 10))
    with refused("checkpoint.not_written"):
        writer.wait()


@pytest.mark.usefixtures("_process_group")
def test_a_write_that_fails_once_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def fail_once(folder: UPath, sums: dict[str, str]) -> None:
        tries.append(folder)
        if len(tries) == 1:
            raise OSError("503 Slow Down")
        write_checksums(folder, sums)

    monkeypatch.setattr("app.training.checkpoints.writer.write_checksums", fail_once)
    store = CheckpointStore(UPath(tmp_path))
    writer = CheckpointWriter(store, CheckpointConfig())
    writer.save(partial(snapshot_at, 10))
    writer.wait()
    assert store.newest_intact() == Checkpoint(10)
    assert len(tries) == 2


@pytest.mark.usefixtures("_process_group")
def test_a_state_that_is_lost_does_not_cost_the_next_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocker = tmp_path / "run"
    blocker.write_bytes(b"")
    store = CheckpointStore(UPath(blocker / "checkpoints"))
    writer = CheckpointWriter(store, CheckpointConfig())
    writer.save(partial(snapshot_at, 10))
    wait_until(lambda: writer.has_failed)
    blocker.unlink()
    writer.save(partial(snapshot_at, 20))
    assert store.committed() == [Checkpoint(20)]
    assert "step_00000010' cannot be written" in capsys.readouterr().err
    assert not writer.has_failed
    writer.wait()


@pytest.mark.usefixtures("_process_group")
def test_one_copy_of_the_state_is_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def take(step: int) -> Snapshot:
        assert not any(copied() is not None for copied in alive), "the previous copy is still in memory"
        snapshot = snapshot_at(step)
        alive.extend(map(weakref.ref, snapshot.content.values()))
        return snapshot

    writer = CheckpointWriter(CheckpointStore(UPath(tmp_path)), CheckpointConfig())
    for step in range(1, 6):
        writer.save(partial(take, step))
    writer.wait()
    assert len(alive) == 5
