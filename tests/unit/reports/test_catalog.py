"""Runs in storage as people list, compare, read and delete them, on a disk and on S3."""

import math
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem
from typer.testing import CliRunner
from upath import UPath

from app.cli.main import app
from app.errors import RayloomError
from app.heartbeat import HEARTBEAT_FILE
from app.pages.content import Chart
from app.reports.catalog import delete_run, find_run, list_runs, recipe_differences
from app.reports.curves import read_curves
from app.run_log import LOG_FILE, keep_log
from app.shared_files import GrowingFile
from app.storage import to_path
from app.telemetry.events import Event
from tests.stored_runs import write_run
from tests.wording import refused

OLDER, NEWER, LIVE = "20260101-000000-digits-aaaa", "20260102-000000-digits-bbbb", "20260103-000000-digits-cccc"
ODD = "20260104-000000-digits-dddd"


@pytest.fixture
def root(storage: str) -> UPath:
    """Storage with a good run, one that failed and one under way."""
    root = to_path(storage)
    write_run(root, OLDER, metrics={"val_loss": 0.25, "plan": {"zero_stage": 1}}, losses=[2.0, 1.0])
    write_run(root, NEWER, "train.optimizer.lr=0.5", status="failed", error="the loss is not finite", losses=[math.nan])
    write_run(root, LIVE, status=None, losses=[3.0])
    return root


def rayloom(root: UPath, *arguments: str) -> str:
    """What the command prints; its refusal, if it refuses."""
    result = CliRunner().invoke(app, [*arguments, "--storage", str(root)])
    if isinstance(result.exception, RayloomError):
        return f"refused: {result.exception}"
    assert result.exception is None, result.exception
    return result.stdout


def test_runs_are_listed_with_how_they_stand_the_newest_first(root: UPath) -> None:
    listed = list_runs(root)
    assert [run.run_id for run in listed] == [LIVE, NEWER, OLDER]
    assert [run.status for run in listed] == ["running", "failed", "succeeded"]
    assert [run.headline for run in listed] == ["", "the loss is not finite", "val_loss 0.25"]
    assert listed[2].began == datetime(2026, 1, 1, tzinfo=UTC)
    assert [run.run_id for run in list_runs(root, limit=1)] == [LIVE]
    assert list_runs(root, recipe="reviews") == []
    assert list_runs(root, job="tune") == []


@pytest.mark.parametrize(("job", "metrics"), [("compile", {"chosen": "fast"}), ("lifecycle", {"train": [1]})])
def test_odd_figures_of_a_run_hide_no_other(root: UPath, job: str, metrics: dict[str, Any]) -> None:
    write_run(root, ODD, job=job, metrics=metrics)
    found = {run.key: run.headline for run in list_runs(root)}
    assert found[f"{job}/{ODD}"] == "the figures in result.json cannot be read"
    assert found[f"train/{NEWER}"] == "the loss is not finite"


def test_a_run_whose_heartbeat_is_old_was_interrupted(tmp_path: UPath) -> None:
    folder = write_run(UPath(tmp_path), LIVE, status=None)
    os.utime(folder / HEARTBEAT_FILE, (time.time() - 60,) * 2)
    assert [run.status for run in list_runs(UPath(tmp_path))] == ["interrupted"]


def test_a_run_is_found_by_the_beginning_of_its_id(root: UPath) -> None:
    assert find_run(root, "20260102").run_id == NEWER
    assert find_run(root, f"train/{OLDER}").run_id == OLDER
    with refused("run.ambiguous"):
        find_run(root, "2026")
    with refused("run.unknown"):
        find_run(root, "nothing")


def test_runs_are_compared_by_recipe_and_result(root: UPath) -> None:
    told = rayloom(root, "runs", "compare", OLDER, NEWER)
    lines = {line.split()[0]: line.split()[1:] for line in told.splitlines()}
    assert lines["train.optimizer.lr"] == ["0.003", "0.5"]
    assert lines["val_loss"] == ["0.25", "–"]
    assert lines["phase_s.backward"] == ["4", "4"]
    assert "train.epochs" not in lines
    assert "the recipes are the same" in rayloom(root, "runs", "compare", OLDER, LIVE)
    assert "give two or more" in rayloom(root, "runs", "compare", OLDER)


def test_differences_name_keys_that_only_some_recipes_have() -> None:
    one, other = {"a": {"b": 1, "c": [1]}, "d": {}}, {"a": {"b": 1, "c": [2]}, "e": 3}
    assert [(found.key, found.values) for found in recipe_differences([one, other])] == [
        ("a.c", ([1], [2])),
        ("d", ({}, "–")),
        ("e", ("–", 3)),
    ]


def test_a_run_is_shown_with_what_happened_in_it(root: UPath) -> None:
    event = Event(kind="rolled_back", message="step 3: the loss of rank 0 is not finite", step=3, epoch=1)
    write_run(root, "20260104-000000-digits-dddd", metrics={"val_loss": 0.5}, events=[event])
    told = rayloom(root, "runs", "show", "20260104")
    assert "rolled back" in told
    assert "step 3: the loss of rank 0 is not finite" in told
    assert "energy" in told
    assert "not measured" in told


def test_a_run_is_deleted_unless_it_is_under_way(root: UPath) -> None:
    assert "is under way" in rayloom(root, "runs", "delete", LIVE)
    assert rayloom(root, "runs", "delete", OLDER, NEWER) == f"deleted train/{OLDER}\ndeleted train/{NEWER}\n"
    assert [run.run_id for run in list_runs(root)] == [LIVE]
    with refused("run.under_way"):
        delete_run(find_run(root, LIVE))


def test_a_growing_file_is_read_on_by_whole_lines_and_anew_once_it_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = GrowingFile(UPath(path))
    assert file.new_lines() == (b"", False)
    path.write_bytes(b"1\n2\n3")
    assert file.new_lines() == (b"1\n2\n", False)
    path.write_bytes(b"1\n2\n3\n4")
    assert file.new_lines() == (b"3\n", False)
    path.write_bytes(b"7\n8\n9\n")
    assert file.new_lines() == (b"7\n8\n9\n", True)


def test_curves_are_read_without_what_is_damaged(root: UPath) -> None:
    folder = find_run(root, OLDER).path
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as torn:
        torn.write('{"step": 7, "reading": {"processes": "many"}}\n{"step": 7, "epo')
    assert read_curves(folder).of_steps["loss"].values == [2.0, 1.0]
    assert read_curves(folder).of_epochs["phase_s.forward"].values == [2.0]


def test_a_value_that_is_no_number_is_a_gap_in_a_chart(root: UPath) -> None:
    curves = read_curves(find_run(root, NEWER).path)
    chart = curves.chart("Loss", "loss", {"training": ("step", "loss")})
    assert isinstance(chart, Chart)
    assert '"y": [null]' in str(chart.json)
    assert curves.chart("MFU", "share", {"MFU": ("step", "mfu")}) is None


def test_what_a_job_and_its_children_print_is_kept_once_the_run_is_open(
    root: UPath, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, opened = find_run(root, OLDER).path, []
    for words in ("first", "second"):
        with keep_log(folder, lambda: bool(opened)):
            os.write(1, f"{words}: before\n".encode())  # print would write past the descriptor, into capfd's own file
            opened.append(words)
            subprocess.run([sys.executable, "-c", f"import sys; print('{words}: child', file=sys.stderr)"], check=True)
            os.write(1, f"{words}: after\n".encode())
    printed = capfd.readouterr()
    assert printed.out == "first: before\nfirst: after\nsecond: before\nsecond: after\n"
    assert printed.err == "first: child\nsecond: child\n"
    kept = (folder / LOG_FILE).read_text()
    assert sorted(kept.splitlines()) == sorted((printed.out + printed.err).splitlines())
    assert rayloom(root, "runs", "logs", OLDER) == kept


def test_the_last_words_of_a_killed_job_are_printed(tmp_path: UPath) -> None:
    script = (
        "import os, signal\nfrom upath import UPath\nfrom app.run_log import keep_log\n"
        f"with keep_log(UPath({str(tmp_path)!r}), lambda: True):\n"
        "    print('last words', flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert killed.returncode == -9
    assert killed.stdout == "last words\n"


def test_a_list_takes_a_request_for_each_job_and_each_listed_run(
    root: UPath, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if root.protocol != "s3":
        pytest.skip("counts requests to S3")
    for day in range(10, 30):
        write_run(root, f"202602{day}-000000-digits-aaaa", metrics={"val_loss": 1.0})
    called: list[str] = []
    original = S3FileSystem._call_s3

    async def call(self: Any, method: str, *arguments: Any, **fields: Any) -> Any:
        called.append(method)
        return await original(self, method, *arguments, **fields)

    monkeypatch.setattr(S3FileSystem, "_call_s3", call)
    fresh = to_path(storage)
    assert len(list_runs(fresh, limit=5)) == 5
    assert len(called) == 2 + 5, called  # the jobs, the runs of one job, and the results
    called.clear()
    known = {run.key: run for run in list_runs(fresh, limit=5)}
    called.clear()
    assert len(list_runs(fresh, limit=5, known=known)) == 5
    assert len(called) == 2, called
