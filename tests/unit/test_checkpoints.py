"""Checkpoints: how parts are cut, which of them are whole, what is kept."""

import weakref
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import safetensors.torch
import torch
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint import FileSystemWriter, save
from upath import UPath

from app.artifacts import CHECKPOINTS, WEIGHTS
from app.checksums import CHECKSUMS_FILE, VerifiedFolder, checksums_of, read_checksums, write_checksums
from app.config import CheckpointConfig, load_recipe
from app.errors import StorageError, TrainingError
from app.runs import Run
from app.storage import local_copy, to_path, upload
from app.tasks import prepare
from app.training.checkpoints.fragments import Fragment, Shards, boxes_of, matrix_shape
from app.training.checkpoints.names import WEIGHT, buffer, own, parameter
from app.training.checkpoints.parts import SavedParts
from app.training.checkpoints.reader import export_weights
from app.training.checkpoints.snapshot import Snapshot
from app.training.checkpoints.state import Position, TrainState
from app.training.checkpoints.store import Checkpoint, CheckpointStore
from app.training.checkpoints.verified_file import PIECE_BYTES, VerifiedFile, write_piece_sums
from app.training.checkpoints.writer import STATE_FILE, CheckpointWriter
from app.training.coordination.sync import StepSync
from app.training.engine.deepspeed_internals import Slice, written_to_nvme
from app.training.records import Ending, EpochRecord
from app.training.run import finish_run
from app.training.session import train
from app.training.stop_request import StopRequest
from app.training.worker import Worker, random_state, restore_random_state, start_worker
from benchmarks.machine import peak_growth
from tests.helpers import flip, wait_until
from tests.tables import Faults


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


def state_at(step: int) -> TrainState:
    return TrainState(
        position=Position(step=step), records=[], workers=1, tensor=1, pipeline=1, optimizer_steps=step,
        schedule_steps=step, loss_scale=None, precision="fp32", shapes={},
    )  # fmt: skip


def snapshot_at(step: int) -> Snapshot:
    return Snapshot(state_at(step), {buffer("step"): torch.tensor([step])})


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
    CheckpointWriter(store, CheckpointConfig(background=False)).save(lambda: Snapshot(state, content), best=None)
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
    with pytest.raises(StorageError, match="was changed"):
        VerifiedFile(stored, sums, PIECE_BYTES).fetch([(0, 2 * PIECE_BYTES)])
    with pytest.raises(StorageError, match="was changed"):
        VerifiedFile(stored, sums, PIECE_BYTES).fetch([(size // PIECE_BYTES * PIECE_BYTES, 2 * PIECE_BYTES)])


@pytest.mark.usefixtures("_process_group")
def test_weights_are_exported_one_at_a_time(tmp_path: Path) -> None:
    num_bytes, number = 2**22, 24

    def take() -> Snapshot:
        parts = {name: Shards((1024, 1024), {(0, 0): torch.ones(1024, 1024)}) for name in map(str, range(number))}
        return Snapshot(state_at(1), {parameter(name, WEIGHT): part for name, part in parts.items()})

    store = CheckpointStore(UPath(tmp_path))
    CheckpointWriter(store, CheckpointConfig(background=False)).save(take, best=None)
    with peak_growth() as grown:
        export_weights(store.folder_of(Checkpoint(1)), tmp_path / "model.safetensors")
    assert grown() < 6 * num_bytes
    assert len(safetensors.torch.load_file(tmp_path / "model.safetensors")) == number


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    made = CheckpointStore(UPath(tmp_path if request.param == "local" else f"memory://{tmp_path}"))
    for step in (10, 20, 30):
        write(made, step)
    return made


def write(store: CheckpointStore, step: int) -> Checkpoint:
    made = store.next(step)
    folder = store.folder_of(made)
    folder.mkdir(parents=True)
    for name in ("__0_0.distcp", ".metadata", "state.json"):
        (folder / name).write_bytes(f"{name} of {step}".encode() * 9)
    write_checksums(folder)
    return made


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.committed()]


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
    with pytest.raises(StorageError, match=r"all checkpoints .* are damaged: restore"):
        store.newest_intact()


@pytest.mark.faults
def test_the_checkpoint_of_a_step_is_found_or_those_that_are_there_are_named(store: CheckpointStore) -> None:
    assert store.intact_of(20) == Checkpoint(20)
    again = write(store, 20)
    assert store.intact_of(20) == again
    truncate(store.folder_of(again) / "__0_0.distcp")
    assert store.intact_of(20) == Checkpoint(20)
    truncate(store.folder_of(Checkpoint(20)) / "__0_0.distcp")
    with pytest.raises(StorageError, match="no intact checkpoint of step 20, but of step 10, 30:"):
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


def test_the_newest_and_the_best_are_kept(store: CheckpointStore) -> None:
    store.prune(Checkpoint(30), num_to_keep=1, best=10)
    assert steps(store) == [10, 30]


def test_what_was_just_written_is_kept_beside_later_ones_that_are_damaged(store: CheckpointStore) -> None:
    store.prune(Checkpoint(20), num_to_keep=1, best=None)
    assert steps(store) == [20, 30]


def test_a_step_that_is_kept_again_replaces_the_first_once_it_is_whole(store: CheckpointStore) -> None:
    again = write(store, 30)
    assert store.committed()[-2:] == [Checkpoint(30), again]
    lose(store.folder_of(again) / CHECKSUMS_FILE)
    assert store.newest_intact() == Checkpoint(30)
    write_checksums(store.folder_of(again))
    assert store.newest_intact() == again
    store.prune(again, num_to_keep=2, best=None)
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
@pytest.mark.parametrize("place", ["", "memory://"])
def test_what_is_written_is_read_wherever_storage_is(place: str, tmp_path: Path) -> None:
    heard: list[str] = []
    store = CheckpointStore(UPath(f"{place}{tmp_path}/run/checkpoints"), lambda: heard.append("read"))
    writer = CheckpointWriter(store, CheckpointConfig(num_to_keep=1), lambda: heard.append("written"))
    for step in (10, 20, 20):
        weight = torch.rand(3, 4)
        parts = {(0, 0): weight[:2], (2, 0): weight[2:]}
        content = {parameter("layer.weight", WEIGHT): Shards((3, 4), parts)}
        writer.save(partial(Snapshot, state_at(step), content), best=10)
    writer.wait()
    newest = store.newest_intact()
    assert store.committed() == [Checkpoint(10), newest] == [Checkpoint(10), Checkpoint(20, 2)]
    assert {*heard} == {"written", "read"}
    export_weights(store.folder_of(newest), tmp_path / "model.safetensors")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "model.safetensors")["layer.weight"], weight)


def test_slow_storage_is_heard_piece_by_piece(tmp_path: Path) -> None:
    heard: list[str] = []
    large, folder = tmp_path / "large", UPath(f"memory://{tmp_path}/slow")
    large.write_bytes(bytes(2**24))
    upload(large, folder / "large", lambda: heard.append("up"))
    with local_copy(folder, lambda: heard.append("down")) as local:
        assert (local / "large").stat().st_size == 2**24
    checksums_of([large], lambda: heard.append("sum"))
    assert all(heard.count(event) >= 4 for event in ("up", "down", "sum"))


@pytest.mark.usefixtures("_process_group")
def test_a_folder_that_cannot_be_made_is_named_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(b"")  # root may write into any folder, but not into a file
    writer = CheckpointWriter(CheckpointStore(UPath(tmp_path / "run" / "checkpoints")), CheckpointConfig())
    writer.save(partial(snapshot_at, 10), best=None)
    with pytest.raises(TrainingError, match=r"checkpoints/step_00000010' cannot be written: .*Not a directory.* free"):
        writer.wait()


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
    writer.save(lambda: Snapshot(state_at(1), {parameter("a", WEIGHT): Shards((ROWS, COLUMNS), parts)}), best=None)
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
    writer.save(lambda: Snapshot(state_at(1), {**content}), best=None)
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
    with pytest.raises(StorageError, match=r"__0_0.distcp' was changed: piece"):
        saved.read_into({parameter("a", WEIGHT): Shards((ROWS, COLUMNS), {(0, 0): torch.zeros(ROWS, COLUMNS)})})


@pytest.mark.usefixtures("_process_group")
def test_a_column_is_read_from_rows(two_halves: tuple[UPath, torch.Tensor]) -> None:
    folder, whole = two_halves
    part = torch.zeros(ROWS, 8)
    SavedParts(VerifiedFolder(folder)).read_into({parameter("a", WEIGHT): Shards((ROWS, COLUMNS), {(0, 512): part})})
    assert torch.equal(part, whole[:, 512:520])


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
    writer.save(partial(snapshot_at, 10), best=None)
    writer.wait()
    assert store.newest_intact() == Checkpoint(10)
    assert len(tries) == 2


@pytest.mark.usefixtures("_process_group")
def test_a_state_that_is_lost_does_not_cost_the_next_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocker = tmp_path / "run"
    blocker.write_bytes(b"")
    store = CheckpointStore(UPath(blocker / "checkpoints"))
    writer = CheckpointWriter(store, CheckpointConfig())
    writer.save(partial(snapshot_at, 10), best=None)
    wait_until(lambda: writer.has_failed)
    blocker.unlink()
    writer.save(partial(snapshot_at, 20), best=None)
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
        writer.save(partial(take, step), best=None)
    writer.wait()
    assert len(alive) == 5


@pytest.mark.usefixtures("_process_group")
def test_metrics_are_stored_before_the_checkpoint_that_a_run_goes_on_from(tmp_path: Path) -> None:
    store, seen = CheckpointStore(UPath(tmp_path)), list[list[int]]()
    writer = CheckpointWriter(store, CheckpointConfig(), before_commit=lambda: seen.append(steps(store)))
    for step in (10, 20):
        writer.save(partial(snapshot_at, step), best=None)
    writer.wait()
    assert seen == [[], [10]]


@pytest.mark.usefixtures("_process_group")
def test_the_best_epoch_whose_checkpoint_is_not_damaged_is_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.start("train", load_recipe("recipes/digits.yaml", ["train.early_stopping={metric: val_loss}"]))
    store = CheckpointStore(run.folder / CHECKPOINTS)
    writer = CheckpointWriter(store, CheckpointConfig(num_to_keep=9, background=False))
    records = []
    for epoch, val_loss in enumerate([0.4, 0.1, 0.3], start=1):
        writer.save(partial(snapshot_at, epoch), best=None)
        records.append(EpochRecord(epoch=epoch, step=epoch, train_loss=1.0, val_loss=val_loss, val_accuracy=0.5,
                                   samples_per_s=1.0))  # fmt: skip
    flip(store.folder_of(Checkpoint(2)) / "__0_0.distcp")
    ending = Ending(
        records=records, stop_request=StopRequest.NONE, step=3, workers=1, resumed_from_step=0, first_step_s=1.0
    )
    outcome = finish_run(run, prepare(run.recipe), ending)
    assert outcome.metrics.model_dump()["best_epoch"] == 3
    assert "checkpoint step_00000002 is damaged and left out" in capsys.readouterr().err
    assert safetensors.torch.load_file(run.folder / WEIGHTS / "model.safetensors")["step"] == 3
    for step in (1, 3):
        flip(store.folder_of(Checkpoint(step)) / "__0_0.distcp")
    with pytest.raises(StorageError, match="no checkpoint of a whole epoch"):
        finish_run(run, prepare(run.recipe), ending)


@pytest.mark.usefixtures("_process_group")
def test_training_goes_on_when_a_checkpoint_is_lost_and_from_the_one_before_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failures, next_of = ["try", "second try"], CheckpointStore.next

    def fail_twice(store: CheckpointStore, step: int) -> Checkpoint:
        if failures:
            raise OSError(f"503 Slow Down, {failures.pop(0)}")
        return next_of(store, step)

    monkeypatch.setattr(CheckpointStore, "next", fail_twice)
    given = ["train.epochs=1", "model.args.width=8", "train.checkpoint={every_steps: 8, num_to_keep: 9}"]
    recipe = load_recipe("recipes/digits.yaml", given)
    data, worker, store = prepare(recipe), start_worker(recipe.train), CheckpointStore(UPath(tmp_path) / CHECKPOINTS)
    ending = train(recipe, data, worker, UPath(tmp_path))
    kept = steps(store)
    assert 8 not in kept
    assert {16, ending.step} <= {*kept}
    assert "503 Slow Down, second try. A later state has been stored since" in capsys.readouterr().err

    flip(store.folder_of(store.committed()[-1]) / "__0_0.distcp")
    again = train(recipe, data, worker, UPath(tmp_path))
    assert again.resumed_from_step == kept[-2]
    assert f"step_{ending.step:08d} is damaged and left out" in capsys.readouterr().err
    assert (store.folder / f"damaged_step_{ending.step:08d}").exists()


@pytest.mark.usefixtures("_process_group")
def test_a_run_that_resumes_within_an_epoch_of_another_order_warns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stops = ["alerts=[{when: step above 1, do: [stop]}]", "train.checkpoint.every_steps=1"]
    recipe = load_recipe("recipes/digits.yaml", ["train.epochs=1", "model.args.width=8", *stops])
    data, worker, store = prepare(recipe), start_worker(recipe.train), CheckpointStore(UPath(tmp_path) / CHECKPOINTS)
    for _ in range(2):
        ending = train(recipe, data, worker, UPath(tmp_path))
    assert "shuffled" not in capsys.readouterr().err
    folder = store.folder_of(store.committed()[-1])
    state = TrainState.model_validate_json((folder / STATE_FILE).read_bytes())
    assert (state.position.epoch, state.position.batches_done) == (1, ending.step)
    (folder / STATE_FILE).write_text(state.model_dump_json(exclude={"epoch_order"}), encoding="utf-8")
    write_checksums(folder)
    train(recipe, data, worker, UPath(tmp_path))
    told = capsys.readouterr().err
    assert f"the checkpoint of step {ending.step} is from a version of Rayloom that shuffled epochs differently" in told


@pytest.mark.usefixtures("_process_group")
def test_an_epoch_is_saved_though_its_last_step_was_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointWriter, "has_failed", True)
    recipe = load_recipe("recipes/digits.yaml", ["train.epochs=1", "model.args.width=8"])
    data, worker, store = prepare(recipe), start_worker(recipe.train), CheckpointStore(UPath(tmp_path) / CHECKPOINTS)
    train(recipe, data, worker, UPath(tmp_path))
    newest = store.newest_intact()
    assert newest is not None
    state = TrainState.model_validate_json((store.folder_of(newest) / STATE_FILE).read_bytes())
    assert newest.number == 2, "the last step was not saved again"
    assert (state.position.epoch, len(state.records)) == (2, 1)


class SwappingOptimizer:
    """Swaps its one group as DeepSpeed does: it has no buffers for a group that is in memory already."""

    def __init__(self) -> None:
        self.fp32_partitioned_groups_flat, self.is_in_memory = [torch.zeros(4)], False

    def _swappable_optimizer_subgroup(self, group: int) -> bool:
        return True

    def _optimizer_states_and_gradient_swap_in(self, group: int) -> None:
        assert not self.is_in_memory, "no buffers are left"
        self.is_in_memory = True

    def _optimizer_states_and_gradient_swap_out(self, group: int) -> None:
        self.is_in_memory = False


def test_a_damaged_checkpoint_leaves_the_swapped_optimizer_ready_for_the_one_before() -> None:
    optimizer = SwappingOptimizer()
    deepspeed, (master,) = SimpleNamespace(optimizer=optimizer), optimizer.fp32_partitioned_groups_flat

    def destinations() -> Iterator[torch.Tensor]:
        with written_to_nvme(deepspeed, master):
            yield master

    def read(is_damaged: bool) -> None:
        for tensor in destinations():
            assert optimizer.is_in_memory
            if is_damaged:
                raise StorageError("piece 3 has another sha256")
            tensor.fill_(7.0)

    with pytest.raises(StorageError, match="piece 3"):
        read(is_damaged=True)
    read(is_damaged=False)
    assert master.tolist() == [7.0] * 4
    assert not optimizer.is_in_memory


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_lost_checkpoint_is_told_at_the_next_sync(is_lost: bool) -> None:
    sync = StepSync(Worker(0, 1, torch.device("cpu")), [lambda: StopRequest.NONE], lambda: is_lost)
    assert sync.run().has_lost_state is is_lost
