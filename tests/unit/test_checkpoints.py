"""Checkpoints: how parts are cut, which of them are whole, what is kept."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint import FileSystemWriter, save
from upath import UPath

from app.checksums import CHECKSUMS_FILE, write_checksums
from app.errors import StorageError
from app.training.checkpoints.fragments import Fragment, Slice, boxes_of, matrix_shape
from app.training.checkpoints.names import WEIGHT, buffer, own, parameter
from app.training.checkpoints.reader import export_weights
from app.training.checkpoints.rng import random_state, restore_random_state
from app.training.checkpoints.state import Position, TrainState
from app.training.checkpoints.store import CheckpointStore
from app.training.checkpoints.writer import STATE_FILE
from tests.helpers import Faults, flip


@pytest.mark.parametrize(("start", "length"), [(0, 35), (0, 3), (3, 4), (3, 30), (7, 14), (34, 1), (10, 20)])
@pytest.mark.parametrize(
    "cut", [Slice((5, 7)), Slice((15, 7), 0, 10), Slice((5, 21), 1, 7)], ids=["whole", "column", "row"]
)
def test_a_run_of_elements_becomes_rectangles_of_the_whole(start: int, length: int, cut: Slice) -> None:
    whole = torch.arange(torch.Size(cut.whole_shape).numel(), dtype=torch.float32).reshape(cut.whole_shape)
    local = whole if cut.dim is None else whole.narrow(cut.dim, cut.start, (5, 7)[cut.dim])
    flat = torch.cat([torch.zeros(4), local.reshape(-1)[start : start + length]])
    fragment = Fragment("weight", cut, (5, 7), start, length, flat, offset=4, is_owned=True)
    seen = 0
    for (row, column), part in boxes_of(fragment, flat):
        assert torch.equal(part, whole[row : row + part.shape[0], column : column + part.shape[1]])
        seen += part.numel()
    assert seen == length


def test_parameters_of_any_rank_are_matrices() -> None:
    assert [matrix_shape(shape) for shape in ((), (3,), (3, 4), (8, 4, 3, 3))] == [(1, 1), (3, 1), (3, 4), (8, 36)]


def test_random_numbers_go_on() -> None:
    state = random_state(torch.device("cpu"))
    drawn = torch.rand(5)
    torch.rand(9)
    restore_random_state(state, torch.device("cpu"))
    assert torch.equal(torch.rand(5), drawn)


def test_all_weights_and_buffers_are_exported_whatever_the_model_calls_them(tmp_path: Path) -> None:
    model = {name: torch.rand(3) for name in ("rank_embedding.weight", "rank", "buffer", "parameter.weight")}
    buffers = {name: torch.rand(3) for name in ("weight", "norm.weight", "parameter")}
    content = {parameter(name, WEIGHT): each for name, each in model.items()}
    content |= {parameter(name, "exp_avg"): torch.zeros(3) for name in model}
    content |= {named: each for name, each in buffers.items() for named in (buffer(name), own(0, buffer(name)))}
    save(content, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    state = TrainState(
        position=Position(), records=[], workers=1, tensor=1, pipeline=1, optimizer_steps=0, schedule_steps=0,
        loss_scale=None, precision="fp32", shapes={},
    )  # fmt: skip
    (tmp_path / STATE_FILE).write_text(state.model_dump_json(), encoding="utf-8")
    export_weights(UPath(tmp_path), tmp_path / "model.safetensors")
    exported = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert exported.keys() == model.keys() | buffers.keys()
    assert all(torch.equal(exported[name], each) for name, each in (model | buffers).items())


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    made = CheckpointStore(UPath(tmp_path))
    for step in (10, 20, 30):
        folder = made.folder_of(step)
        folder.mkdir()
        for name in ("__0_0.distcp", ".metadata", "state.json"):
            (folder / name).write_bytes(f"{name} of {step}".encode() * 9)
        write_checksums(folder)
    return made


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


@pytest.mark.faults
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json", CHECKSUMS_FILE])
@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink, lambda file: file.write_bytes(b"")])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    store: CheckpointStore, name: str, damage: object, capsys: pytest.CaptureFixture[str], faults: Faults
) -> None:
    assert callable(damage)
    with faults("T7", "any file cut, flipped, lost or emptied", "named; the one before is taken") as fault:
        damage(Path(store.folder_of(30).path) / name)
        assert store.newest_intact() == 20
        if not (name == CHECKSUMS_FILE and damage is Path.unlink):  # then it was never finished, which is no damage
            assert "step_00000030" in capsys.readouterr().err
        fault.saw("it was")


def test_nothing_but_damaged_checkpoints_is_an_error_and_no_new_start(store: CheckpointStore) -> None:
    for step in store.committed():
        flip(Path(store.folder_of(step).path) / "state.json")
    with pytest.raises(StorageError, match=r"all checkpoints .* are damaged: restore"):
        store.newest_intact()


def test_the_newest_and_the_best_are_kept(store: CheckpointStore) -> None:
    store.prune(newest=1, best=10)
    assert store.committed() == [10, 30]


def test_what_was_never_finished_is_swept(store: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> None:
    (store.folder_of(30) / CHECKSUMS_FILE).unlink()
    store.sweep(after=store.newest_intact())
    assert store.committed() == [10, 20]
    assert not store.folder_of(30).exists()
    assert "step_00000030 was never finished" in capsys.readouterr().err
