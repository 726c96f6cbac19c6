"""Training with checkpoints: which one a run goes on from, and which one is published."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from upath import UPath

from app.artifacts import CHECKPOINTS, WEIGHTS
from app.checksums import write_checksums
from app.config import CheckpointConfig, load_recipe
from app.errors import StorageError
from app.runs import Run
from app.tasks import prepare
from app.training.checkpoints.reader import export_weights
from app.training.checkpoints.state import TrainState
from app.training.checkpoints.store import Checkpoint, CheckpointStore
from app.training.checkpoints.writer import STATE_FILE, CheckpointWriter
from app.training.coordination.sync import StepSync
from app.training.engine.deepspeed_internals import written_to_nvme
from app.training.plan import TrainingPlan
from app.training.publication import finish_run
from app.training.records import Ending, EpochRecord
from app.training.session import train
from app.training.stop_request import StopRequest
from app.training.worker import Worker, start_worker
from tests.checkpointing import snapshot_at, steps
from tests.helpers import flip
from tests.wording import refused


@pytest.mark.usefixtures("_process_group")
def test_metrics_are_stored_before_the_checkpoint_that_a_run_goes_on_from(tmp_path: Path) -> None:
    store, seen = CheckpointStore(UPath(tmp_path)), list[list[int]]()
    writer = CheckpointWriter(store, CheckpointConfig(), before_commit=lambda: seen.append(steps(store)))
    for step in (10, 20):
        writer.save(partial(snapshot_at, step))
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
        writer.save(partial(snapshot_at, epoch))
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
    with refused("checkpoints.damaged"):
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
    ending = train(TrainingPlan.of(recipe, data), data, worker, UPath(tmp_path))
    kept = steps(store)
    assert 8 not in kept
    assert {16, ending.step} <= {*kept}
    assert "503 Slow Down, second try. A later state has been stored since" in capsys.readouterr().err

    flip(store.folder_of(store.committed()[-1]) / "__0_0.distcp")
    again = train(TrainingPlan.of(recipe, data), data, worker, UPath(tmp_path))
    assert again.resumed_from_step == kept[-2]
    assert f"step_{ending.step:08d} is damaged and left out" in capsys.readouterr().err
    assert (store.folder / f"damaged_step_{ending.step:08d}").exists()


@pytest.mark.usefixtures("_process_group")
def test_a_run_that_resumes_within_an_epoch_of_another_order_warns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stops = ["alerts=[{metric: step, above: 1, do: [stop]}]", "train.checkpoint.every_steps=1"]
    recipe = load_recipe("recipes/digits.yaml", ["train.epochs=1", "model.args.width=8", *stops])
    data, worker, store = prepare(recipe), start_worker(recipe.train), CheckpointStore(UPath(tmp_path) / CHECKPOINTS)
    for _ in range(2):
        ending = train(TrainingPlan.of(recipe, data), data, worker, UPath(tmp_path))
    assert "shuffled" not in capsys.readouterr().err
    folder = store.folder_of(store.committed()[-1])
    state = TrainState.model_validate_json((folder / STATE_FILE).read_bytes())
    assert (state.position.epoch, state.position.batches_done) == (1, ending.step)
    state.epoch_order = "windows-0"
    (folder / STATE_FILE).write_text(state.model_dump_json(), encoding="utf-8")
    write_checksums(folder)
    train(TrainingPlan.of(recipe, data), data, worker, UPath(tmp_path))
    told = capsys.readouterr().err
    assert f"the checkpoint of step {ending.step} is from a version of Rayloom that shuffled epochs differently" in told


@pytest.mark.usefixtures("_process_group")
def test_an_epoch_is_saved_though_its_last_step_was_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointWriter, "has_failed", True)
    recipe = load_recipe("recipes/digits.yaml", ["train.epochs=1", "model.args.width=8"])
    data, worker, store = prepare(recipe), start_worker(recipe.train), CheckpointStore(UPath(tmp_path) / CHECKPOINTS)
    train(TrainingPlan.of(recipe, data), data, worker, UPath(tmp_path))
    newest = store.newest_intact()
    assert newest is not None
    state = TrainState.model_validate_json((store.folder_of(newest) / STATE_FILE).read_bytes())
    assert newest.number == 2, "the last step was not saved again"
    assert (state.position.epoch, len(state.records)) == (2, 1)


@pytest.mark.usefixtures("_process_group")
def test_a_batch_norm_that_is_frozen_in_evaluation_mode_tracks_no_statistics(tmp_path: Path) -> None:
    keys = ["train.max_steps=1", "model.args.width=8", "model.factory=tests.faults.models:FrozenNormCnn"]
    recipe = load_recipe("recipes/digits.yaml", keys)
    data, worker, store = prepare(recipe), start_worker(recipe.train), CheckpointStore(UPath(tmp_path) / CHECKPOINTS)
    train(TrainingPlan.of(recipe, data), data, worker, UPath(tmp_path))
    export_weights(store.folder_of(store.committed()[-1]), tmp_path / "weights")
    assert safetensors.torch.load_file(tmp_path / "weights")["norm.num_batches_tracked"] == 0


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
