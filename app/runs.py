"""Runs: a job's folder in storage, and the RESULT line with which it ends."""

import errno
import json
import os
import secrets
import sys
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError
from upath import UPath

from app.config import Recipe, dump_recipe
from app.errors import RayloomError, StorageError
from app.figures import figures_of
from app.run_log import keep_log
from app.storage import is_plain_name, list_names, open_storage, to_path, write_atomically
from app.telemetry.tracing import stage
from app.tracking.process import keep_tracked, require_clients

RESULT_FILE, CONFIG_FILE = "result.json", "config.yaml"
JOB_FILE = "job"
"""A file of a run with the id of the job on a cluster that opened it last. Other runs have none."""
JOB, LOST_JOB = "RAYLOOM_JOB", "RAYLOOM_LOST_JOB"
"""Environment variables of a job on a cluster: its id, and the id of the lost job in whose place it was submitted."""
LOST_JOB_KEY = "rayloom_lost_job"
"""The key of the latter in the job's metadata."""
_RESULT_PREFIX = "RESULT "


class Result(BaseModel):
    """The result of a job. It is stored as ``result.json``, and the last line that the job prints tells it."""

    job: str
    run_id: str
    recipe: str
    status: Literal["succeeded", "stopped", "failed"]
    metrics: dict[str, Any] = {}
    artifacts: dict[str, str] = {}
    duration_s: float
    error: str | None = None

    file: str | None = Field(default=None, exclude=True)
    """The URI of the ``result.json`` that has it; None if none was written, because the job was refused."""

    def to_line(self, is_whole: bool = False) -> str:
        """Return the line that a job ends with.

        It is short and names the file, unless the whole is asked for or no file has it.
        """
        whole = self.model_dump(mode="json", exclude_none=True)
        if is_whole or self.file is None:
            return _RESULT_PREFIX + json.dumps(whole, ensure_ascii=False)
        facts = {key: whole[key] for key in ("job", "run_id", "status", "error") if key in whole}
        return _RESULT_PREFIX + json.dumps(
            {**facts, **figures_of(self.job, whole), "result": self.file}, ensure_ascii=False
        )

    @classmethod
    def of_output(cls, output: str) -> Self:
        """Return the whole result of a job, from what it has printed and the file that this names.

        Raises:
            ValueError: nothing printed is a result.
            OSError: the file cannot be read.
        """
        lines = [line for line in output.splitlines() if line.startswith(_RESULT_PREFIX)]
        if not lines:
            raise ValueError(
                f"no line begins with {_RESULT_PREFIX!r}: the job did not end, or this is not what it printed"
            )
        line = json.loads(lines[-1].removeprefix(_RESULT_PREFIX))
        return cls.read(to_path(line["result"])) if "result" in line else cls.model_validate(line)

    @classmethod
    def read(cls, file: UPath) -> Self:
        """Read a ``result.json``. Raises FileNotFoundError, or ValidationError if it is broken."""
        return cls.model_validate_json(file.read_bytes()).model_copy(update={"file": str(file)})


@dataclass(frozen=True)
class Outcome:
    """A job's metrics, and the locations of its artifacts."""

    metrics: BaseModel
    artifacts: dict[str, str]
    status: Literal["succeeded", "stopped"] = "succeeded"
    """stopped: it was asked to end early, and can be resumed."""


@dataclass
class Run:
    """A run in progress: ``<storage>/runs/<job>/<run_id>``."""

    job: str
    run_id: str
    recipe: Recipe
    storage: UPath
    started: float
    until_result: ExitStack = field(default_factory=ExitStack)
    """Contexts of the step that stay open until the result is written."""
    earlier_request: bytes | None = None
    """The request to stop that the run had when this job began. An earlier job has obeyed it."""
    is_ours: bool = True
    """True if this job may write to the folder. Another job may be training an earlier run until this job locks it."""

    @classmethod
    def start(cls, job: str, recipe: Recipe, run_id: str | None = None) -> Self:
        """Return a new run, or the earlier run ``run_id``. Nothing is written before ``open``."""
        new = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{recipe.name}-{secrets.token_hex(2)}"
        storage = open_storage(recipe.storage)
        return cls(job, run_id or new, recipe, storage, time.monotonic(), is_ours=run_id is None)

    @property
    def folder(self) -> UPath:
        """The run's folder in storage."""
        return folder_of_run(self.storage, self.job, self.run_id)

    @property
    def was_opened(self) -> bool:
        """Whether this job or an earlier one has opened the run. A folder alone may be of a failed start."""
        return (self.folder / CONFIG_FILE).exists()

    @property
    def may_write(self) -> bool:
        """Whether the folder exists and belongs to this job. A task of the job may have opened the run."""
        return self.is_ours and self.was_opened

    def hold(self, lock: AbstractContextManager[object]) -> None:
        """Hold ``lock`` until the result is written. Raise what ``lock`` raises if another job holds it."""
        self.until_result.enter_context(lock)
        self.is_ours = True

    def open(self) -> None:
        """Create the folder with the resolved recipe, once all inputs have been checked.

        A resumed run already has its folder, and its last result is removed.
        """
        self.is_ours = True
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / RESULT_FILE).unlink(missing_ok=True)
            self._note_job()
            write_atomically(self.folder / CONFIG_FILE, dump_recipe(self.recipe).encode())
        except OSError as error:
            raise self._cannot_write(error) from error

    def _note_job(self) -> None:
        """Note which job opens the run, for a job that is submitted in its place."""
        if job := os.environ.get(JOB):
            write_atomically(self.folder / JOB_FILE, job.encode())
        else:
            (self.folder / JOB_FILE).unlink(missing_ok=True)

    def _cannot_write(self, error: OSError) -> StorageError:
        return StorageError(
            f"storage {str(self.storage)!r} cannot be written ({error}): check its rights and free space"
        ).of("storage.not_written", "storage")

    def end(self, outcome: Outcome) -> Result:
        """Write and return the result of a run that succeeded or was stopped."""
        return self._finish(outcome.status, outcome.metrics.model_dump(mode="json"), outcome.artifacts, None)

    def interrupt(self) -> Result:
        """Write the result of a run whose process was told to stop, as ``fail`` does, and return it."""
        return self._finish("stopped", {}, {}, None)

    def fail(self, error: str) -> Result:
        """Return the result of a failed run. Write it if the folder exists and belongs to this job."""
        return self._finish("failed", {}, {}, error)

    def _finish(
        self,
        status: Literal["succeeded", "stopped", "failed"],
        metrics: dict[str, Any],
        artifacts: dict[str, str],
        error: str | None,
    ) -> Result:
        result = Result(
            job=self.job,
            run_id=self.run_id,
            recipe=self.recipe.name,
            status=status,
            metrics=metrics,
            artifacts=artifacts,
            duration_s=round(time.monotonic() - self.started, 3),
            error=error,
        )
        if not (self.is_ours and self.folder.exists()):
            return result
        file = self.folder / RESULT_FILE
        try:
            write_atomically(file, result.model_dump_json(exclude_none=True, indent=1).encode())
        except OSError as lost:
            failure = self._cannot_write(lost)
            if status != "failed":
                raise failure from lost
            # The error that ended the run is the one to return.
            print(f"error: {failure}", file=sys.stderr, flush=True)
            return result
        return result.model_copy(update={"file": str(file)})


JSON_HELP = "end with the whole result in the RESULT line, and not only its figures"
"""Help of ``--json``, which every job takes."""

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
"""Errors of a disk that is full, read-only or not permitted."""


def read_arguments(program: str, argv: Sequence[str] | None, about: str | None = None) -> Namespace:
    """Return ``recipe``, ``overrides`` and ``json`` of a job's command line: ``python -m PROGRAM …``."""
    parser = ArgumentParser(prog=f"python -m {program}", description=about)
    parser.add_argument("recipe", help="path or URI of a recipe, such as recipes/reviews.yaml; - reads it here")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as train.epochs=3; beats the recipe")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    return parser.parse_intermixed_args(argv)


Step = Callable[[Run], Outcome]
"""The work of a run. It opens the run once it has checked its inputs."""


def execute(run: Run, step: Step, parent: UPath | None = None) -> Result:
    """Do the work and write its result. Print errors, with a traceback unless they are Rayloom's own.

    ``parent`` is the folder of the lifecycle that the run is a part of.
    """

    def may_write() -> bool:
        return run.may_write

    tracked = keep_tracked(run.folder, run.recipe.tracking, may_write, parent)
    with keep_log(run.folder, may_write), tracked, run.until_result:
        try:
            require_clients(run.recipe)
            with stage(run.job, run_id=run.run_id, recipe=run.recipe.name):
                outcome = step(run)
            return run.end(outcome)
        except RayloomError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return run.fail(str(error))
        except (KeyboardInterrupt, SystemExit):
            # Without a result, the list of runs would show it as running or interrupted.
            print(run.interrupt().to_line(), flush=True)
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
                message = (
                    f"a file cannot be written or read ({error}): check its rights, and the free space of its disk"
                )
                print(f"error: {message}", file=sys.stderr, flush=True)
                return run.fail(message)
            traceback.print_exc()
            last_line = str(error).strip().rpartition("\n")[2]  # errors of Ray end with their cause
            return run.fail(f"{type(error).__name__}: {last_line}")


def runs_folder(storage: UPath, job: str) -> UPath:
    """Return the folder of a job's runs, which are named by id. Raise StorageError if ``job`` is not a job's name."""
    return _folder_in(storage / "runs", job, "a job such as train", "job.unknown_kind")


def folder_of_run(storage: UPath, job: str, run_id: str) -> UPath:
    """Return the folder of one run. Raise StorageError if the id is not valid, because a path would lead elsewhere."""
    return _folder_in(runs_folder(storage, job), run_id, "a run's id", "run.unknown")


def _folder_in(folder: UPath, name: str, expected: str, rule: str) -> UPath:
    if not is_plain_name(name):
        raise StorageError(f"{name!r} is not {expected}: 'rayloom runs list' shows the runs in storage").of(rule)
    return folder / name


def recipe_named_in(run_id: str) -> str:
    """Return the recipe's name in a run's id, between the time and the random suffix."""
    return "-".join(run_id.split("-")[2:-1])


def newest_first(runs: UPath) -> list[UPath]:
    """Return the folders of a job's runs, newest first. Their ids begin with the time."""
    return [runs / name for name in sorted(list_names(runs), reverse=True)]


def latest_result(storage: UPath, job: str, recipe_name: str) -> Result:
    """Return the result of a job's newest successful run of a recipe. Raise StorageError if there is none."""
    of_recipe = [run for run in newest_first(runs_folder(storage, job)) if recipe_named_in(run.name) == recipe_name]
    for result in _results(of_recipe):
        if result.status == "succeeded":
            return result
    raise StorageError(
        f"storage {str(storage)!r} has no finished {job} run of recipe {recipe_name!r}: run jobs.{job} first"
    ).of("run.none_finished")


def has_succeeded(run: UPath) -> bool:
    """Return True if the run in this folder succeeded."""
    file = run / RESULT_FILE
    return file.exists() and Result.read(file).status == "succeeded"


def _results(runs: Iterable[UPath]) -> Iterator[Result]:
    """Yield the results of the runs that have finished."""
    for run in runs:
        try:
            yield Result.read(run / RESULT_FILE)
        except (FileNotFoundError, ValidationError):
            continue  # in progress, or broken
