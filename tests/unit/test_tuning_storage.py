"""Where studies are kept: damaged, locked, on a database server."""

import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import make_url
from sqlalchemy.engine import URL
from upath import UPath

from app.errors import RecipeError, StorageError, TuningError
from app.tuning import storage
from app.tuning.storage import open_storage, study_url
from tests.postgres import PostgresServer
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


@pytest.fixture
def nobody() -> Iterator[Path]:
    """While the test runs this process has no rights but in its folder, which root would have everywhere."""
    folder = Path(tempfile.mkdtemp(prefix="rayloom-nobody-"))
    user, before = pwd.getpwnam("nobody").pw_uid, os.geteuid()
    if before == 0:
        os.chown(folder, user, -1)
        os.seteuid(user)
    yield folder
    os.seteuid(before)
    shutil.rmtree(folder)


@pytest.mark.faults
def test_a_study_that_cannot_be_written_is_refused(nobody: Path, faults: Faults) -> None:
    with faults("U4", "the study's file is read-only", "refused, with the file") as fault:
        url = make_url(f"sqlite:///{nobody / 'study.db'}")
        open_storage(url)
        (nobody / "study.db").chmod(0o400)
        with pytest.raises(StorageError, match=r"study\.db' cannot be written \(Permission denied\): check its rights"):
            open_storage(url)
        fault.saw("refused, with the file")


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


def test_a_database_server_keeps_several_studies(postgres: PostgresServer) -> None:
    first, second = create(postgres.url, name="first"), create(postgres.url, name="second")
    for study, value in ((first, 0.25), (second, 0.75)):
        number = ask(study)
        study.report(number, 1, value, cost=-value)
        study.complete(number, [value], stopped_early=False)
    left = ask(first)
    after = resume(postgres.url, name="first")
    assert [each.value for each in after.ended] == [0.25]
    assert ask(after) == left
    with pytest.raises(TuningError, match="never share"):
        create(postgres.url, name="second")


@pytest.mark.faults
def test_a_database_server_that_restarts_is_waited_for(postgres: PostgresServer, faults: Faults) -> None:
    with faults("U2", "the study's PostgreSQL server restarts", "waited for") as fault:
        study = create(postgres.url, name="restarted")
        number = ask(study)
        postgres.stop()
        with ThreadPoolExecutor(1) as pool:
            completing = pool.submit(study.complete, number, [0.5], stopped_early=False)
            with pytest.raises(TimeoutError):
                completing.result(timeout=1.0)  # it waits
            postgres.start()
            completing.result()
        assert [each.value for each in resume(postgres.url, name="restarted").ended] == [0.5]
        fault.saw("the value is in the study")
