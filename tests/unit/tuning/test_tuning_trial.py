"""A trial as the search runs it."""

import gc
import json
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from upath import UPath

from app.artifacts import CHECKPOINTS, TRIALS
from app.checksums import CHECKSUMS_FILE
from app.config import load_recipe
from app.errors import TrainingError
from app.models.factory import blueprint_of
from app.storage import upload
from app.training import session, stop_request
from app.training.checkpoints.snapshot import Snapshot
from app.training.checkpoints.store import CheckpointStore
from app.training.checkpoints.writer import CheckpointWriter
from app.training.coordination.shared_folder import marked
from app.training.stop_request import StopRequest, read_stop_request, request_stop
from app.tuning import trial_actor, trial_training
from app.tuning.trial_actor import TrialActor
from app.tuning.trial_config import LAST_REPORTED_EPOCH, NUMBER, VALUES
from tests.helpers import ROOT, run, wait_until
from tests.wording import refused

Begin = Callable[..., TrialActor]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    small = ["train.epochs=2", "model.args.width=8", "data.validation_fraction=0.8"]
    recipe = load_recipe(ROOT / "recipes/digits.yaml", [*small, "tune.scheduler=pbt"])
    actors = []

    class Actor(TrialActor):
        def setup(self, config: dict[str, Any]) -> None:  # type: ignore[override]
            super().setup(config, recipe.model_dump_json(), str(tmp_path), mark)

    def begin(last_reported_epoch: int = 0, **values: Any) -> TrialActor:
        actor = Actor({NUMBER: 0, VALUES: values, LAST_REPORTED_EPOCH: last_reported_epoch})
        actors.append(actor)
        return actor

    with marked(UPath(tmp_path)) as mark:
        yield begin
    for actor in actors:
        actor.cleanup()
    gc.unfreeze()


def test_an_epoch_that_nobody_heard_of_is_reported_by_the_next_attempt(begin: Begin) -> None:
    first = begin()
    known, lost = first.step(), first.step()
    first.cleanup()  # the study has heard of one epoch
    second = begin(last_reported_epoch=1)
    assert second.step() == lost != known


@pytest.mark.parametrize("keys", [{}, {"train.epochs": 9, "train.max_steps": 7}])
def test_the_last_epoch_comes_with_what_the_trial_came_to(begin: Begin, keys: dict[str, Any]) -> None:
    actor = begin(**keys)
    first, last = actor.step(), actor.step()
    assert "ended" not in first
    assert (last["epoch"], last["ended"], last["stopped_early"]) == (2, True, False)
    assert last["final_values"] == [max(first["value"], last["value"])]


def test_a_trial_that_early_stopping_ends_before_its_last_step_counts_as_stopped_early(begin: Begin) -> None:
    stopping = {"train.early_stopping": {"patience": 1, "min_delta": 1.0}}
    actor = begin(**stopping, **{"train.epochs": 9, "train.max_steps": 40})
    first, ending = actor.step(), actor.step()
    assert "ended" not in first, "a scheduler may pause it"
    assert (ending["epoch"], ending["ended"], ending["stopped_early"]) == (2, True, True)


def test_a_trial_goes_on_after_an_epoch_without_a_number_as_training_does(tmp_path: Path) -> None:
    model = "model={factory: tests.faults.models:FlickeringCnn, args: {width: 8}}"
    keys = ["train.epochs=2", "train.early_stopping=null", "tune.metric=val_loss", "tune.mode=min"]
    recipe = load_recipe(ROOT / "recipes/digits.yaml", [model, *keys])

    class Actor(TrialActor):
        def setup(self, config: dict[str, Any]) -> None:  # type: ignore[override]
            super().setup(config, recipe.model_dump_json(), str(tmp_path), mark)

    with marked(UPath(tmp_path)) as mark:
        actor = Actor({NUMBER: 0, VALUES: {}, LAST_REPORTED_EPOCH: 0})
        assert actor.step()["value"] == math.inf
        final = actor.step()
        actor.cleanup()
    assert final["ended"]
    assert math.isfinite(final["final_values"][0])


def test_the_collector_skips_imported_code_between_trials(begin: Begin) -> None:
    actor = begin()
    actor.step()
    imported = len(gc.get_objects())
    actor.reset_config({NUMBER: 1, VALUES: {}, LAST_REPORTED_EPOCH: 0})
    assert gc.get_freeze_count() > imported / 2
    assert len(gc.get_objects()) < imported / 2


def test_values_that_the_recipe_refuses_are_a_failure_of_the_trial(begin: Begin) -> None:
    actor = begin(**{"train.global_batch_size": 0})
    with refused("recipe.greater_than", "train.global_batch_size"):
        actor.step()


def test_a_trial_that_was_asked_to_stop_is_not_complete(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[StopRequest] = []

    def read(folder: UPath) -> StopRequest:
        reads.append(read_stop_request(folder))
        return reads[-1]

    monkeypatch.setattr(stop_request, "read_stop_request", read)
    monkeypatch.setattr(stop_request, "_POLL_S", 0.01)
    actor = begin()
    actor.step()
    request_stop(UPath(tmp_path) / TRIALS / "0000", StopRequest.STOP)
    wait_until(lambda: reads.count(StopRequest.STOP) > 1)  # so the first is known to the run
    with refused("trial.stopped"):
        actor.step()


def test_trials_continue_from_the_checkpoint_before_one_that_storage_refused(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = CheckpointWriter._write

    def refuse_second(writer: CheckpointWriter, snapshot: Snapshot, best: int | None) -> None:
        if len(snapshot.state.records) == 2 and not snapshot.state.position.batches_done:
            raise TrainingError("no space left")
        write(writer, snapshot, best)

    monkeypatch.setattr(CheckpointWriter, "_write", refuse_second)
    monkeypatch.setattr(trial_actor, "_WRITE_TIMEOUT_S", 10.0)
    actor = begin(**{"train.epochs": 4})
    names: list[str] = []
    for epoch in (1, 2, 3):
        actor.step()
        if epoch == 2:
            monkeypatch.setattr(trial_actor, "_WRITE_TIMEOUT_S", 0.1)
        copy = tmp_path / f"copy-{epoch}"
        copy.mkdir()
        actor.save_checkpoint(str(copy))
        names += [path.name for path in copy.iterdir()]
        monkeypatch.setattr(trial_actor, "_WRITE_TIMEOUT_S", 10.0)
    assert names[0] == names[1] < names[2]


def test_a_partly_copied_checkpoint_is_not_intact(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, copy = begin(), tmp_path / "copy"
    actor.step()
    copy.mkdir()
    actor.save_checkpoint(str(copy))
    actor.cleanup()
    store = CheckpointStore(UPath(tmp_path) / TRIALS / "0000" / CHECKPOINTS)
    saved = store.newest_intact()
    for last in sorted((copy / str(saved and saved.name)).iterdir()):

        def upload_until(file: Path, target: UPath, last: str = last.name) -> None:
            upload(file, target)
            if file.name == last:
                raise OSError("away")

        monkeypatch.setattr(trial_actor, "upload", upload_until)
        with pytest.raises(OSError, match="away"):
            actor.load_checkpoint(str(copy))
        assert store.newest_intact() == (saved if last.name == CHECKSUMS_FILE else None)


def test_an_actor_that_still_stores_its_last_trial_takes_no_other(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, close = threading.Event(), CheckpointWriter.close

    def slowly(writer: CheckpointWriter) -> None:
        stored.wait()
        close(writer)

    monkeypatch.setattr(CheckpointWriter, "close", slowly)
    monkeypatch.setattr(trial_training, "STOP_TIMEOUT_S", 0.1)
    actor = begin()
    actor.step()
    with refused("actor_busy"):
        actor.reset_config({NUMBER: 1, VALUES: {}, LAST_REPORTED_EPOCH: 0})
    stored.set()
    monkeypatch.setattr(trial_training, "STOP_TIMEOUT_S", 30.0)
    assert actor.reset_config({NUMBER: 1, VALUES: {}, LAST_REPORTED_EPOCH: 0})


@pytest.mark.parametrize("stage", [1, 2])
def test_an_actor_frees_the_model_of_its_last_trial(begin: Begin, monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    models: list[weakref.ref[Any]] = []

    def remember(*given: Any, **options: Any) -> Any:
        blueprint = blueprint_of(*given, **options)
        models.append(weakref.ref(blueprint.model))
        return blueprint

    monkeypatch.setattr(session, "blueprint_of", remember)
    actor = begin(**{"train.plan.zero_stage": stage})
    actor.step()
    assert actor.reset_config({NUMBER: 1, VALUES: {}, LAST_REPORTED_EPOCH: 0})
    assert [model() for model in models] == [None]


def test_an_actor_that_trained_with_zero_3_takes_no_other_trial_and_keeps_the_checkpoints(
    begin: Begin, tmp_path: Path
) -> None:
    actor = begin(**{"train.plan.zero_stage": 3})
    actor.step()
    with refused("actor_busy"):
        actor.reset_config({NUMBER: 1, VALUES: {}, LAST_REPORTED_EPOCH: 0})
    assert list((tmp_path / TRIALS / "0000" / CHECKPOINTS).glob("step_*"))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_an_actor_takes_no_more_memory_after_20_trials_than_after_3(tmp_path: Path, stage: int) -> None:
    allocator = {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # returns freed tensors to the system, not to the heap
    done = run("python", "-m", "tests.actor_memory", str(tmp_path), str(stage), environment=allocator)
    assert done.returncode == 0, done.stderr
    resident = json.loads(done.stdout.splitlines()[-1])
    assert resident[19] < 1.05 * resident[2], resident


def test_a_trial_on_a_node_that_does_not_see_the_search_writes_nothing_there(begin: Begin, tmp_path: Path) -> None:
    for mark in tmp_path.glob(".mark-*"):
        mark.unlink()
    with refused("storage.not_shared", "storage"):
        begin().step()
    assert not list(tmp_path.iterdir())
