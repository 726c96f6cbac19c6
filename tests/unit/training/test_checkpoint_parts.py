"""Parts of a checkpoint: how they are cut, exported, and read by another plan."""

import errno
import random
import tempfile
from collections import Counter
from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import safetensors.torch
import torch
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint import FileSystemWriter, save
from upath import UPath

from app.checksums import VerifiedFolder, checksums_of, read_checksums, write_checksums
from app.config import CheckpointConfig
from app.storage import link, local_copy, to_path, upload
from app.training.checkpoints.fragments import Fragment, Shards, boxes_of, matrix_shape
from app.training.checkpoints.names import WEIGHT, buffer, own, parameter
from app.training.checkpoints.parts import SavedParts
from app.training.checkpoints.reader import export_weights
from app.training.checkpoints.snapshot import Snapshot
from app.training.checkpoints.state import Position, TrainState
from app.training.checkpoints.store import Checkpoint, CheckpointStore
from app.training.checkpoints.verified_file import PIECE_BYTES, VerifiedFile, write_piece_sums
from app.training.checkpoints.writer import STATE_FILE, CheckpointWriter
from app.training.engine.deepspeed_internals import Slice
from app.training.records import EpochRecord
from app.training.worker import random_state, restore_random_state, seed_step
from benchmarks.machine import peak_growth
from tests.checkpointing import state_at
from tests.wording import refused


@pytest.mark.parametrize(("start", "length"), [(0, 35), (0, 3), (3, 4), (3, 30), (7, 14), (34, 1), (10, 20)])
@pytest.mark.parametrize(
    "cut", [Slice((5, 7)), Slice((15, 7), 0, 10), Slice((5, 21), 1, 7)], ids=["whole", "column", "row"]
)
def test_a_run_of_elements_becomes_rectangles_of_the_whole(start: int, length: int, cut: Slice) -> None:
    whole = torch.arange(torch.Size(cut.whole_shape).numel(), dtype=torch.float32).reshape(cut.whole_shape)
    local = whole if cut.dim is None else whole.narrow(cut.dim, cut.start, (5, 7)[cut.dim])
    flat = torch.cat([torch.zeros(4), local.reshape(-1)[start : start + length]])
    fragment = Fragment("weight", cut, (5, 7), start, length, flat, offset=4, is_owned=True, is_trained=True)
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


def test_a_step_draws_the_same_numbers_whatever_was_drawn_before() -> None:
    def drawn(seed: int, data_rank: int, step: int) -> tuple[float, float]:
        seed_step(seed, data_rank, step)
        return random.random(), np.random.random()

    first = drawn(1, 0, 5)
    others = [drawn(-1, 0, 5), drawn(1, 1, 5), drawn(1, 5, 0), drawn(1, 0, 6)]
    assert drawn(1, 0, 5) == first
    assert len({number for numbers in (first, *others) for number in numbers}) == 10


def test_a_loss_that_is_not_finite_can_be_read_again() -> None:
    record = EpochRecord(
        epoch=1, step=9, train_loss=inf, val_loss=-inf, val_accuracy=0.1, val_perplexity=nan, samples_per_s=1.0
    )
    state = state_at(9).model_copy(update={"position": Position(loss_sum=nan, losses=9), "records": [record]})
    assert repr(TrainState.model_validate_json(state.model_dump_json())) == repr(state)


def test_all_weights_and_buffers_are_exported_whatever_the_model_calls_them(tmp_path: Path) -> None:
    model = {name: torch.rand(3) for name in ("rank_embedding.weight", "rank", "buffer", "parameter.weight")}
    buffers = {name: torch.rand(3) for name in ("weight", "norm.weight", "parameter")}
    content = {parameter(name, WEIGHT): tensor for name, tensor in model.items()}
    content |= {parameter(name, "exp_avg"): torch.zeros(3) for name in model}
    content |= {named: tensor for name, tensor in buffers.items() for named in (buffer(name), own(0, buffer(name)))}
    save(content, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    (tmp_path / STATE_FILE).write_text(state_at(0).model_dump_json(), encoding="utf-8")
    write_checksums(UPath(tmp_path))
    export_weights(UPath(tmp_path), tmp_path / "model.safetensors")
    exported = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert exported.keys() == model.keys() | buffers.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in (model | buffers).items())


@pytest.mark.usefixtures("_process_group")
def test_an_export_after_bf16_rounds_parameters_and_no_buffers(tmp_path: Path) -> None:
    """Training keeps buffers, such as running statistics, in float32."""
    value = torch.tensor([1.001])
    content = {parameter("norm.weight", WEIGHT): Shards((1, 1), {(0, 0): value[None]}), buffer("norm.mean"): value}
    state = state_at(1).model_copy(update={"precision": "bf16", "shapes": {"norm.weight": [1]}})
    store = CheckpointStore(UPath(tmp_path))
    CheckpointWriter(store, CheckpointConfig(background=False)).save(lambda: Snapshot(state, content))
    export_weights(store.folder_of(Checkpoint(1)), tmp_path / "model.safetensors")
    exported = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(exported["norm.mean"], value)
    assert torch.equal(exported["norm.weight"], value.bfloat16().float())


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
@pytest.mark.parametrize("size", [0, PIECE_BYTES, PIECE_BYTES + 1])
def test_a_truncated_file_is_damaged_at_any_length(storage: str, tmp_path: Path, size: int) -> None:
    file, stored = tmp_path / "part", to_path(storage) / "part"
    file.write_bytes(bytes(2 * PIECE_BYTES))
    sums = write_piece_sums(file).read_text(encoding="ascii").split()
    stored.write_bytes(bytes(size))
    with refused("file.changed"):
        VerifiedFile(stored, sums, PIECE_BYTES).fetch([(0, 2 * PIECE_BYTES)])
    with refused("file.changed"):
        VerifiedFile(stored, sums, PIECE_BYTES).fetch([(size // PIECE_BYTES * PIECE_BYTES, 2 * PIECE_BYTES)])


@pytest.mark.usefixtures("_process_group")
def test_weights_are_exported_one_at_a_time(tmp_path: Path) -> None:
    num_bytes, number = 2**22, 24

    def take() -> Snapshot:
        parts = {name: Shards((1024, 1024), {(0, 0): torch.ones(1024, 1024)}) for name in map(str, range(number))}
        return Snapshot(state_at(1), {parameter(name, WEIGHT): part for name, part in parts.items()})

    store = CheckpointStore(UPath(tmp_path))
    CheckpointWriter(store, CheckpointConfig(background=False)).save(take)
    with peak_growth() as grown:
        export_weights(store.folder_of(Checkpoint(1)), tmp_path / "model.safetensors")
    assert grown() < 6 * num_bytes
    assert len(safetensors.torch.load_file(tmp_path / "model.safetensors")) == number


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("place", ["", "memory://"])
def test_what_is_written_is_read_wherever_storage_is(place: str, tmp_path: Path) -> None:
    heard: list[str] = []
    store = CheckpointStore(UPath(f"{place}{tmp_path}/run/checkpoints"), lambda: heard.append("read"))
    writer = CheckpointWriter(store, CheckpointConfig(num_to_keep=1), lambda: heard.append("written"))
    for step in (10, 20, 20):
        weight = torch.rand(3, 4)
        parts = {(0, 0): weight[:2], (2, 0): weight[2:]}
        content = {parameter("layer.weight", WEIGHT): Shards((3, 4), parts)}
        writer.save(partial(Snapshot, state_at(step), content), best=[10])
    writer.wait()
    newest = store.newest_intact()
    assert store.committed() == [Checkpoint(10), newest] == [Checkpoint(10), Checkpoint(20, 2)]
    assert {*heard} == {"written", "read"}
    export_weights(store.folder_of(newest), tmp_path / "model.safetensors")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "model.safetensors")["layer.weight"], weight)


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("storage", ["local", "s3"], indirect=True)
def test_frozen_weights_of_an_earlier_checkpoint_are_part_of_a_later_one(storage: str, tmp_path: Path) -> None:
    store = CheckpointStore(to_path(storage) / "run" / "checkpoints")
    writer = CheckpointWriter(store, CheckpointConfig(num_to_keep=1))
    frozen, took = torch.rand(3, 4), []

    def take(step: int) -> Snapshot:
        took.append(writer.takes_frozen)
        trained = {parameter("head", WEIGHT): Shards((1, 1), {(0, 0): torch.full((1, 1), float(step))})}
        kept = {parameter("base", WEIGHT): Shards((3, 4), {(0, 0): frozen.clone()})}
        return Snapshot(state_at(step), trained, kept if writer.takes_frozen else {})

    for step in (1, 2, 3):
        writer.save(partial(take, step))
        writer.wait()
    assert took == [True, False, False]
    assert store.newest_intact() == Checkpoint(3)
    export_weights(store.folder_of(Checkpoint(3)), tmp_path / "model.safetensors")
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(weights["base"], frozen)
    assert weights["head"].item() == 3.0
    # What cannot be taken from the earlier one is written again, by the next checkpoint.
    (store.folder_of(Checkpoint(3)) / ".frozen.metadata").unlink()
    writer.save(partial(take, 4))
    writer.save(partial(take, 5))
    assert (took[3:], store.newest_intact()) == ([False, True], Checkpoint(5))


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("damage", [None, "lost", "cut off", "changed"])
@pytest.mark.parametrize("place", ["", "memory://"])
def test_a_checkpoint_is_whole_or_refused_where_there_are_no_links(
    place: str, damage: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError if place else OSError(errno.EINVAL, "no links here")

    monkeypatch.setattr("os.link", refuse)
    monkeypatch.setattr(MemoryFileSystem, "cp_file", refuse)
    store = CheckpointStore(UPath(f"{place}{tmp_path}/run/checkpoints"))
    writer, frozen = CheckpointWriter(store, CheckpointConfig(num_to_keep=9)), torch.rand(3, 4)

    def take(step: int) -> Snapshot:
        trained = {parameter("head", WEIGHT): Shards((1, 1), {(0, 0): torch.full((1, 1), float(step))})}
        kept = {parameter("base", WEIGHT): Shards((3, 4), {(0, 0): frozen.clone()})}
        return Snapshot(state_at(step), trained, kept if writer.takes_frozen else {})

    for step in (1, 2):
        writer.save(partial(take, step))
        writer.wait()
    (file,) = store.folder_of(Checkpoint(2)).glob("*frozen*.distcp")
    content = file.read_bytes()
    if damage == "lost":
        file.unlink()
    elif damage:
        file.write_bytes(content[:-1] if damage == "cut off" else bytes(len(content)))
    writer.save(partial(take, 3))
    if damage:
        with refused("checkpoint.not_written"):
            writer.wait()
        writer.save(partial(take, 4))
    writer.wait()
    intact = [checkpoint.step for checkpoint in store.committed() if store.is_intact(checkpoint)]
    assert intact == ([1, 4] if damage else [1, 2, 3])
    export_weights(store.folder_of(store.committed()[-1]), tmp_path / "model.safetensors")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "model.safetensors")["base"], frozen)


def test_a_file_on_another_file_system_is_copied(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    here, folders = tmp_path.stat().st_dev, (Path("/dev/shm"), Path(tempfile.gettempdir()))
    others = [folder for folder in folders if folder.is_dir() and folder.stat().st_dev != here]
    if not others:
        pytest.skip("needs a second file system")
    with tempfile.TemporaryDirectory(dir=others[0]) as other:
        link(UPath(tmp_path / "file"), UPath(f"{other}/file"))
        assert Path(other, "file").read_bytes() == b"content"


def test_slow_storage_is_heard_piece_by_piece(tmp_path: Path) -> None:
    heard: list[str] = []
    large, folder = tmp_path / "large", UPath(f"memory://{tmp_path}/slow")
    large.write_bytes(bytes(2**24))
    upload(large, folder / "large", lambda: heard.append("up"))
    with local_copy(folder, lambda: heard.append("down")) as local:
        assert (local / "large").stat().st_size == 2**24
    checksums_of([large], lambda: heard.append("sum"))
    assert all(heard.count(event) >= 4 for event in ("up", "down", "sum"))


class CountingStorage(MemoryFileSystem):
    """In-memory storage that counts the bytes read."""

    protocol = "counting"
    bytes_read: ClassVar[Counter[str]] = Counter()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        content: bytes = super().cat_file(path, start, end, **kwargs)
        self.bytes_read[Path(path).suffix] += len(content)
        return content


ROWS, COLUMNS = 2048, 1024


@pytest.fixture
def two_halves(tmp_path: Path) -> tuple[UPath, torch.Tensor]:
    """A checkpoint in counting storage whose matrix has two parts, as if written by two ranks."""
    register_implementation("counting", CountingStorage, clobber=True)
    whole, folder = torch.rand(ROWS, COLUMNS), UPath(f"counting://{tmp_path}")
    parts = {(row, 0): whole[row : row + ROWS // 2].clone() for row in (0, ROWS // 2)}
    writer = CheckpointWriter(CheckpointStore(folder), CheckpointConfig(background=False))
    writer.save(lambda: Snapshot(state_at(1), {parameter("a", WEIGHT): Shards((ROWS, COLUMNS), parts)}))
    CountingStorage.bytes_read.clear()
    return CheckpointStore(folder).folder_of(Checkpoint(1)), whole


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("has_pieces", [True, False])
def test_an_export_reads_each_byte_once(tmp_path: Path, has_pieces: bool) -> None:
    """Also of a checkpoint without piece checksums, whose files are read whole."""
    register_implementation("counting", CountingStorage, clobber=True)
    store = CheckpointStore(UPath(f"counting://{tmp_path}"))
    weights = {f"layer{number}": torch.rand(64, 256) for number in range(32)}
    content = {parameter(name, WEIGHT): Shards((64, 256), {(0, 0): tensor}) for name, tensor in weights.items()}
    writer = CheckpointWriter(store, CheckpointConfig(background=False))
    writer.save(lambda: Snapshot(state_at(1), {**content}))
    folder = store.folder_of(Checkpoint(1))
    if not has_pieces:
        write_checksums(
            folder, {name: sha256 for name, sha256 in read_checksums(folder).items() if not name.endswith(".pieces")}
        )
    CountingStorage.bytes_read.clear()
    export_weights(folder, tmp_path / "model.safetensors")
    exported = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())
    assert CountingStorage.bytes_read[".distcp"] <= 1.2 * (folder / "__0_0.distcp").stat().st_size
    assert CountingStorage.bytes_read.total() <= 1.2 * (folder / "__0_0.distcp").stat().st_size


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("row", [0, ROWS // 2, ROWS // 4, ROWS - ROWS // 4])
@pytest.mark.parametrize("height", [ROWS // 2, ROWS // 4])
def test_a_process_reads_its_own_bytes(two_halves: tuple[UPath, torch.Tensor], row: int, height: int) -> None:
    """Read the rank's own half, or rows across ranks as another plan would need."""
    folder, whole = two_halves
    height = min(height, ROWS - row)
    part = torch.zeros(height, COLUMNS)
    SavedParts(VerifiedFolder(folder)).read_into({parameter("a", WEIGHT): Shards((ROWS, COLUMNS), {(row, 0): part})})
    assert torch.equal(part, whole[row : row + height])
    assert part.nbytes <= CountingStorage.bytes_read[".distcp"] <= 1.2 * part.nbytes
    assert CountingStorage.bytes_read.total() <= 1.2 * part.nbytes


@pytest.mark.usefixtures("_process_group")
def test_what_a_process_reads_is_verified(two_halves: tuple[UPath, torch.Tensor]) -> None:
    folder, whole = two_halves
    file = folder / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    file.write_bytes(content)
    upper = torch.zeros(ROWS // 8, COLUMNS)
    saved = SavedParts(VerifiedFolder(folder))
    saved.read_into({parameter("a", WEIGHT): Shards((ROWS, COLUMNS), {(0, 0): upper})})
    assert torch.equal(upper, whole[: ROWS // 8]), "which is elsewhere in the file"
    with refused("file.changed"):
        saved.read_into({parameter("a", WEIGHT): Shards((ROWS, COLUMNS), {(0, 0): torch.zeros(ROWS, COLUMNS)})})


@pytest.mark.usefixtures("_process_group")
def test_a_column_is_read_from_rows(two_halves: tuple[UPath, torch.Tensor]) -> None:
    folder, whole = two_halves
    part = torch.zeros(ROWS, 8)
    SavedParts(VerifiedFolder(folder)).read_into({parameter("a", WEIGHT): Shards((ROWS, COLUMNS), {(0, 512): part})})
    assert torch.equal(part, whole[:, 512:520])
