"""Submit jobs to a cluster, as ``ray job submit`` does, and resubmit jobs that were lost with their cluster."""

import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from app.cluster.job_log import JobLog
from app.cluster.job_view import Detail, JobView, spinner
from app.cluster.jobs import Job, JobsApi
from app.cluster.packages import known_jobs, runtime_env
from app.cluster.preflight import require_inputs, require_stored
from app.cluster.queue import PRIORITY, USER, Priority, person
from app.cluster.ray_internals import is_uploaded, silence_client, uploaded_bytes
from app.cluster.state import read_state, running_cluster
from app.cluster.uploads import require_sendable
from app.config import embedded, load_job_recipe, names_model, read_text, reads_files, title_of
from app.config.overrides import override_of, require_once
from app.errors import ClusterError, NoClusterError, first_line, short_repr
from app.import_string import suggestion
from app.runs import LOST_JOB_KEY
from app.storage import absolute_location

_FOLDER = "rayloom_folder"
"""The key in a job's metadata for the folder from which it was submitted."""
_NAME = "job_name"
"""The key for the name that Ray's dashboard shows."""
_RESUME = {
    "jobs.train": "train.resume=latest",
    "jobs.lifecycle": "train.resume=latest",
    "jobs.tune": "tune.resume=true",
}
"""The override by which each job resumes."""
_ADDRESS = "RAY_API_SERVER_ADDRESS"
"""The environment variable that names another cluster than the local one."""
_TOO_LARGE = "status code 413"
"""Part of the error of Ray's client when the dashboard refuses an upload for its size."""
_NAMED_SIZES = 3
_EXIT_PERIOD_S = 0.1
"""Time between two questions whether a job has ended."""
_RESTART_TIMEOUT_S = 300.0
"""Maximum time in which a running supervisor restarts the cluster."""


def submit(
    job: str,
    recipe: str,
    overrides: list[str],
    options: Sequence[str] = (),
    detail: Detail = "normal",
    priority: Priority = "normal",
) -> int:
    """Submit ``python -m jobs.JOB RECIPE …`` from the current folder, show its log, return its exit code.

    The recipe is a path, a URI, or ``-`` for standard input; to deploy, also a model's name. ``options`` are the job's
    own, such as ``--json``. ``priority`` orders the jobs that wait while the cluster is full. Ray uploads the current
    folder with the job, which may be a checkout or a person's own project. A recipe that is not part of this upload is
    embedded in the job's command, so a resubmitted job has it.

    The local cluster is used, unless ``RAY_API_SERVER_ADDRESS`` names another one. If the cluster is lost while the job
    runs, follow the job that its supervisor submits in its place.

    Raises:
        RecipeError: the recipe is refused, or names files that are not sent along, before anything is sent.
        ClusterError: there is no such job, the folder has a package with the name of one of Rayloom's, no cluster
            answers, it rejects the token, or the job was lost with the cluster.
    """
    if job not in (known := known_jobs(Path.cwd())):
        if recipe in known:
            raise ClusterError(f"{job!r} is not a job: give the job first, as in 'rayloom submit {recipe} {job}'").of(
                "job.not_first"
            )
        raise ClusterError(f"no job {job!r}: known are {', '.join(known)}{suggestion(job, known)}").of(
            "job.unknown_kind"
        )
    require_once(overrides)
    is_local = _extend_environment()
    is_given = names_model(job, recipe) or _is_sent_along(recipe)
    location = recipe if is_given else embedded(read_text(recipe), title_of(recipe))
    # The job checks it all again. Checking it here reports errors before anything is sent.
    loaded = load_job_recipe(job, location, overrides)
    if reads_files(job):
        require_inputs(job, loaded, Path.cwd(), is_local)
    target = _find_target(is_local)
    storage = loaded.storage and absolute_location(loaded.storage)
    if target.is_local or (storage and "://" in storage):
        require_stored(job, loaded, storage or running_cluster().storage, target.is_local)
    if storage:  # a relative path starts at the current folder, not at the job's copy of it
        others = [override for override in overrides if not override.startswith("storage=")]
        overrides = [*others, override_of("storage", storage)]
    return send_job(job, location, [*overrides, *options], loaded.name, target, detail, priority)


def _is_sent_along(recipe: str) -> bool:
    """Return True if Ray uploads the recipe with the current folder, so that its path is also the job's."""
    path = Path(recipe)
    return not path.is_absolute() and is_uploaded(path, Path.cwd())


@dataclass(frozen=True)
class _Target:
    """The cluster that a job is sent to."""

    environment: dict[str, str]
    is_local: bool


def _find_target(is_local: bool | None = None) -> _Target:
    """Return the cluster that ``RAY_API_SERVER_ADDRESS`` names, else the local one. Raises NoClusterError."""
    is_local = _extend_environment() if is_local is None else is_local
    if is_local:
        running_cluster()
    return _Target(dict(os.environ), is_local)


def _extend_environment() -> bool:
    """Set the variables of Ray's client for the local cluster, unless another one is named. Return whether none is.

    Ray reads its settings from this process's environment when it is imported, so call this first.
    """
    if _ADDRESS in os.environ:
        return False
    if known := read_state():
        os.environ.update(known.client_environment())
    return True


def send_job(
    job: str,
    recipe: str,
    arguments: list[str],
    name: str,
    target: _Target | None = None,
    detail: Detail = "normal",
    priority: Priority = "normal",
) -> int:
    """Submit a job on a recipe that every node can read, show its log, return its exit code.

    Args:
        name: the job's name on the page of jobs in Ray's dashboard.

    Raises:
        ClusterError: no cluster answers, it rejects the token or the job, or the job was lost with the cluster.
    """
    target = target or _find_target()
    _jobs_api(target)
    submission_id = f"{job}-{secrets.token_hex(4)}"
    with spinner("sending this folder to the cluster"):
        _send(
            target.environment,
            failure=f"job {submission_id} cannot be submitted",
            entrypoint=shlex.join(["python", "-m", f"jobs.{job}", recipe, *arguments]),
            submission_id=submission_id,
            runtime_env=runtime_env(".", has_rayloom=target.is_local),
            metadata={_FOLDER: str(Path.cwd()), _NAME: name, USER: person(), PRIORITY: priority},
        )
    if detail != "quiet":
        print(f"Job '{submission_id}' submitted. To stop it: rayloom stop {submission_id}", flush=True)
    return _follow_to_end(submission_id, target.environment, JobView(detail))


def follow_job(named: str, detail: Detail = "normal") -> int:
    """Show the log of a job that runs or has ended, and return its exit code. An id may be shortened.

    Raises:
        ClusterError: no cluster answers, it rejects the token, or has no such job, or several.
    """
    target = _find_target()
    job = _jobs_api(target).beginning_with(named)
    if job is None:
        raise ClusterError(f"the cluster has no job {named!r}: 'rayloom runs list' lists the runs").of("job.unknown")
    return _follow_to_end(job.submission_id, target.environment, JobView(detail))


def stop_job(named: str) -> str | None:
    """Stop a job by its id, which may be shortened. Return the whole id; None if there is no cluster or no such job.

    Raises:
        ClusterError: the cluster rejects the token, the job has ended, or several ids begin so.
    """
    try:
        api = _jobs_api(_find_target())
    except NoClusterError:
        return None
    if (job := api.beginning_with(named)) is None:
        return None
    if job.has_ended:
        raise ClusterError(f"job {job.submission_id} has ended already: it {job.status.lower()}").of("job.finished")
    api.stop(job.submission_id)
    return job.submission_id


def cluster_api() -> JobsApi:
    """Return the jobs API of the cluster to which jobs are submitted.

    Raises:
        ClusterError: no cluster answers, or it rejects the token.
    """
    return _jobs_api(_find_target())


def _jobs_api(target: "_Target") -> JobsApi:
    api = JobsApi.of(target.environment)
    api.require_access()
    return api


def resubmit(job: Job, environment: Mapping[str, str]) -> str | None:
    """Resubmit a lost job from its folder. Training and tuning jobs are told to resume the run that it opened, if any.

    Return the new id, or None if ``submit`` has not sent the job, or if the job was itself a resubmitted one.

    Raises:
        ClusterError: the cluster does not answer, or rejects the token or the job, or the command is not valid shell.
    """
    folder = job.metadata.get(_FOLDER)
    if folder is None:
        return None
    try:
        entrypoint = shlex.split(job.entrypoint)
    except ValueError as error:
        raise ClusterError(
            f"job {job.submission_id} was lost, and its command {short_repr(job.entrypoint)} cannot be read "
            f"({error}): submit it again yourself"
        ).of("command.unreadable") from error
    lost: dict[str, str] = {}
    for override in {_RESUME[word] for word in entrypoint if word in _RESUME}:
        key = override.partition("=")[0]
        # What the person has asked for stays.
        if not any(word.startswith(f"{key}=") for word in entrypoint):
            entrypoint.append(override)
            lost[LOST_JOB_KEY] = job.submission_id
    new_id = _resubmitted_id(job.submission_id)
    _send(
        environment,
        failure=f"job {job.submission_id} was lost, and cannot be submitted again",
        entrypoint=shlex.join(entrypoint),
        submission_id=new_id,
        # The new metadata have no folder, so that a job is submitted again only once.
        # Only supervisors of local clusters resubmit.
        runtime_env=runtime_env(folder, has_rayloom=True),
        metadata={key: job.metadata[key] for key in (USER, PRIORITY) if key in job.metadata} | lost,
    )
    return new_id


def _send(environment: Mapping[str, str], failure: str, **job: Any) -> None:
    """Submit a job with the arguments of Ray's ``submit_job``.

    Raises:
        ClusterError: Ray's client raised an error. The message is ``failure`` and the first line of this error, or what
            makes the folder too large to send; or the folder has a file that cannot be sent.
    """
    folder = Path(job["runtime_env"]["working_dir"]).resolve()
    try:
        client = _connect(environment)
        require_sendable(folder)
        client.submit_job(**job)
    except _client_errors() as error:
        reason = first_line(error)
        if _TOO_LARGE in reason:
            reason = _sizes_of(folder)
        raise ClusterError(f"{failure}: {reason}").of("cluster.refuses") from error


def _sizes_of(folder: Path) -> str:
    """Say what in a folder is the largest, for a person who has to leave something out."""
    largest = uploaded_bytes(folder).most_common(_NAMED_SIZES)
    named = ", ".join(f"{name} ({size / 2**20:,.0f} MiB)" for name, size in largest)
    return (
        f"{str(folder)!r} is too large to send: Ray takes 100 MiB, compressed. Its largest parts are {named}. Name "
        "those that the job does not read in .rayignore, which is written like .gitignore"
    )


def _connect(environment: Mapping[str, str]) -> Any:
    """Return Ray's ``JobSubmissionClient``. Ray reads its settings from this process's environment, so extend that.

    The command ``ray job`` does the same, but imports four times as much.
    """
    os.environ.update(environment)
    from ray.job_submission import JobSubmissionClient

    silence_client()
    return JobSubmissionClient(environment["RAY_API_SERVER_ADDRESS"])


def _client_errors() -> tuple[type[Exception], ...]:
    """Return the errors that Ray's client raises if the cluster does not answer, or rejects the token or the job."""
    from aiohttp import ClientError  # Ray's client has already imported both
    from ray.exceptions import RayError

    return (ClientError, OSError, RayError, RuntimeError, ValueError)


def _follow_to_end(submission_id: str, environment: Mapping[str, str], view: JobView) -> int:
    """Print a job's log until the job ends, and return its exit code. Ctrl-C ends the printing, but not the job.

    If the cluster is lost meanwhile, go on with the job that its supervisor submits in place of this one.
    """
    try:
        return _print_to_end(submission_id, environment, view)
    except KeyboardInterrupt:
        print(
            f"\njob {submission_id} keeps running: 'rayloom follow {submission_id}' shows it again, and "
            f"'rayloom stop {submission_id}' stops it",
            file=sys.stderr,
        )
        return 128 + signal.SIGINT


def _print_to_end(submission_id: str, environment: Mapping[str, str], view: JobView) -> int:
    api = JobsApi.of(environment)
    job, was_stopped = _print_and_await(api, submission_id, environment, view)
    if not (job and job.has_ended):
        print("the cluster was lost while the job ran", file=sys.stderr)
        submission_id = _await_resubmission(api, submission_id)
        job, was_stopped = _print_and_await(api, submission_id, environment, view)
    return _exit_code(submission_id, job, was_stopped)


def _print_and_await(
    api: JobsApi, submission_id: str, environment: Mapping[str, str], view: JobView
) -> tuple[Job | None, bool]:
    """Print the job's log. Return the job, and whether its RESULT says that it was paused or stopped.

    The job has ended unless its cluster was lost. It is None if nobody answers. Ray closes the log up to two seconds
    after the end of the job. So after the RESULT, ask Ray for the end.
    """
    with view:
        log = _print_log(submission_id, environment, view)
    attempts = Retrying(
        retry=retry_if_result(lambda job: log.has_result and job is not None and not job.has_ended),
        wait=wait_fixed(_EXIT_PERIOD_S),
    )
    return attempts(_find_job, api, submission_id), log.was_stopped


def _print_log(submission_id: str, environment: Mapping[str, str], view: JobView) -> JobLog:
    """Print and return the job's log, until its RESULT, or else until the job ends or its cluster does not answer."""
    log = JobLog(shows_all=view.detail == "verbose")

    async def print_log(client: Any) -> None:
        async with aclosing(client.tail_job_logs(submission_id)) as pieces:
            async for piece in pieces:
                for line in log.lines(piece):
                    view.show(line)
                if log.has_result:
                    return

    try:
        asyncio.run(print_log(_connect(environment)))
    except _client_errors() as error:
        print(f"the log of job {submission_id} ended: {first_line(error)}", file=sys.stderr)
    for line in log.end():
        view.show(line)
    return log


def _exit_code(submission_id: str, job: Job | None, was_stopped: bool) -> int:
    """Return 0 for a job that succeeded; else print why and return 1. A paused or stopped job also counts as failed."""
    if job is None or not job.has_ended:
        print(f"the end of job {submission_id} is unknown: look at 'rayloom status'", file=sys.stderr)
        return 1
    if job.status == "FAILED":
        print(f"job {submission_id} failed: {job.reason}", file=sys.stderr)
        return 1
    if job.status == "STOPPED":
        print(f"job {submission_id} was stopped before its end", file=sys.stderr)
        return 1
    if was_stopped:
        print(f"job {submission_id} was paused or stopped before its end: its log says how to resume", file=sys.stderr)
        return 1
    return 0


def _await_resubmission(api: JobsApi, submission_id: str) -> str:
    """Wait until the supervisor has submitted a lost job again, and return the new id.

    Raises:
        ClusterError: the supervisor does not do so in time, or has ended.
    """
    new_id = _resubmitted_id(submission_id)
    retrying = Retrying(
        retry=retry_if_result(lambda job: job is None and _is_supervised(api.address)),
        wait=wait_fixed(1.0),
        stop=stop_after_delay(_RESTART_TIMEOUT_S),
        retry_error_callback=lambda _: None,
    )
    if retrying(_find_job, api, new_id) is None:
        raise ClusterError(
            f"job {submission_id} was lost with its cluster, and is not submitted again: look at 'rayloom status', "
            "and once a cluster is up, submit it yourself"
        ).of("job.lost")
    return new_id


def _is_supervised(address: str) -> bool:
    """Return True if this is the address of the local cluster, and its supervisor runs."""
    local = read_state()
    return local is not None and local.dashboard == address and bool(local.supervisors())


def _find_job(api: JobsApi, submission_id: str) -> Job | None:
    """Return the job, or None if it is unknown or the cluster does not answer."""
    with contextlib.suppress(httpx.HTTPError):
        return api.find(submission_id)
    return None


def _resubmitted_id(submission_id: str) -> str:
    """Return the id under which a lost job is submitted again."""
    # A fixed name, so that a client that followed the lost job finds the new one by itself.
    return f"{submission_id}-again"
