"""The databases of studies: a SQLite file for each study in storage, or any database that SQLAlchemy supports."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from optuna.study import Study
from sqlalchemy import event, make_url
from sqlalchemy.engine import URL, Dialect, Engine
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed
from upath import UPath

from app.config.notify import is_reference
from app.errors import DeliveryError, RecipeError, StorageError, TuningError, first_line
from app.storage import is_local
from app.telemetry.alerts.receivers import read_secret
from app.tuning.optuna_internals import SingleWriterStorage
from app.uris import has_split_login, without_secrets

LOCK_TIMEOUT_S = 60.0
"""Maximum wait for a SQLite file that another process has locked."""

_RESTART_TIMEOUT_S = 60.0
"""Maximum wait for a database server that restarts."""

STUDIES = "studies"

DATABASE_ERRORS = (SQLAlchemyError, StorageInternalError, sqlite3.Error)
"""The exceptions that only a database raises."""


@dataclass(frozen=True)
class StudyLocation:
    """A study's database. On an object store: a local SQLite file and its last copy in storage."""

    url: URL
    """The database that Optuna opens."""
    remote: UPath | None = None
    """The copy on an object store; None if the study stays at ``url``."""

    def __str__(self) -> str:
        return without_secrets(self.url.render_as_string()) if self.remote is None else str(self.remote)

    @property
    def file(self) -> Path | None:
        """The SQLite file; None for a database server."""
        is_file = self.url.get_backend_name() == "sqlite" and self.url.database
        return Path(str(self.url.database)) if is_file else None

    @property
    def backup(self) -> Path | None:
        """The backup beside a SQLite file; None for a database server or a study on an object store."""
        return self.file.with_name(f"{self.file.name}.backup") if self.file and self.remote is None else None

    @property
    def written(self) -> str:
        """The time of the copy in storage or of the backup. Raises FileNotFoundError if there is none."""
        copy = self.remote or self.backup or Path()
        return datetime.fromtimestamp(copy.stat().st_mtime).isoformat(" ", "seconds")

    def publish(self, copy: Path) -> None:
        """Upload a copy of the file to storage, or make it the backup. Raises OSError or StorageError."""
        if self.backup is not None:
            copy.rename(self.backup)
        if self.remote is None:
            return
        try:
            self.remote.fs.put_file(str(copy), self.remote.path)
        except Exception as error:  # the driver of each protocol has its own exceptions
            raise StorageError(f"the study {self} cannot be written ({error}): check its rights").of(
                "study.not_written"
            ) from error

    def fetch(self) -> None:
        """Replace the local file by the copy in storage, if there is one. Raises StorageError if it cannot be read."""
        if self.remote is None or self.file is None:
            return
        try:
            self.remote.fs.get_file(self.remote.path, str(self.file))
        except FileNotFoundError:
            self.file.unlink(missing_ok=True)
        except Exception as error:  # the driver of each protocol has its own exceptions
            raise StorageError(f"the study {self} cannot be read ({error}): check its rights").of(
                "study.unreadable"
            ) from error


def locate_study(storage: UPath, given: str | None, scratch: Path, run_id: str) -> StudyLocation:
    """Return the database of a run's study: ``given``, or a SQLite file under ``studies/`` in storage.

    ``scratch`` is the local folder of the SQLite file if storage is an object store.

    Raises:
        RecipeError: ``given`` is no URL, has a password that is not percent-encoded, or is a relative path.
    """
    if given is None:
        name = f"{run_id}.db"
        if is_local(storage):
            return StudyLocation(URL.create("sqlite", database=str(Path(storage.path) / STUDIES / name)))
        return StudyLocation(URL.create("sqlite", database=str(scratch / name)), storage / STUDIES / name)
    try:
        text = read_secret("tune.storage", given) if is_reference(given) else given
        url = make_url(text)
    except DeliveryError as error:
        raise RecipeError(str(error)).of(error.rule, error.key) from None
    except (ArgumentError, ValueError):  # the second names a port, which may be a part of a password
        raise RecipeError(f"tune.storage {given!r} is no URL of SQLAlchemy: write dialect://host:port/database").of(
            "url.invalid", "tune.storage"
        ) from None
    # The driver would take the rest of the password for a host, and name it in its error.
    if has_split_login(text):
        raise RecipeError(
            f"tune.storage {given!r} has several @: percent-encode those that end no password, as %40"
        ).of("url.not_encoded", "tune.storage")
    location = StudyLocation(url)
    if location.file and not location.file.is_absolute():
        raise RecipeError(f"tune.storage {given!r} is a relative path: write it as sqlite:////folder/studies.db").of(
            "path.relative", "tune.storage"
        )
    return location


def open_storage(location: StudyLocation) -> SingleWriterStorage:
    """Connect to a study's database, and create the tables if there are none.

    Raises:
        StorageError: the database cannot be reached or its driver is missing, or the file is damaged, read-only or
            locked.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # With ``pool_pre_ping``, a connection that the server has closed is replaced before it is used.
    options = {"connect_args": {"timeout": LOCK_TIMEOUT_S}} if location.file else {"pool_pre_ping": True}
    location.fetch()
    with explained(location):
        if location.file is not None:
            _check_file(location, location.file)
        backend = RDBStorage(location.url.render_as_string(hide_password=False), engine_kwargs=options)
    if location.file is None:
        _outlast_restarts(backend.engine)
    return SingleWriterStorage(backend)


@contextmanager
def explained(location: StudyLocation) -> Iterator[None]:
    """Turn a database's errors into a StorageError of one sentence."""
    began = time.monotonic()
    try:
        yield
    except (*DATABASE_ERRORS, OSError, ImportError, RuntimeError) as error:
        cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
        # SQLAlchemy keeps the driver's own error in ``orig``. Its message is one sentence.
        reason = first_line(getattr(cause, "orig", cause))
        if "locked" in reason:
            raise StorageError(
                f"the study {location} was locked by another process for {time.monotonic() - began:.0f} s: end that "
                "process, and go on with tune.resume=true"
            ).of("study.locked") from error
        raise StorageError(f"the study's storage {location} cannot be used ({reason}): check tune.storage").of(
            "study.not_reached", "tune.storage"
        ) from error


def require_study_file(location: StudyLocation) -> None:
    """Raise StorageError if the study's SQLite file is gone. SQLite would silently create an empty one."""
    size = _size(location)
    if not size and location.file is not None:
        state = "missing" if size is None else "empty"
        raise StorageError(f"the study's file {_file_name(location)!r} is {state}: {_remedy(location)}").of(
            "study.damaged"
        )


def load_study(name: str, location: StudyLocation) -> Study:
    """Load a study that exists. Raises StorageError or TuningError."""
    require_study_file(location)
    storage = open_storage(location)
    with explained(location):
        if name not in optuna.get_all_study_names(storage):
            raise TuningError(
                f"there is no study {name!r} in {location}: give the id of a tune run that has been started"
            ).of("study.unknown")
        return optuna.load_study(study_name=name, storage=storage)


def is_missing(location: StudyLocation) -> bool:
    """Return True if there was never a SQLite file for the study. False for a server, which has to be asked."""
    has_backup = location.backup is not None and location.backup.exists()
    return location.file is not None and _size(location) is None and not has_backup


def _size(location: StudyLocation) -> int | None:
    """Return the bytes of the study's SQLite file, or of its copy in storage; None if it does not exist."""
    path = location.remote or location.file
    return path.stat().st_size if path is not None and path.exists() else None


def _outlast_restarts(engine: Engine) -> None:
    """Retry lost connections until the server is back, for at most ``_RESTART_TIMEOUT_S``."""

    @event.listens_for(engine, "do_connect")
    def reconnect(dialect: Dialect, _: object, arguments: list[Any], options: dict[str, Any]) -> DBAPIConnection:
        retrying = Retrying(
            retry=retry_if_exception_type(dialect.loaded_dbapi.OperationalError),
            wait=wait_fixed(0.5),
            stop=stop_after_delay(_RESTART_TIMEOUT_S),
            reraise=True,
        )
        return retrying(dialect.connect, *arguments, **options)


def _check_file(location: StudyLocation, file: Path) -> None:
    """Raise StorageError if the file cannot be used, or ``sqlite3.OperationalError`` if it stays locked."""
    name = _file_name(location)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            return
        # SQLite would open a read-only file, and fail at the first write.
        with file.open("r+b"):
            pass
    except OSError as error:
        raise StorageError(
            f"the study's file {name!r} cannot be written ({error.strerror}): check its rights, or tune.storage"
        ).of("study.not_written") from error
    try:
        # Look for damage here: SQLite itself notices it only when it reads the damaged page.
        with closing(sqlite3.connect(file, timeout=LOCK_TIMEOUT_S)) as connection:
            ((answer,), *_) = connection.execute("PRAGMA quick_check").fetchall()
    except sqlite3.DatabaseError as error:
        if "locked" in str(error):
            raise  # opening it would wait for the lock once more
        answer = str(error)
    if answer != "ok":
        raise StorageError(f"the study's file {name!r} is damaged ({answer.splitlines()[0]}): {_remedy(location)}").of(
            "study.damaged"
        )


def _remedy(location: StudyLocation) -> str:
    backup = location.backup
    if backup is None or not backup.exists():
        return "there is no backup of it; start a new search"
    return f"copy its backup {str(backup)!r}, written {location.written}, over it and try again, or start a new search"


def _file_name(location: StudyLocation) -> str:
    return str(location.remote or location.file)
