"""A run pauses for an alert or for a person, lets its resources go, and goes on where it was."""

import hashlib
import hmac
import json
from collections.abc import Callable
from pathlib import Path

from tests.helpers import result_of, run, steps_of, train_alone, wait_until
from tests.launch import Cluster, Job, Launch, newest_step
from tests.receiver import HttpReceiver

NO_PROGRESS = ["train.optimizer.lr=1.0e-12", "train.epochs=9", "train.early_stopping=null", "name=stuck"]


def test_three_epochs_without_improvement_pause_the_run_and_tell_a_receiver(
    tmp_path: Path, http: Callable[..., HttpReceiver]
) -> None:
    receiver = http(503, 200)
    (tmp_path / "secret").write_text("known to both", encoding="utf-8")
    webhook = {"url": receiver.url, "secret": f"file:{tmp_path / 'secret'}", "retry_wait_s": 0.01}
    rule = {"when": "val_accuracy has not improved for 3 epochs", "do": ["notify", "pause"]}
    told = [f"alerts={json.dumps([rule])}", f"notify={json.dumps({'webhook': webhook})}"]
    paused = train_alone(*NO_PROGRESS, *told)
    assert paused["status"] == "stopped"
    assert paused["metrics"]["paused"]
    assert paused["metrics"]["epochs"] == 4  # the first, and three that brought nothing
    headers, body = receiver.requests[1]
    signed = f"{headers['X-Rayloom-Timestamp']}.".encode() + body
    signature = hmac.new(b"known to both", signed, hashlib.sha256).hexdigest()
    assert headers["X-Rayloom-Signature"] == f"sha256={signature}"
    told_of = json.loads(body)
    assert (told_of["run_id"], told_of["action"], told_of["epoch"]) == (paused["run_id"], "pause", 4)
    resumed = train_alone(*NO_PROGRESS, "train.resume=latest")
    assert resumed["run_id"] == paused["run_id"]
    assert resumed["status"] == "succeeded"
    assert resumed["metrics"]["resumed_from_step"] >= 4 * 22


def test_a_person_pauses_and_resumes(ray: Cluster, launch: Launch) -> None:
    storage = Path(ray.environment["RAYLOOM_STORAGE"])
    job = Job(ray, launch, "paused", "train.epochs=60", "train.early_stopping=null", "train.workers=2")
    wait_until(lambda: newest_step(storage, "paused") > 0, timeout_s=120)
    (folder,) = storage.glob("runs/train/*-paused-*")
    asked = run("rayloom", "pause", folder.name, environment=ray.environment)
    assert asked.returncode == 0, asked.stderr
    paused = job.client.result()
    assert (paused["status"], paused["metrics"]["paused"]) == ("stopped", True), job.output
    assert f"rayloom resume {folder.name}" in asked.stdout
    further = f"train.max_steps={paused['metrics']['steps'] + 30}"
    resumed = run("rayloom", "resume", folder.name, further, environment=ray.environment)
    result = result_of(resumed.stdout)
    assert (result["status"], result["run_id"]) == ("succeeded", folder.name)
    assert result["metrics"]["resumed_from_step"] == paused["metrics"]["steps"]
    assert [each["step"] for each in steps_of(folder)] == list(range(1, result["metrics"]["steps"] + 1))
