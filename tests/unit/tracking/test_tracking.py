"""Copies of runs: in MLflow's own server, and in the files of Weights & Biases."""

import json
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import wandb
from mlflow.tracking import MlflowClient
from upath import UPath
from wandb.proto.wandb_internal_pb2 import Record

from app.config import WandbConfig, load_recipe
from app.errors import RecipeError
from app.ports import unused
from app.tracking import __main__ as tracking
from app.tracking.mlflow_tracker import MlflowTracker
from app.tracking.process import PARENT_FILE, keep_tracked, require_clients
from app.tracking.tracked_run import TrackedRun, TrialNote
from app.tracking.wandb_tracker import WandbTracker
from tests.helpers import ROOT, rayloom, wait_until
from tests.mlflow_server import MlflowServer, mlflow_server
from tests.stored_runs import add_steps, write_run
from tests.wording import refused

_BLOCK, _ENDS = 32768, (1, 4)
"""Of LevelDB's log: bytes of a block, and the kinds of a part that ends a record."""
RUN_ID = "20260101-000000-digits-aaaa"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as running:
        yield running


@pytest.fixture
def storage(tmp_path: Path) -> UPath:
    return UPath(tmp_path)


@pytest.fixture
def tracker(server: MlflowServer, request: pytest.FixtureRequest) -> MlflowTracker:
    """Of an experiment of the test's own."""
    return MlflowTracker(server.url, request.node.name, register_versions=True)


def end(folder: UPath, status: str = "succeeded", **more: Any) -> None:
    result = {"job": folder.parent.name, "run_id": folder.name, "recipe": "digits", "status": status, "duration_s": 1.0}
    (folder / "result.json").write_text(json.dumps(result | more), encoding="utf-8")


def test_a_run_has_its_recipe_its_numbers_and_its_files(
    storage: UPath, server: MlflowServer, tracker: MlflowTracker, request: pytest.FixtureRequest
) -> None:
    folder = write_run(storage, RUN_ID, "train.epochs=3", losses=[3.0, 2.0, float("nan")], status=None)
    copied = TrackedRun(folder, tracker)
    copied.advance()
    (under_way,) = server.runs(request.node.name)
    assert under_way["status"] == "RUNNING"
    add_steps(folder, [1.0, 0.5], first=4)
    end(folder, metrics={"val_loss": 0.5}, artifacts={"weights": "/somewhere/weights"})
    copied.advance()
    copied.finish()
    (ended,) = server.runs(request.node.name)
    assert (ended["name"], ended["status"]) == (RUN_ID, "FINISHED")
    assert ended["params"]["train.epochs"] == "3"
    assert ended["tags"]["folder"] == str(folder)
    assert ended["tags"]["weights"] == "/somewhere/weights"
    assert ended["metrics"]["result/val_loss"] == 0.5
    assert server.steps(ended["id"], "step/loss") == [1, 2, 3, 4, 5]
    assert server.steps(ended["id"], "epoch/val_loss") == [3]  # the second record is of the same epoch
    files = {file.path for file in server.client.list_artifacts(ended["id"])}
    assert {"config.yaml", "result.json", "events.jsonl"} <= files


def test_names_that_mlflow_refuses_are_copied_under_others(
    storage: UPath, server: MlflowServer, tracker: MlflowTracker, request: pytest.FixtureRequest
) -> None:
    given = {"C++": 1, "C##": 2, "a/../b": 3, "/c": 4, "naïve": 5, "x" * 300: 6, "x" * 299 + "y": 7}
    folder = write_run(storage, RUN_ID, f"model.args={json.dumps(given)}", status=None)
    end(folder, metrics={"val_hit@10": 0.5})
    copied = TrackedRun(folder, tracker)
    copied.advance()
    copied.finish()
    (ended,) = server.runs(request.node.name)
    of_model = {name: value for name, value in ended["params"].items() if name.startswith("model.args.")}
    assert sorted(of_model.values()) == [str(value) for value in given.values()]
    assert of_model["model.args.C_2b__2b_"] == "1"
    assert of_model["model.args.naïve"] == "5"
    assert ended["metrics"]["result/val_hit_40_10"] == 0.5


def test_a_resumed_run_goes_on_with_the_same_copy(
    storage: UPath, server: MlflowServer, tracker: MlflowTracker, request: pytest.FixtureRequest
) -> None:
    folder = write_run(storage, RUN_ID, losses=[3.0, 2.0, 1.0], status="stopped")
    TrackedRun(folder, tracker).finish()
    (stopped,) = server.runs(request.node.name)
    assert stopped["status"] == "KILLED"
    (folder / "metrics.jsonl").unlink()  # it went back to step 2, and then trained on with another recipe
    add_steps(folder, [3.0, 2.0, 1.0, 0.5])
    write = load_recipe(str(folder / "config.yaml"), ["train.epochs=99"])
    (folder / "config.yaml").write_text(write.model_dump_json(), encoding="utf-8")
    end(folder)
    TrackedRun(folder, tracker).finish()
    (resumed,) = server.runs(request.node.name)
    assert (resumed["id"], resumed["status"]) == (stopped["id"], "FINISHED")
    assert server.steps(resumed["id"], "step/loss") == [1, 2, 3, 4]
    assert resumed["tags"]["resumed with train.epochs"] == "99"


def test_trials_and_parts_are_child_runs(
    storage: UPath, server: MlflowServer, tracker: MlflowTracker, request: pytest.FixtureRequest
) -> None:
    lifecycle = write_run(storage, "20260101-000000-digits-cccc", job="lifecycle", status=None)
    search = write_run(storage, RUN_ID, job="tune", status=None)
    for number, state in enumerate(["complete", "failed", "running"]):
        trial = search / "trials" / f"{number:04d}"
        trial.mkdir(parents=True)
        note = TrialNote(values={"train.optimizer.lr": 0.1 * number}, state=state, objectives={"val_loss": 0.5})
        (trial / "trial.json").write_text(note.model_dump_json(), encoding="utf-8")
        add_steps(trial, [2.0, 1.0])
    (search / PARENT_FILE).write_text(str(lifecycle), encoding="utf-8")
    tracked = TrackedRun(search, tracker)
    tracked.finish()
    assert not tracked.is_finished  # the server does not know the lifecycle
    assert not server.runs(request.node.name)
    TrackedRun(lifecycle, tracker).advance()
    tracked.advance()
    end(search)
    tracked.finish()
    runs = {run["name"]: run for run in server.runs(request.node.name)}
    assert runs[RUN_ID]["tags"]["mlflow.parentRunId"] == runs[lifecycle.name]["id"]
    trials = [runs[f"{RUN_ID}/{number:04d}"] for number in range(3)]
    assert {trial["tags"]["mlflow.parentRunId"] for trial in trials} == {runs[RUN_ID]["id"]}
    assert [trial["status"] for trial in trials] == ["FINISHED", "FAILED", "FINISHED"]
    assert [trial["tags"]["status"] for trial in trials] == ["succeeded", "failed", "pruned"]
    assert [trial["params"]["train.optimizer.lr"] for trial in trials] == ["0.0", "0.1", "0.2"]
    assert server.steps(trials[2]["id"], "step/loss") == [1, 2]


def test_steps_that_come_too_fast_are_thinned(
    storage: UPath, server: MlflowServer, tracker: MlflowTracker, request: pytest.FixtureRequest
) -> None:
    folder = write_run(storage, RUN_ID, losses=[1.0] * 1000)
    tracked = TrackedRun(folder, tracker)
    tracked.finish()
    (copied,) = server.runs(request.node.name)
    steps = server.steps(copied["id"], "step/loss")
    assert steps[-1] == 1000
    assert len(steps) <= 80
    assert tracked.count_left_out() == 1000 - len(steps)


def test_a_published_version_enters_the_registry_once(
    storage: UPath, server: MlflowServer, tracker: MlflowTracker
) -> None:
    folder = write_run(storage, RUN_ID, job="compile", status=None)
    end(folder, artifacts={"model": "digits/3"})
    TrackedRun(folder, tracker).finish()
    TrackedRun(folder, tracker).finish()
    (version,) = server.client.search_model_versions("name='digits'")
    assert version.tags == {"rayloom.version": "3", "rayloom.location": str(storage / "models/digits/3")}


def test_what_an_outage_kept_back_is_said_and_copied_later(
    storage: UPath, server: MlflowServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(storage, RUN_ID, "tracking.mlflow=env:TRACKER", "tracking.experiment=outage", losses=[2.0, 1.0])
    (port,) = unused(1)
    monkeypatch.setenv("TRACKER", f"http://127.0.0.1:{port}")
    recipe, ended = load_recipe(str(folder / "config.yaml"), []), threading.Event()
    ended.set()
    began_s = time.monotonic()
    assert not tracking.copy_run(folder, tracking.create_trackers(recipe, folder), ended, timeout_s=1.0)
    assert time.monotonic() - began_s < 30.0, "its client would try again for minutes"
    said = capfd.readouterr().err
    assert str(port) not in said  # the address is a secret
    assert "mlflow lacks up to 3 records and the end of this run" in said
    assert f"rayloom runs track {RUN_ID}" in said
    later = rayloom("runs", "track", RUN_ID, f"--storage={storage}", environment={"TRACKER": server.url})
    assert later.stdout == "copied to mlflow\n", later.stderr
    (copied,) = server.runs("outage")
    assert server.steps(copied["id"], "step/loss") == [1, 2]


def lose_answers(monkeypatch: pytest.MonkeyPatch, *methods: str) -> None:
    """Let the first call of each method of MLflow's client do its work, and then fail."""
    for name in methods:
        original, failed = getattr(MlflowClient, name), list[str]()

        def losing(*arguments: Any, _call: Any = original, _failed: list[str] = failed, **options: Any) -> Any:
            answer = _call(*arguments, **options)
            if not _failed:
                _failed.append("once")
                raise ConnectionError("the answer was lost")
            return answer

        monkeypatch.setattr(MlflowClient, name, losing)


def test_calls_whose_answer_is_lost_leave_one_run_without_further_points(
    storage: UPath,
    server: MlflowServer,
    tracker: MlflowTracker,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write_run(storage, RUN_ID, losses=[2.0, 1.0], metrics={"val_loss": 1.0})
    lost = ["create_run", "log_batch", "update_run", "set_terminated", "log_artifact"]
    lose_answers(monkeypatch, *lost)
    tries = 0
    tracked = TrackedRun(folder, tracker)
    while not tracked.is_finished:
        tries += 1
        with suppress(ConnectionError):
            tracked.finish()
    assert tries == len(lost) + 1
    (copied,) = server.runs(request.node.name)
    for metric, steps in (("step/loss", {1, 2}), ("result/val_loss", {0})):
        points = {(point.step, point.timestamp) for point in server.client.get_metric_history(copied["id"], metric)}
        assert len(points) == len(steps)
        assert {step for step, _ in points} == steps


def test_a_run_ends_while_the_storage_of_files_is_away(
    storage: UPath,
    server: MlflowServer,
    tracker: MlflowTracker,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def upload(client: MlflowClient, run_id: str, file: str) -> None:
        if is_away and file.endswith("result.json"):
            raise ConnectionError("no storage")
        uploaded.append(Path(file).name)
        log_artifact(client, run_id, file)

    log_artifact, uploaded, is_away = MlflowClient.log_artifact, list[str](), True
    monkeypatch.setattr(MlflowClient, "log_artifact", upload)
    tracked = TrackedRun(write_run(storage, RUN_ID, metrics={"val_loss": 1.0}), tracker)
    with pytest.raises(ConnectionError, match="no storage"):
        tracked.finish()
    (copied,) = server.runs(request.node.name)
    assert (copied["status"], copied["metrics"]["result/val_loss"]) == ("FINISHED", 1.0)
    is_away = False
    tracked.finish()
    assert uploaded == ["config.yaml", "result.json", "events.jsonl"], "each once"


@pytest.mark.parametrize(
    ("interpreter", "warning"),
    [
        ("missing", "the process that copies the run cannot be started"),
        ("fails", f"(exit code 3): 'rayloom runs track {RUN_ID}' copies the rest"),
    ],
)
def test_a_copying_process_that_is_lost_is_said_and_fails_no_job(
    storage: UPath,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    interpreter: str,
    warning: str,
) -> None:
    failing = Path(storage.path, "fails")
    failing.write_text("#!/bin/sh\nexit 3\n", encoding="utf-8")
    failing.chmod(0o700)
    monkeypatch.setattr("app.tracking.process.sys.executable", str(failing.with_name(interpreter)))
    folder = write_run(storage, RUN_ID, "tracking.mlflow=http://127.0.0.1:1")
    config = load_recipe(str(folder / "config.yaml"), []).tracking
    with keep_tracked(folder, config, may_write=lambda: True, parent=storage / "lifecycle"):
        pass
    assert warning in capfd.readouterr().err
    assert (folder / PARENT_FILE).read_text() == str(storage / "lifecycle")


def test_the_rest_of_a_part_is_copied_after_its_lifecycle(storage: UPath, server: MlflowServer) -> None:
    part = write_run(storage, RUN_ID, f"tracking.mlflow={server.url}")
    (part / PARENT_FILE).write_text(str(storage / "runs/lifecycle/LIFECYCLE"), encoding="utf-8")
    refused = rayloom("runs", "track", RUN_ID, f"--storage={storage}")
    assert refused.returncode != 0
    assert "is a part of LIFECYCLE, which mlflow does not know yet" in " ".join(refused.stderr.split())


def wandb_records(file: Path) -> Iterator[Record]:
    """Yield the records of a file of W&B: those of LevelDB's log, behind a header of 7 bytes."""
    content, position, parts = file.read_bytes(), 7, b""
    while position + 7 <= len(content):
        room = _BLOCK - position % _BLOCK
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in _ENDS:
            yield Record.FromString(parts)
            parts = b""


def finished_records(file: Path) -> list[Record]:
    """The records of a run that has ended. The client's own process writes the last of them."""
    wait_until(lambda: any(record.HasField("exit") for record in wandb_records(file)))
    return list(wandb_records(file))


def wandb_losses(records: list[Record]) -> list[float]:
    values = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    return [value["step/loss"] for value in values if "step/loss" in value]


def test_files_of_weights_and_biases_have_the_run(storage: UPath) -> None:
    folder = write_run(storage, RUN_ID, losses=[2.0, 1.0], metrics={"val_loss": 1.0})
    TrackedRun(folder, WandbTracker(WandbConfig(project="digits", mode="offline"), folder.path)).finish()
    (file,) = Path(folder.path).glob("wandb/offline-run-*/*.wandb")
    records = finished_records(file)
    (opened,) = [record.run for record in records if record.HasField("run")]
    assert (opened.project, opened.display_name, opened.job_type) == ("digits", RUN_ID, "train")
    assert wandb_losses(records) == [2.0, 1.0]
    assert any(item.key == "train.epochs" for record in records for item in record.config.update)
    assert (file.parent / "files/config.yaml").is_file()


def test_weights_and_biases_gets_all_points_again_if_it_could_not_finish(
    storage: UPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(storage, RUN_ID, losses=[2.0, 1.0], metrics={"val_loss": 1.0})
    finish, failed = wandb.Run.finish, list[str]()

    def finish_late(run: wandb.Run, *arguments: Any, **options: Any) -> None:
        finish(run, *arguments, **options)
        if not failed:
            failed.append("once")
            raise TimeoutError("Timed out finishing run.")  # as the client does, once it has let go of the run

    monkeypatch.setattr(wandb.Run, "finish", finish_late)
    tracker = WandbTracker(WandbConfig(project="digits", mode="offline"), folder.path)
    tracked = TrackedRun(folder, tracker)
    with pytest.raises(TimeoutError):
        tracked.finish()
    assert tracked.count_waiting() == 3
    time.sleep(1.0)  # the client names its folders by the second
    tracked.finish()
    assert tracked.count_waiting() == 0
    files = sorted(Path(folder.path).glob("wandb/offline-run-*/*.wandb"))
    assert [wandb_losses(finished_records(file)) for file in files] == [[2.0, 1.0]] * 2


def test_a_client_that_is_not_installed_is_named_before_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(str(ROOT / "recipes/digits.yaml"), ["tracking.mlflow=https://mlflow.example.org"])
    monkeypatch.setattr("app.tracking.process.find_spec", lambda name: None)
    with refused("package.not_installed", "tracking.mlflow"):
        require_clients(recipe)
    for given in ("mlflow.example.org", "https://me:secret@example.org", "sqlite:///x"):
        with pytest.raises(RecipeError, match="mlflow"):
            load_recipe(str(ROOT / "recipes/digits.yaml"), [f"tracking.mlflow={given}"])
