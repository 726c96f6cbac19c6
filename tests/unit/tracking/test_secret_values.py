"""Drivers that are given an address of the environment: their errors show no secret in it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel
from upath import UPath

from app.config import load_recipe
from app.runs import Outcome, Run, execute
from app.tracking import __main__ as tracking
from app.tracking.tracked_run import TrackedRun
from app.tuning.storage import locate_study, open_storage
from tests.helpers import ROOT
from tests.postgres import PostgresServer
from tests.receiver import HttpReceiver
from tests.stored_runs import write_run

SECRET = "hunter2"


class Nothing(BaseModel):
    """The metrics of a search that ends once its study is open."""


def stored(folder: Path) -> str:
    return "".join(file.read_text(errors="replace") for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        (f"postgresql+psycopg://guarded:{SECRET}@/postgres?host={{folder}}", "password authentication failed"),
        (f"postgresql+psycopg://user:{SECRET}@127.0.0.1:9/db", "Connection refused"),
        (f"postgresql+psycopg://user:123/{SECRET}@127.0.0.1:9/db", "Connection refused"),
        (f"postgresql+psycopg://user:p@{SECRET}@127.0.0.1:9/db", "percent-encode"),
        (f"postgresql+psycopg://user:p@{SECRET}/x@127.0.0.1:9/db", "percent-encode"),
        (f"postgresql+psycopg://user:p@{SECRET}?x@127.0.0.1:9/db", "percent-encode"),
        (f"postgresql+psycopg://user:p@x:{SECRET}@127.0.0.1:9/db", "is no URL of SQLAlchemy"),
        (f"postgresql+psycopg://127.0.0.1:{SECRET}/db", "is no URL of SQLAlchemy"),
        (f"nosuch://user:{SECRET}@127.0.0.1/db", "Can't load plugin"),
        (SECRET, "is no URL of SQLAlchemy"),
    ],
)
def test_a_search_whose_database_refuses_it_shows_no_secret(
    address: str,
    reason: str,
    postgres: PostgresServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if "{folder}" in address:
        postgres.add_user("guarded", "right")
    monkeypatch.setenv("STUDY", address.format(folder=postgres.url.query["host"]))
    recipe = load_recipe(str(ROOT / "recipes/digits.yaml"), [f"storage={tmp_path}", "tune.storage=env:STUDY"])
    assert recipe.tune is not None

    def search(run: Run) -> Outcome:
        run.open()
        open_storage(locate_study(run.storage, recipe.tune.storage, tmp_path, run.run_id))
        return Outcome(Nothing(), {})

    result = execute(Run.start("tune", recipe), search)
    assert reason in str(result.error)
    assert SECRET not in "".join(capfd.readouterr()) + stored(tmp_path) + result.to_line()


@pytest.fixture
def copied(tmp_path: Path) -> UPath:
    """The folder of a run whose recipe takes the address of MLflow's server from the environment."""
    return write_run(UPath(tmp_path), "20260101-000000-digits-aaaa", "tracking.mlflow=env:SERVER", losses=[2.0, 1.0])


@pytest.mark.parametrize(
    "address",
    [
        f"http://user:{SECRET}@{{server}}",
        f"http://{{server}}/?token={SECRET}",
        f"http://127.0.0.1:9/?token={SECRET}",
        f"http://127.0.0.1:{SECRET}",
    ],
)
def test_clients_of_a_tracking_server_that_refuses_them_log_no_secret(
    address: str,
    copied: UPath,
    http: Callable[..., HttpReceiver],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = http(401).url.removeprefix("http://").partition("/")[0]
    monkeypatch.setenv("SERVER", address.format(server=server))
    (tracker,) = tracking.create_trackers(load_recipe(str(copied / "config.yaml")), copied)
    with pytest.raises(Exception):  # noqa: B017, PT011 - MLflow's, urllib3's and requests' own
        TrackedRun(copied, tracker).finish()
    assert tracker.has_secret_address
    assert SECRET not in "".join(capfd.readouterr()) + caplog.text + stored(Path(copied.path))


def test_the_process_that_copies_a_run_shows_no_secret(copied: UPath) -> None:
    address = f"http://127.0.0.1:9/?token={SECRET}"
    command = [sys.executable, "-m", "app.tracking", copied.path]
    environment = {**os.environ, "SERVER": address}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write("ended\n")
        process.stdin.flush()
        shown = process.stderr.readline()
        process.kill()
    assert shown.endswith("mlflow cannot be reached, and is tried again (MlflowException); the run goes on\n")
    assert SECRET not in shown


@pytest.mark.parametrize(
    "address",
    [
        f"http://user:p@{SECRET}/x@127.0.0.1:9",
        f"postgresql+psycopg://user:p@{SECRET}@127.0.0.1:9/db",
        f"ftp://{SECRET}@127.0.0.1",
        f"http:/{SECRET}@127.0.0.1",
    ],
)
def test_an_address_that_is_no_tracking_server_is_refused_without_it(
    address: str, copied: UPath, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SERVER", address)
    assert not tracking.create_trackers(load_recipe(str(copied / "config.yaml")), copied)
    shown = capfd.readouterr().err
    assert "tracking.mlflow is env:SERVER, which holds no URI such as https" in shown
    assert SECRET not in shown
