"""What jobs refuse whatever the cluster is."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

import jobs._shards
import jobs.lifecycle
from app.compile.run import compile_model
from app.config import Recipe, load_recipe
from app.heartbeat import run_lock
from app.runs import JOB, LOST_JOB, Outcome, Run, execute
from app.training.resume import start_or_resume
from app.training.stop_request import StopRequest, read_stop_request, request_stop
from jobs._runner import main, on_sigterm
from jobs.deploy import deploy
from jobs.lifecycle import lifecycle, require_no_request
from jobs.train import train
from jobs.tune import tune
from tests.helpers import ROOT, result_of
from tests.wording import refused

NOTHING_LIVE = "tune.space=tests.faults.troubled:sizes"
DIGITS, STDLIB = str(ROOT / "recipes/digits.yaml"), str(ROOT / "recipes/stdlib_gpt.yaml")


@pytest.fixture
def _without_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the cluster checks, because these tests have none: see ``tests/e2e/test_jobs_by_hand.py``."""
    monkeypatch.setattr(jobs._shards, "connect", lambda: None)
    monkeypatch.setattr(jobs.lifecycle, "check_later_steps", lambda run: None)


@pytest.mark.parametrize(
    ("job", "arguments", "code", "words"),
    [
        ("train", ["recipes/nothing.yaml"], 2, "recipes/nothing.yaml"),
        ("train", [DIGITS, "train.epochs=many"], 2, "train.epochs"),
        ("train", [DIGITS, "storage=somewhere"], 2, "relative path"),
        ("train", [DIGITS, "data.source=/nowhere.csv"], 1, "/nowhere.csv"),
        ("train", [DIGITS, "train.global_batch_size=4096"], 1, "the training split has 1423 samples"),
        ("train", [STDLIB, "train.linear_baseline=true"], 2, "train.linear_baseline is True, which task"),
        ("train", [DIGITS, "model.factory=app.models.image:resnet"], 1, "'resnet50'"),
        ("train", [DIGITS, "task=app.models.image:resnet50"], 1, "expected a subclass of app.tasks.Task"),
        ("compile", [DIGITS, "name=unknown"], 1, "run jobs.train first"),
        ("compile", [DIGITS, "compile.weights=/nowhere"], 1, "/nowhere"),
        ("compile", [STDLIB, "compile.engines=[onnxruntime]"], 1, "does not generate tokens: name openvino_genai"),
        ("compile", [DIGITS, "compile.engines=[openvino_genai]"], 1, "which generates tokens, and task image-class"),
        ("compile", [DIGITS, "compile.engines=[openvino,tensorrt]"], 1, "compile.engines"),
        ("lifecycle", [STDLIB, "compile.precisions=[bf16]"], 1, "on the CPU in fp32, int8, int4: leave it out"),
        ("lifecycle", [DIGITS, "compile.precisions=[int4]"], 1, "names int4, which only language models have"),
        ("lifecycle", [DIGITS, "compile.precisions=[fp8]"], 1, "compile.precisions name fp8"),
        ("tune", [DIGITS, "tune=null"], 1, "has no tune section"),
        ("tune", [DIGITS, "tune.space=tune_spaces.image:spaces"], 1, "did you mean 'space'?"),
        ("tune", [DIGITS, "tune.space=tune_spaces.text:space"], 1, "no such key"),
        ("tune", [DIGITS, "tune.storage=sqlite:///studies.db"], 1, "is a relative path"),
        ("tune", [DIGITS, "tune.workers=2", "tune.scheduler=pbt"], 1, "to asha, or tune.workers to 1"),
        ("tune", [DIGITS, "tune.scheduler=pbt", "tune.concurrent=1"], 2, "set trials and concurrent above 1"),
        ("tune", [DIGITS, "tune.scheduler=pbt", NOTHING_LIVE], 1, "has no key that can change during training"),
        ("deploy", [DIGITS, "name=unknown"], 1, "'rayloom submit compile RECIPE' makes one"),
        ("deploy", [DIGITS, "serve.version=99"], 1, "has no model 'digits'"),
    ],
)
@pytest.mark.usefixtures("_without_cluster")
def test_what_cannot_work_is_refused_and_leaves_nothing_but_prepared_data(
    job: str, arguments: list[str], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {"train": train, "tune": tune, "compile": compile_model, "deploy": deploy, "lifecycle": lifecycle}
    step = steps[job]
    assert main(job, step, arguments) == code
    printed = capsys.readouterr()
    result = result_of(printed.out)
    assert result["status"] == "failed"
    assert words in result["error"]
    assert printed.err.strip() == f"error: {result['error']}"
    assert {path.name for path in (tmp_path / "storage").glob("*")} <= {"data"}


@pytest.mark.usefixtures("_without_cluster")
def test_a_resumed_lifecycle_takes_only_the_found_values_and_only_of_its_own_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Found(BaseModel):
        best_trial: int
        best_params: dict[str, float]

    def search(run: Run) -> Outcome:
        run.open()
        return Outcome(Found(best_trial=3, best_params={"train.optimizer.lr": 0.0123}), {"best_recipe": DIGITS})

    trained: list[Recipe] = []
    monkeypatch.setattr(
        jobs.lifecycle, "start_or_resume", lambda job, recipe: trained.append(recipe) or start_or_resume(job, recipe)
    )
    keys = [f"storage={tmp_path / 'storage'}", "train.resume=unknown"]
    recipe = load_recipe(DIGITS, keys)
    own, others, before = Run.start("tune", recipe), Run.start("tune", recipe), Run.start("lifecycle", recipe)
    assert {execute(run, search).status for run in (own, others)} == {"succeeded"}
    before.open()
    (before.folder / "search").write_text(own.run_id, encoding="utf-8")
    changed = load_recipe(DIGITS, [*keys, "compile.gates.min_score=0.9", "train.epochs=7", "train.optimizer.lr=0.1"])
    after = Run.start("lifecycle", changed)
    assert "no such run" in str(execute(after, lifecycle).error)  # training, after the search
    assert (after.folder / "search").read_text(encoding="utf-8") == own.run_id
    (used,) = trained
    assert (used.compile.gates, used.train.epochs) == (changed.compile.gates, 7)
    assert used.train.optimizer.lr == 0.0123
    assert str(used.tuned_from) == f"trial 3 of {own.run_id}"
    assert len(list(own.folder.parent.iterdir())) == 2


@pytest.mark.usefixtures("_without_cluster")
def test_a_lifecycle_that_goes_on_starts_a_new_search_if_its_own_failed_before_it_was_opened(tmp_path: Path) -> None:
    refused = "tune.storage=sqlite:///relative.db"
    recipe = load_recipe(DIGITS, [f"storage={tmp_path / 'storage'}", "train.resume=latest", refused])
    failed, before = Run.start("tune", recipe), Run.start("lifecycle", recipe)
    with run_lock(failed.folder):
        pass  # the first copy of the study fails
    failed.fail("the study cannot be written")
    before.open()
    (before.folder / "search").write_text(failed.run_id, encoding="utf-8")
    after = Run.start("lifecycle", recipe)
    assert "is a relative path" in str(execute(after, lifecycle).error)
    assert (after.folder / "search").read_text(encoding="utf-8") != failed.run_id


def test_a_job_that_is_told_to_stop_asks_its_training_to_and_no_longer_once_that_has_ended(
    tmp_path: Path,
) -> None:
    run = Run.start("train", load_recipe(DIGITS, [f"storage={tmp_path}"]))
    before = signal.getsignal(signal.SIGTERM)
    with on_sigterm(lambda: request_stop(run.folder, StopRequest.STOP), "keeping the state"):
        require_no_request(run)
        os.kill(os.getpid(), signal.SIGTERM)
    assert read_stop_request(run.folder) is StopRequest.STOP
    assert signal.getsignal(signal.SIGTERM) is before
    with refused("stop.too_late"):
        require_no_request(run)


def test_a_job_knows_the_lost_job_that_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = '{"metadata": {"job_submission_id": "train-1-again", "rayloom_lost_job": "train-1"}}'
    monkeypatch.setattr(os, "environ", {**os.environ, "RAY_JOB_CONFIG_JSON_ENV_VAR": metadata})
    assert main("train", train, ["recipes/nothing.yaml"]) == 2
    assert (os.environ[JOB], os.environ[LOST_JOB]) == ("train-1-again", "train-1")


def test_a_job_does_not_look_for_garbage_when_its_process_ends() -> None:
    code = "class Loop:\n def __del__(self): print('freed')\nloop = Loop()\nloop.itself = loop\n"
    ended = [
        subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
        for head in ("", "import jobs\n")
    ]
    assert ended == ["freed\n", ""]
