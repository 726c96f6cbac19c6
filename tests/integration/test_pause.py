"""A run pauses for an alert or for a person, lets its resources go, and goes on where it was."""

import hashlib
import hmac
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.config import load_recipe
from tests.helpers import rayloom, records_of, result_of, run, steps_of, train_alone, wait_until
from tests.launch import Cluster, newest_step
from tests.receiver import HttpReceiver

NO_PROGRESS = ["train.optimizer.lr=1.0e-12", "train.epochs=30", "train.early_stopping=null", "name=stuck"]


@pytest.mark.slow
def test_three_epochs_without_improvement_pause_the_run_and_tell_a_receiver(
    tmp_path: Path, http: Callable[..., HttpReceiver]
) -> None:
    receiver = http(503, 200)
    (tmp_path / "secret").write_text("known to both", encoding="utf-8")
    webhook = {"url": receiver.url, "secret": f"file:{tmp_path / 'secret'}", "retry_wait_s": 0.01}
    rule = load_recipe("recipes/reviews.yaml").alerts[0]
    told = [f"alerts=[{rule.model_dump_json(exclude_defaults=True)}]", f"notify={json.dumps({'webhook': webhook})}"]
    paused = train_alone(*NO_PROGRESS, *told)
    assert paused["status"] == "stopped"
    assert paused["metrics"]["paused"]
    (folder,) = (tmp_path / "storage").glob("runs/train/*")
    *before, third, second, last = [record["train_loss"] for record in records_of(folder) if "train_loss" in record]
    assert min(third, second, last) >= min(before), "three epochs brought nothing"
    headers, body = receiver.requests[1]
    signed = f"{headers['X-Rayloom-Timestamp']}.".encode() + body
    signature = hmac.new(b"known to both", signed, hashlib.sha256).hexdigest()
    assert headers["X-Rayloom-Signature"] == f"sha256={signature}"
    told_of = json.loads(body)
    epochs = paused["metrics"]["epochs"]
    assert (told_of["run_id"], told_of["action"], told_of["epoch"]) == (paused["run_id"], "pause", epochs)
    resumed = train_alone(*NO_PROGRESS, "train.resume=latest", f"train.epochs={epochs + 1}")
    assert resumed["run_id"] == paused["run_id"]
    assert resumed["status"] == "succeeded"
    assert resumed["metrics"]["resumed_from_step"] >= 22 * epochs


def test_a_person_pauses_and_resumes(ray: Cluster) -> None:
    storage = Path(ray.environment["RAYLOOM_STORAGE"])
    recipe = ["recipes/digits.yaml", "name=paused", "train.epochs=900", "train.early_stopping=null", "train.workers=2"]
    with ThreadPoolExecutor(1) as thread:
        job = thread.submit(run, "rayloom", "submit", "train", *recipe, environment=ray.environment)
        wait_until(lambda: newest_step(storage, "paused") > 0 or job.done(), timeout_s=120)
        (folder,) = storage.glob("runs/train/*-paused-*")
        asked = rayloom("pause", folder.name, environment=ray.environment)
        assert asked.returncode == 0, asked.stderr
        submitted = job.result()
    assert submitted.returncode == 1, "a compile job after '&&' would use older weights"
    assert submitted.stderr.endswith("was paused or stopped before its end: its log says how to resume\n")
    paused = result_of(submitted.stdout)
    assert (paused["status"], paused["metrics"]["paused"]) == ("stopped", True)
    assert f"rayloom resume {folder.name}" in asked.stdout
    wait_until(ray.is_idle)
    further = [f"train.max_steps={paused['metrics']['steps'] + 3}", "train.plan.zero_stage=3"]
    resumed = run("rayloom", "resume", folder.name, *further, environment=ray.environment)
    result = result_of(resumed.stdout)
    assert (result["status"], result["run_id"]) == ("succeeded", folder.name)
    assert result["metrics"]["resumed_from_step"] == paused["metrics"]["steps"]
    assert result["metrics"]["plan"]["zero_stage"] == 3, "it was 1 before"
    assert [record["step"] for record in steps_of(folder)] == list(range(1, result["metrics"]["steps"] + 1))
