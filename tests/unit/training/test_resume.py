"""One job trains a run at a time."""

import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from upath import UPath

from app import heartbeat
from app.artifacts import RECIPE_FILE
from app.config import Recipe, dump_recipe, load_recipe
from app.data.prepared import PreparedData
from app.errors import StorageError
from app.heartbeat import HEARTBEAT_FILE
from app.published.weights import read_architecture
from app.runs import CONFIG_FILE, JOB, LOST_JOB, RESULT_FILE, Outcome, Result, Run, execute
from app.shared_files import change
from app.storage import to_path
from app.tasks import prepare
from app.training.plan import TrainingPlan
from app.training.records import StoppedTrainMetrics
from app.training.resume import LATEST, start_or_resume
from app.training.run import open_run, prepare_run
from app.training.stop_request import StopRequest, read_stop_request, request_stop
from tests.helpers import ROOT, wait_until
from tests.wording import refused

DIGITS = ROOT / "recipes/digits.yaml"


def test_a_run_is_its_jobs_from_its_opening_until_its_result_is_kept() -> None:
    run = Run.start("train", load_recipe(DIGITS))
    beat = run.folder / HEARTBEAT_FILE

    def step_of(run: Run, plan: TrainingPlan, data: PreparedData) -> Outcome:
        open_run(run, plan, data)
        return Outcome(StoppedTrainMetrics(steps=1, epochs=0, paused=True), {}, status="stopped")

    def step(run: Run) -> Outcome:
        plan, data = prepare_run(run)
        outcome = step_of(run, plan, data)
        first = beat.read_bytes()
        wait_until(lambda: beat.read_bytes() != first)
        refused = execute(Run.start("train", run.recipe, run.run_id), lambda other: step_of(other, plan, data))
        assert "is being trained right now: pause it with 'rayloom pause" in str(refused.error)
        assert not (run.folder / RESULT_FILE).exists()
        return outcome

    assert execute(run, step).status == "stopped"
    assert (run.folder / RESULT_FILE).exists()
    assert not beat.exists()


def test_a_job_that_fails_before_it_takes_a_run_keeps_the_runs_result() -> None:
    run = Run.start("train", load_recipe(DIGITS))
    run.open()
    run.end(Outcome(StoppedTrainMetrics(steps=1, epochs=0, paused=True), {}, status="stopped"))
    before = (run.folder / RESULT_FILE).read_bytes()

    def fail(_: Run) -> Outcome:
        raise StorageError("the data cannot be read")

    assert execute(Run.start("train", run.recipe, run.run_id), fail).status == "failed"
    assert (run.folder / RESULT_FILE).read_bytes() == before


def test_a_failure_is_recorded_in_a_run_that_another_process_opened_for_its_job() -> None:
    def compile_elsewhere(run: Run) -> Outcome:
        pickle.loads(pickle.dumps(run)).open()
        raise StorageError("the weights were changed")

    run = Run.start("compile", load_recipe(DIGITS))
    result = execute(run, compile_elsewhere)
    assert Result.read(run.folder / RESULT_FILE) == result


@pytest.fixture
def finishing(tmp_path: Path) -> Run:
    """A run that another job finishes in half a second."""
    run = Run.start("train", load_recipe(DIGITS))
    run.folder.mkdir(parents=True)
    (run.folder / CONFIG_FILE).write_text(dump_recipe(run.recipe), encoding="utf-8")
    (run.folder / HEARTBEAT_FILE).write_bytes(b"a beat")

    def finish() -> None:
        time.sleep(0.5)
        result = Result(job="train", run_id=run.run_id, recipe="digits", status="succeeded", duration_s=1.0)
        (run.folder / RESULT_FILE).write_text(result.model_dump_json(), encoding="utf-8")
        (run.folder / HEARTBEAT_FILE).unlink()

    threading.Thread(target=finish).start()
    return run


def test_of_jobs_that_take_a_run_at_once_one_succeeds(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs find the heartbeat of a job that was killed."""
    monkeypatch.setattr(heartbeat, "_INTERVAL_S", 0.05)
    monkeypatch.setattr(heartbeat, "_TIMEOUT_S", 1.0)
    folder = to_path(storage) / "runs/train/run-1"
    folder.mkdir(parents=True)
    (folder / HEARTBEAT_FILE).write_bytes(b"a beat")
    ready, refused = threading.Barrier(4), threading.Semaphore(0)

    def take() -> bool:
        ready.wait()
        try:
            heartbeat.require_not_running(folder)
            with heartbeat.run_lock(folder):
                monkeypatch.setattr(heartbeat, "_TIMEOUT_S", 60.0)  # a busy machine may hold up this one's beats
                return all(refused.acquire(timeout=10.0) for _ in range(3))
        except StorageError:
            refused.release()
            return False

    with ThreadPoolExecutor(4) as pool:
        taken = [pool.submit(take) for _ in range(4)]
    assert sorted(future.result() for future in taken) == [False, False, False, True]
    with heartbeat.run_lock(folder):
        pass  # once the lock is released, another job can take it at once


def test_a_job_takes_a_run_although_the_response_to_its_write_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change_twice(path: UPath, changed: Callable[[bytes], bytes]) -> None:
        change(path, changed)
        change(path, changed)  # the driver's retry fails because the file changed, so it is read again

    monkeypatch.setattr(heartbeat, "change", change_twice)
    with heartbeat.run_lock(UPath(tmp_path)):
        assert heartbeat.read(UPath(tmp_path) / HEARTBEAT_FILE)


def test_a_job_keeps_its_result_although_storage_fails_at_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("away")

    def step(run: Run) -> Outcome:
        run.hold(heartbeat.run_lock(run.folder))
        run.open()
        monkeypatch.setattr(type(run.folder), "unlink", refuse)
        return Outcome(StoppedTrainMetrics(steps=1, epochs=0, paused=True), {}, status="stopped")

    assert execute(Run.start("train", load_recipe(DIGITS)), step).status == "stopped"
    assert "heartbeat' cannot be removed (OSError: away)" in capsys.readouterr().err


def resuming(what: str) -> Recipe:
    return load_recipe(DIGITS, [f"train.resume={what}"])


def test_a_run_that_finishes_while_another_job_waits_is_not_begun_again(finishing: Run) -> None:
    with refused("resume.finished", "train.resume"):
        start_or_resume("train", resuming(finishing.run_id))


def test_after_the_latest_run_has_finished_a_new_one_starts(finishing: Run) -> None:
    assert start_or_resume("train", resuming(LATEST)).run_id != finishing.run_id


@pytest.mark.parametrize("before", [[], ["train.prune.weights=/v"]], ids=["whole", "pruned from others"])
def test_a_run_is_not_resumed_with_other_weights_to_prune(before: list[str]) -> None:
    run = Run.start("train", load_recipe(DIGITS, before))
    run.open()
    with refused("resume.differs", "train.resume"):
        start_or_resume("train", load_recipe(DIGITS, ["train.prune.weights=/w", f"train.resume={run.run_id}"]))


@pytest.mark.parametrize(
    ("keys", "changed"),
    [
        ([], None),
        (["train.optimizer.lr=1.0"], None),
        (["train.epochs=9"], "train.epochs"),
        (["train.max_steps=9", "train.schedule.name=linear"], "train.max_steps and train.schedule"),
    ],
)
def test_a_resumed_run_says_that_its_schedule_changes(
    keys: list[str], changed: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.start("train", load_recipe(DIGITS))
    run.open()
    start_or_resume("train", load_recipe(DIGITS, [*keys, f"train.resume={run.run_id}"]))
    told = f"the learning rate continues as if the run had started with the new {changed}\n" if changed else ""
    assert capsys.readouterr().out == f"run {run.run_id} goes on\n{told}"


def opened(job: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that a job on a cluster has opened and not finished."""
    monkeypatch.setenv(JOB, job)
    run = Run.start("train", load_recipe(DIGITS))
    run.open()
    monkeypatch.delenv(JOB)
    return run


def test_a_job_in_place_of_a_lost_one_resumes_only_the_run_that_the_lost_one_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost, other = opened("train-1", monkeypatch), opened("train-2", monkeypatch)
    monkeypatch.setenv(LOST_JOB, "train-1")
    assert start_or_resume("train", resuming(LATEST)).run_id == lost.run_id
    monkeypatch.setenv(LOST_JOB, "train-3")  # it was still waiting for its turn
    assert start_or_resume("train", resuming(LATEST)).run_id not in (lost.run_id, other.run_id)
    monkeypatch.setenv(JOB, "train-1-again")
    lost.open()
    monkeypatch.setenv(LOST_JOB, "train-1")
    assert start_or_resume("train", resuming(LATEST)).run_id not in (lost.run_id, other.run_id)


def test_of_two_jobs_that_wait_to_resume_a_run_the_second_does_not_train_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = opened("train-1", monkeypatch)
    waiting = start_or_resume("train", resuming(run.run_id))
    plan, data = prepare_run(waiting)
    done = run.end(Outcome(StoppedTrainMetrics(steps=1, epochs=0, paused=True), {}))

    def step(run: Run) -> Outcome:
        open_run(run, plan, data)
        raise AssertionError("it was opened")

    assert f"run {run.run_id} has finished while this job waited" in str(execute(waiting, step).error)
    assert Result.read(run.folder / RESULT_FILE) == done


def test_a_request_to_pause_a_run_that_waits_for_its_turn_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    run = opened("train-1", monkeypatch)
    request_stop(run.folder, StopRequest.PAUSE)
    plan, data = prepare_run(run)
    resumed = start_or_resume("train", resuming(run.run_id))
    with resumed.until_result:
        open_run(resumed, plan, data)
    assert read_stop_request(run.folder) is StopRequest.NONE, "the run was paused by this request"
    waiting = start_or_resume("train", resuming(run.run_id))
    request_stop(run.folder, StopRequest.PAUSE)
    with waiting.until_result:
        open_run(waiting, plan, data)
    assert read_stop_request(run.folder) is StopRequest.PAUSE


@pytest.mark.parametrize(
    ("section", "given", "found"),
    [
        ("teacher: {model: ", "reviews", "reviews/3"),
        ("teacher: {model: ", "reviews/4", "reviews/4"),
        ("teacher: {model: ", "review", "review"),
        ("curriculum: {by: loss, model: ", "reviews", "reviews/3"),
    ],
)
def test_a_resumed_run_keeps_the_version_of_a_model_that_is_given_by_name(section: str, given: str, found: str) -> None:
    run = Run.start("train", load_recipe(DIGITS, [f"train={{{section}reviews/3}}}}"]))
    run.open()
    keys = [f"train={{{section}{given}}}, resume: {run.run_id}}}"]
    resumed = start_or_resume("train", load_recipe(DIGITS, keys)).recipe
    assert resumed.value_of(f"train.{section.partition(':')[0]}.model") == found


def test_what_was_trained_with_a_plan_that_is_refused_now_still_loads(tmp_path: Path) -> None:
    plan = ["train.workers=2", "train.plan.pipeline=2", "train.plan.zero_stage=1", "train.device=gpu"]
    run = Run.start("train", load_recipe(DIGITS, plan))
    run.folder.mkdir(parents=True)
    for file in (tmp_path / RECIPE_FILE, run.folder / CONFIG_FILE):
        file.write_text(dump_recipe(run.recipe).replace("precision: fp32", "precision: fp16"), encoding="utf-8")
    prepare(run.recipe).save_codec(to_path(tmp_path))
    assert read_architecture(tmp_path).recipe.train.precision == "fp16"
    resuming = [*plan, f"train.resume={run.run_id}"]
    assert start_or_resume("train", load_recipe(DIGITS, resuming)).run_id == run.run_id
    with refused("plan.cannot_run", "train.plan"):
        load_recipe(DIGITS, [*resuming, "train.precision=fp16"])
