"""Commands that look at what lies in storage."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner
from upath import UPath

from app.cli.main import app
from app.cluster.state import MARK, ClusterState
from app.config import load_recipe
from app.reports.lifecycle import lifecycle_page, note_part
from app.reports.run_folder import RunFolder
from app.runs import Outcome, Run
from app.training.records import StoppedTrainMetrics
from tests.helpers import BIN, ROOT


def shown(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def run_of(storage: Path, job: str) -> Run:
    run = Run.start(job, load_recipe(ROOT / "recipes/digits.yaml", [f"storage={storage}"]))
    run.open()
    return run


@pytest.mark.parametrize("command", [("runs", "list"), ("models", "list"), ("data", "list")], ids=" ".join)
def test_an_empty_list_names_the_storage_and_the_way_to_another(command: tuple[str, ...], tmp_path: Path) -> None:
    said = shown(*command, f"--storage={tmp_path}")
    assert f"in {tmp_path}: " in said
    assert "--storage names another storage" in said
    assert json.loads(shown(*command, f"--storage={tmp_path}", "--json")) == []


def test_lists_show_the_storage_of_this_folder_while_no_cluster_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAYLOOM_STORAGE")
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)
    run = run_of(tmp_path / "storage", "train")
    said = CliRunner().invoke(app, ["runs", "list"])
    assert run.run_id in said.stdout
    assert said.stderr == f"in {tmp_path / 'storage'}\n"  # the table alone goes through a pipe


def test_a_paused_run_is_not_shown_as_stopped(tmp_path: Path) -> None:
    for is_paused, word in ((True, "paused"), (False, "stopped")):
        run = run_of(tmp_path, "train")
        run.end(Outcome(StoppedTrainMetrics(steps=3, epochs=1, paused=is_paused), {}, status="stopped"))
        listed = json.loads(shown("runs", "list", f"--storage={tmp_path}", "--json"))
        assert [row["status"] for row in listed if row["run_id"] == run.run_id] == [word]
        assert json.loads(shown("runs", "show", run.run_id, f"--storage={tmp_path}", "--json"))["status"] == word


@pytest.mark.parametrize("command", ["runs show", "runs delete", "stop", "pause", "resume"])
def test_an_empty_id_names_no_run_not_the_only_one(command: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, "train")
    for named in ("", "train/"):
        said = CliRunner().invoke(app, [*command.split(), named, f"--storage={tmp_path}"])
        assert f"no run {named!r}: give a run's id, or its beginning" in str(said.exception)
    assert [file.name for file in run.folder.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("command", ["stop", "pause"])
def test_only_a_run_that_runs_is_asked_to_end(command: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, "train")
    said = CliRunner().invoke(app, [command, run.run_id, f"--storage={tmp_path}"])
    assert f"run {run.run_id} is interrupted: only a running job or training run can be" in str(said.exception)


@pytest.mark.parametrize("number", ["NaN", "Infinity"])
def test_a_number_that_json_does_not_know_is_null(number: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, "train")
    run.end(Outcome(StoppedTrainMetrics(steps=3, epochs=1, paused=True), {}, status="stopped"))
    file = run.folder / "result.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"steps": 3', f'"steps": {number}'), encoding="utf-8")
    said = shown("runs", "show", run.run_id, f"--storage={tmp_path}", "--json")
    assert json.loads(said)["metrics"]["steps"] is None


def test_the_parts_of_a_lifecycle_stand_below_it(tmp_path: Path) -> None:
    run, alone = run_of(tmp_path, "lifecycle"), run_of(tmp_path, "train")
    parts = [run_of(tmp_path, job) for job in ("tune", "train")]
    for part in parts:
        note_part(run.folder, part.job, part.run_id)
    note_part(run.folder, "compile", "20260101-000000-digits-abcd")  # it was refused before it began
    rows = [line for line in shown("runs", "list", f"--storage={tmp_path}").splitlines() if "digits" in line]
    place = next(index for index, row in enumerate(rows) if row.startswith("lifecycle"))
    assert [row.split()[1] for row in rows[place : place + 3]] == [run.run_id, *(part.run_id for part in parts)]
    assert [row[:6] for row in rows[place + 1 : place + 3]] == ["  tune", "  trai"]
    assert any(row.startswith(f"train      {alone.run_id}") for row in rows)
    assert len(rows) == 4
    only = shown("runs", "list", "--job=train", f"--storage={tmp_path}").splitlines()
    assert not [row for row in only if row.startswith(" ")]  # their lifecycle is not listed


def test_status_and_env_are_json_for_programs(tmp_path: Path) -> None:
    cluster = ClusterState(
        id="mine", gcs_port=1, dashboard_port=2, serve_port=9, grpc_port=4, storage="/s", num_cpus=1, runtime=tmp_path
    )
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/cluster.json").write_text(cluster.model_dump_json())
    environment = {**os.environ, "RAYLOOM_HOME": str(tmp_path)}
    with subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: "mine"}) as process:

        def printed(command: str) -> dict[str, object]:
            done = subprocess.run(
                [f"{BIN}/rayloom", command, "--json"], env=environment, capture_output=True, text=True, check=True
            )
            answer: dict[str, object] = json.loads(done.stdout)
            return answer

        found, variables = printed("status"), printed("env")
        process.kill()
    assert (found["dashboard"], found["grpc"], found["storage"]) == ("http://127.0.0.1:2", "127.0.0.1:4", "/s")
    assert (found["supervised"], found["models"], found["open_ports"]) == (False, None, [])
    assert "nothing answers at http://127.0.0.1:9" in str(found["problem"])  # nor does the dashboard
    assert variables["RAY_API_SERVER_ADDRESS"] == "http://127.0.0.1:2"


def test_a_part_that_never_began_is_refused_and_leads_nowhere(tmp_path: Path) -> None:
    run = run_of(tmp_path, "lifecycle")
    note_part(run.folder, "train", "20260101-000000-digits-abcd")
    run.fail("train: data.source 'x.csv' does not exist")
    lifecycle_page(run.folder).write(run.folder / "report.html")
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert RunFolder(UPath(run.folder)).status == "failed"
    assert "refused" in page
    assert "interrupted" not in page
    assert "train/20260101-000000-digits-abcd/report.html" not in page
