"""Drivers that are given an address of the environment: their errors show no secret in it."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel
from upath import UPath

from app.config import load_recipe
from app.runs import Outcome, Run, execute
from app.tracking import __main__ as tracking
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


UNREACHED, NO_SERVER = "mlflow cannot be reached", "is env:SERVER, which holds no URI such as"


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        (f"http://user:{SECRET}@{{server}}", UNREACHED),
        (f"http://{{server}}/?token={SECRET}", UNREACHED),
        (f"http://127.0.0.1:9/?token={SECRET}", UNREACHED),
        (f"http://127.0.0.1:{SECRET}", UNREACHED),
        (f"http://user:p@{SECRET}/x@{{server}}", NO_SERVER),
        (f"postgresql+psycopg://user:p@{SECRET}@127.0.0.1:9/db", NO_SERVER),
        (f"ftp://{SECRET}@127.0.0.1", NO_SERVER),
        (f"http:/{SECRET}@127.0.0.1", NO_SERVER),
    ],
)
def test_a_run_whose_tracking_server_refuses_it_shows_no_secret(
    address: str,
    reason: str,
    tmp_path: Path,
    http: Callable[..., HttpReceiver],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = write_run(UPath(tmp_path), "20260101-000000-digits-aaaa", "tracking.mlflow=env:SERVER", losses=[2.0, 1.0])
    server = http(401).url.removeprefix("http://").partition("/")[0]
    monkeypatch.setenv("SERVER", address.format(server=server))
    ended = threading.Event()
    ended.set()
    trackers = tracking.create_trackers(load_recipe(str(folder / "config.yaml")), folder)
    tracking.copy_run(folder, trackers, ended, timeout_s=2.0)
    shown = "".join(capfd.readouterr())
    assert reason in shown
    assert SECRET not in shown + caplog.text + stored(tmp_path)
