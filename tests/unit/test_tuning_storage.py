"""Where studies are kept: damaged, locked, on a database server."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url
from sqlalchemy.engine import URL
from upath import UPath

from app.errors import RecipeError, StorageError, TuningError
from app.tuning import storage
from app.tuning.storage import study_url
from tests.helpers import wait_until
from tests.studies import ask, create, locked, resume
from tests.tables import Faults


@pytest.mark.faults
def test_a_damaged_study_is_refused_and_its_backup_named(url: URL, tmp_path: Path, faults: Faults) -> None:
    study = create(url)
    study.complete(ask(study), [0.5], stopped_early=False)
    file = tmp_path / "study.db"
    whole = file.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", None):
        if broken is None:
            file.unlink()
        else:
            file.write_bytes(broken)
        with faults("U4", "the study's file is cut, emptied, removed", "refused; a backup is offered") as fault:
            with pytest.raises(StorageError, match=r"study\.db.*copy its backup .*study\.db\.backup") as refused:
                resume(url)
            assert "new search" in str(refused.value)
            fault.saw("refused, with its backup")
    shutil.copy(tmp_path / "study.db.backup", file)
    assert [each.value for each in resume(url).ended] == [0.5]


def test_storage_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    for given, words in (
        (f"sqlite:///{tmp_path / 'file/study.db'}", "cannot be written"),
        ("postgresql+psycopg://127.0.0.1:9/studies", "refused"),
        ("nosuch://host/studies", "nosuch"),
    ):
        with pytest.raises(StorageError, match=words):
            create(make_url(given))
    with pytest.raises(RecipeError, match="relative path"):
        study_url(UPath(tmp_path), "one", "sqlite:///studies.db")
    with pytest.raises(StorageError, match=r"set tune\.storage to a database"):
        study_url(UPath("memory://x"), "one", None)


@pytest.mark.faults
def test_a_locked_study_is_waited_for(url: URL, faults: Faults) -> None:
    with faults("U2", "the study's file is locked for 3 s", "waited for") as fault:
        study = create(url)
        number = ask(study)
        with locked(url, 3):
            study.complete(number, [0.5], stopped_early=False)
        assert [each.value for each in resume(url).ended] == [0.5]
        fault.saw("the value is in the study")


def test_a_study_that_stays_locked_is_one_clear_error(url: URL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "LOCK_TIMEOUT_S", 1.0)
    study = create(url)
    number = ask(study)
    words = r"locked by another process for 1 s: .*tune\.resume=true"
    with locked(url, 60):
        with pytest.raises(StorageError, match=words):
            study.complete(number, [0.5], stopped_early=False)
        with pytest.raises(StorageError, match=words):
            resume(url)


@pytest.fixture(scope="module")
def postgres() -> Iterator[URL]:
    """A PostgreSQL server of the test's own, on a socket in its folder; PostgreSQL refuses to run as root."""
    initdb, server, ready = (shutil.which(name) for name in ("initdb", "postgres", "pg_isready"))
    if not (initdb and server and ready):
        pytest.skip("PostgreSQL is not installed")
    folder = Path(tempfile.mkdtemp(prefix="rayloom-pg-"))
    user = pwd.getpwnam("nobody").pw_name if os.geteuid() == 0 else None
    if user:
        shutil.chown(folder, user)
    command = [initdb, "--pgdata", str(folder / "data"), "--username", "studies", "--auth", "trust", "--no-sync"]
    subprocess.run(command, check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL)
    options = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={folder}", "-c", "fsync=off"]
    process = subprocess.Popen(
        [server, "-D", str(folder / "data"), *options], user=user, cwd=folder, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: subprocess.run([ready, "--quiet", "--host", folder], check=False).returncode == 0)
        yield make_url(f"postgresql+psycopg://studies@/postgres?host={folder}")
    finally:
        process.send_signal(signal.SIGINT)  # "fast": without waiting for who is connected
        process.wait(20)
        shutil.rmtree(folder)


def test_a_database_server_keeps_several_studies(postgres: URL) -> None:
    first, second = create(postgres, name="first"), create(postgres, name="second")
    for study, value in ((first, 0.25), (second, 0.75)):
        number = ask(study)
        study.report(number, 1, value, cost=-value)
        study.complete(number, [value], stopped_early=False)
    left = ask(first)
    after = resume(postgres, name="first")
    assert [each.value for each in after.ended] == [0.25]
    assert ask(after) == left
    with pytest.raises(TuningError, match="never share"):
        create(postgres, name="second")
