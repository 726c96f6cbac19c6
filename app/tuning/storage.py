"""Where studies are kept: a SQLite file for each, or any database that SQLAlchemy reaches."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy import event, make_url
from sqlalchemy.engine import URL, Dialect, Engine
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed
from upath import UPath

from app.config.alerts import is_reference
from app.errors import DeliveryError, RecipeError, StorageError
from app.storage import is_local
from app.telemetry.alerts.secret import read_secret
from app.tuning.only_writer import OnlyWriter

LOCK_TIMEOUT_S = 60.0
"""How long a SQLite file may be locked by somebody else before the search gives up."""

_RESTART_TIMEOUT_S = 60.0
"""How long a database server may be away."""

STUDIES = "studies"

DATABASE_ERRORS = (SQLAlchemyError, StorageInternalError, sqlite3.Error)
"""What a database raises, and nothing else does."""


def study_url(storage: UPath, run_id: str, given: str | None) -> URL:
    """The database of a run's study: the one that the recipe gives, or a SQLite file under ``studies/``.

    Raises:
        RecipeError: what is given is no URL, or a relative path.
        StorageError: storage is not a local folder, where alone SQLite can write, and nothing else is given.
    """
    if given is None:
        if not is_local(storage):
            raise StorageError(
                f"storage is {str(storage)!r}, where SQLite cannot keep a study: set tune.storage to a database, such "
                "as postgresql+psycopg://host/name"
            )
        return URL.create("sqlite", database=str(Path(storage.path) / STUDIES / f"{run_id}.db"))
    try:
        url = make_url(read_secret("tune.storage", given) if is_reference(given) else given)
    except DeliveryError as error:
        raise RecipeError(str(error)) from None
    except ArgumentError as error:
        raise RecipeError(f"tune.storage {given!r} is no URL of SQLAlchemy: write dialect://host/database") from error
    if _file_of(url) and not Path(str(url.database)).is_absolute():
        raise RecipeError(f"tune.storage {given!r} is a relative path: write it as sqlite:////folder/studies.db")
    return url


def open_storage(url: URL) -> OnlyWriter:
    """Connect, and make the tables if there are none.

    Raises:
        StorageError: the database cannot be reached, its driver is missing; the file is damaged, read-only or locked.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    file = _file_of(url)
    options = {"connect_args": {"timeout": LOCK_TIMEOUT_S}} if file else {"pool_pre_ping": True}
    with explained(url):
        if file is not None:
            _check_file(file)
        backend = RDBStorage(url.render_as_string(hide_password=False), engine_kwargs=options)
    if file is None:
        _outlast_restarts(backend.engine)
    return OnlyWriter(backend)


@contextmanager
def explained(url: URL) -> Iterator[None]:
    """Turns what a database says into one sentence. Raises StorageError."""
    began = time.monotonic()
    try:
        yield
    except (*DATABASE_ERRORS, OSError, ImportError, RuntimeError) as error:
        cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
        reason = str(getattr(cause, "orig", cause)).strip().splitlines()[0]
        shown = url.render_as_string(hide_password=True)
        if "locked" in reason:
            raise StorageError(
                f"the study {shown} was locked by another process for {time.monotonic() - began:.0f} s: end that "
                "process, and go on with tune.resume=true"
            ) from error
        raise StorageError(f"the study's storage {shown} cannot be used ({reason}): check tune.storage") from error


def back_up(url: URL) -> None:
    """Keep a copy of a SQLite file beside it, whole at any time."""
    file = _file_of(url)
    if file is None:
        return
    copy, aside = _backup_of(file), file.with_name(f".{file.name}.tmp")
    aside.unlink(missing_ok=True)
    with closing(sqlite3.connect(file, timeout=LOCK_TIMEOUT_S)) as source, closing(sqlite3.connect(aside)) as target:
        source.backup(target)
    aside.rename(copy)


def require_study_file(url: URL) -> None:
    """Refuse to go on with a study whose SQLite file is gone, instead of starting an empty one. Raises StorageError."""
    file = _file_of(url)
    if file is not None and not (file.exists() and file.stat().st_size):
        what = "empty" if file.exists() else "missing"
        raise StorageError(f"the study's file {str(file)!r} is {what}: {_way_out(file)}")


def is_missing(url: URL) -> bool:
    """Whether there was never a study's SQLite file; any other database has to be asked."""
    file = _file_of(url)
    return file is not None and not file.exists() and not _backup_of(file).exists()


def _outlast_restarts(engine: Engine) -> None:
    """Where a connection was lost, try to make it again until the server is back."""

    @event.listens_for(engine, "do_connect")
    def reconnect(dialect: Dialect, _: object, arguments: list[Any], options: dict[str, Any]) -> DBAPIConnection:
        retrying = Retrying(
            retry=retry_if_exception_type(dialect.loaded_dbapi.OperationalError),
            wait=wait_fixed(0.5),
            stop=stop_after_delay(_RESTART_TIMEOUT_S),
            reraise=True,
        )
        return retrying(dialect.connect, *arguments, **options)


def _file_of(url: URL) -> Path | None:
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def _check_file(file: Path) -> None:
    """Raises StorageError, or ``sqlite3.OperationalError`` if the file stays locked."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            return
        with file.open("r+b"):
            pass
    except OSError as error:
        raise StorageError(
            f"the study's file {str(file)!r} cannot be written ({error.strerror}): check its rights, or tune.storage"
        ) from error
    try:
        with closing(sqlite3.connect(file, timeout=LOCK_TIMEOUT_S)) as connection:
            ((answer,), *_) = connection.execute("PRAGMA quick_check").fetchall()
    except sqlite3.DatabaseError as error:
        if "locked" in str(error):
            raise  # to wait once more would take two minutes
        answer = str(error)
    if answer != "ok":
        raise StorageError(f"the study's file {str(file)!r} is damaged ({answer.splitlines()[0]}): {_way_out(file)}")


def _way_out(file: Path) -> str:
    backup = _backup_of(file)
    if not backup.exists():
        return "there is no backup of it; start a new search"
    written = datetime.fromtimestamp(backup.stat().st_mtime).isoformat(" ", "seconds")
    return f"copy its backup {str(backup)!r}, written {written}, over it and try again, or start a new search"


def _backup_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.backup")
