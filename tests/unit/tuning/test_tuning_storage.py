"""Storage of studies: damaged, locked, on an object store, on a database server."""

import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from ray import cloudpickle
from sqlalchemy import make_url
from sqlalchemy.engine import URL
from upath import UPath

from app.errors import StorageError, TuningError
from app.tuning import snapshots, storage
from app.tuning.budget import SearchBudget
from app.tuning.search import remove_lost_trials
from app.tuning.snapshots import Scratch, Snapshots, keep_snapshots, scratch_folder
from app.tuning.storage import StudyLocation, locate_study, open_storage
from app.tuning.study_callback import StudyCallback
from app.tuning.table import Table
from tests.helpers import wait_until
from tests.postgres import PostgresServer
from tests.studies import MAX_TRIALS, ask, create, locked, ray_trial, recipe_with, resume
from tests.tables import Faults
from tests.wording import refused


@pytest.mark.faults
def test_a_damaged_study_is_refused_and_its_backup_named(url: URL, memory: Path, faults: Faults) -> None:
    study = create(url)
    with keep_snapshots(StudyLocation(url)):
        study.complete(ask(study), [0.5], stopped_early=False)
    file = memory / "study.db"
    whole = file.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", None):
        if broken is None:
            file.unlink()
        else:
            file.write_bytes(broken)
        with faults("U4", "the study's file is cut, emptied, removed", "refused; a backup is offered") as fault:
            with refused("study.damaged"):
                resume(url)
            fault.saw("refused, with its backup")
    shutil.copy(memory / "study.db.backup", file)
    assert [trial.value for trial in resume(url).ended] == [0.5]


@contextmanager
def without_root_rights(file: Path) -> Iterator[None]:
    """Give ``file`` to nobody, and let this process have only nobody's rights: root may write any file.

    The block must not import or read what lies in the clone, which nobody may not be able to read.
    """
    user, before = pwd.getpwnam("nobody").pw_uid, os.geteuid()
    if before == 0:
        os.chown(file, user, -1)
        os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture
def readable() -> Iterator[Path]:
    """A folder that every user can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="rayloom-study-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.faults
def test_a_study_that_cannot_be_written_is_refused(readable: Path, faults: Faults) -> None:
    with faults("U4", "the study's file is read-only", "refused, with the file") as fault:
        file = readable / "study.db"
        location = StudyLocation(make_url(f"sqlite:///{file}"))
        open_storage(location)
        file.chmod(0o400)
        words = r"study\.db' cannot be written \(Permission denied\): check its rights"
        with without_root_rights(file), pytest.raises(StorageError, match=words):
            open_storage(location)
        fault.saw("refused, with the file")


def test_storage_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with refused("study.not_written"):
        create(make_url(f"sqlite:///{tmp_path / 'file/study.db'}"))
    for given in ("postgresql+psycopg://127.0.0.1:9/studies", "nosuch://host/studies"):
        with refused("study.not_reached", "tune.storage"):
            create(make_url(given))
    with refused("path.relative", "tune.storage"):
        locate_study(UPath(tmp_path), "sqlite:///studies.db", tmp_path, "one")


@pytest.mark.faults
def test_a_locked_study_is_waited_for(url: URL, faults: Faults) -> None:
    with faults("U2", "the study's file is locked for a second", "waited for") as fault:
        study = create(url)
        number = ask(study)
        with locked(url, 1):
            study.complete(number, [0.5], stopped_early=False)
        assert [trial.value for trial in resume(url).ended] == [0.5]
        fault.saw("the value is in the study")


def test_a_study_that_stays_locked_is_one_clear_error(url: URL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "LOCK_TIMEOUT_S", 0.6)
    study = create(url)
    number = ask(study)
    with locked(url, 60):
        with refused("study.locked"):
            study.complete(number, [0.5], stopped_early=False)
        with refused("study.locked"):
            resume(url)


def test_a_database_server_keeps_several_studies(postgres: PostgresServer) -> None:
    first, second = create(postgres.url, name="first"), create(postgres.url, name="second")
    for study, value in ((first, 0.25), (second, 0.75)):
        number = ask(study)
        study.report(number, 1, value, cost=(-value, 0.0))
        study.complete(number, [value], stopped_early=False)
    left = ask(first)
    after = resume(postgres.url, name="first")
    assert [trial.value for trial in after.ended] == [0.25]
    assert ask(after) == left
    with refused("study.taken"):
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
        assert [trial.value for trial in resume(postgres.url, name="restarted").ended] == [0.5]
        fault.saw("the value is in the study")


@pytest.fixture
def bucket() -> Iterator[UPath]:
    """Storage that is not on disk."""
    root = UPath("memory://bucket")
    yield root
    root.fs.rm(root.path, recursive=True)


def location_on(machine: Path, bucket: UPath, name: str = "one") -> StudyLocation:
    """Return the location of a study in the bucket, for a search on a machine with this disk."""
    machine.mkdir(exist_ok=True)
    return locate_study(bucket, None, machine, name)


def test_a_study_on_an_object_store_goes_on_on_another_machine(
    bucket: UPath, memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = location_on(memory / "lost", bucket)
    study = create(lost)
    with keep_snapshots(lost):
        study.report(number := ask(study), 1, 0.5, cost=(-0.5, 0.0))
        study.complete(number, [0.5], stopped_early=False)
        running = ask(study)
    for unknown in (ask(study), ask(study)):  # no snapshot was taken after these trials
        (memory / f"trials/{unknown:04d}").mkdir(parents=True)
    for known in (number, running):
        (memory / f"trials/{known:04d}").mkdir()
    shutil.rmtree(memory / "lost")

    after = resume(location_on(memory / "new", bucket))
    assert [(trial.value, trial.intermediate_values) for trial in after.ended] == [(0.5, {1: 0.5})]
    remove_lost_trials(after, UPath(memory / "trials"))
    assert sorted(folder.name for folder in (memory / "trials").iterdir()) == ["0000", "0001"]
    assert capsys.readouterr().out.count("its training is lost") == 2
    assert [ask(after), ask(after)] == [running, 2]
    with refused("study.taken"):
        create(location_on(memory / "second", bucket))


def test_a_copy_knows_which_values_a_trial_took_over_before_the_trial_goes_on(
    bucket: UPath, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "_INTERVAL_S", 999.0)
    lost, population = location_on(memory / "lost", bucket), ("tune.scheduler=pbt",)
    study, config = create(lost, *population), recipe_with(*population).tune
    assert config is not None
    budget = SearchBudget(config.stop, config.objectives[0], epochs=0, seconds=0.0)
    with keep_snapshots(lost) as back_up:
        callback = StudyCallback(study, config, UPath(memory), budget, Table(config.objectives, 3, 4), None, back_up)
        cloudpickle.dumps(callback)  # as Ray Tune does when it begins
        proposal = study.ask(MAX_TRIALS)
        assert proposal is not None
        others = {**proposal.values, "train.optimizer.lr": 0.0123}
        callback.on_trial_start(trial=ray_trial(replace(proposal, values=others)))
        again = resume(location_on(memory / "new", bucket), *population).ask(MAX_TRIALS)
        assert again is not None
        assert (again.number, again.values) == (proposal.number, others)


def test_a_study_that_an_object_store_does_not_have_is_refused(bucket: UPath, memory: Path) -> None:
    nowhere = location_on(memory / "new", bucket)
    with refused("study.damaged"):
        resume(nowhere)
    with refused("study.unknown", "tune.warm_start"):
        create(location_on(memory / "new", bucket, "two"), name="two", earlier=[("one", nowhere)])
    assert nowhere.remote is not None
    nowhere.remote.write_bytes(b"torn" * 999)
    with refused("study.damaged"):
        resume(nowhere)


def test_a_study_is_copied_while_the_search_goes_on_and_only_if_it_has_changed(
    bucket: UPath, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "_INTERVAL_S", 0.01)
    location = location_on(memory / "first", bucket)
    study = create(location)
    with keep_snapshots(location):
        study.complete(ask(study), [0.5], stopped_early=False)
        assert location.remote is not None
        wait_until(location.remote.exists)
        wait_until(lambda: bool(resume(location_on(memory / "second", bucket)).ended))
    copies: list[bytes] = []
    assert location.file is not None
    taken = Snapshots(location.file, lambda copy: copies.append(copy.read_bytes()))
    assert [taken.take(), taken.take()] == [True, False]
    study.record_seconds(7.0)
    assert [taken.take(), taken.take()] == [True, False]
    taken.close()
    assert len(copies) == 2


def refuse(*_: object, **__: object) -> None:
    raise PermissionError("403")


def test_a_study_that_cannot_be_copied_is_a_warning_and_at_the_end_an_error(
    bucket: UPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(snapshots, "_INTERVAL_S", 0.01)
    said = ""

    def is_said() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "cannot be copied to" in said

    def search(scratch: Scratch, seconds: float) -> None:
        location = location_on(scratch.path, bucket)
        study = resume(location) if seconds else create(location)
        with keep_snapshots(location, scratch):
            if seconds:
                monkeypatch.setattr(location.remote.fs, "put_file", refuse)
                study.record_seconds(seconds)
                wait_until(is_said)

    with scratch_folder() as copied:
        search(copied, 0.0)
    assert not copied.path.exists()
    with refused("study.not_written") as failed, scratch_folder() as kept:
        search(kept, 7.0)
    file = kept.path / "one.db"
    assert f"the whole study is in '{file}': upload it to 'memory://" in str(failed.value)
    assert resume(make_url(f"sqlite:///{file}")).seconds == 7.0
    shutil.rmtree(kept.path)
    assert said.count("warning") == 1
    assert "check its rights); the search goes on" in said


@pytest.mark.parametrize("is_away", [False, True])
def test_a_search_that_fails_keeps_its_study_on_disk_only_if_it_cannot_be_copied(
    is_away: bool, bucket: UPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(scratch: Scratch) -> None:
        location = location_on(scratch.path, bucket)
        study = create(location)
        with keep_snapshots(location, scratch):
            if is_away:
                monkeypatch.setattr(location.remote.fs, "put_file", refuse)
            study.record_seconds(7.0)
            raise TuningError("every trial failed")

    with pytest.raises(TuningError, match="every trial failed"), scratch_folder() as scratch:
        search(scratch)
    assert (scratch.path / "one.db").exists() is is_away
    shutil.rmtree(scratch.path, ignore_errors=True)
