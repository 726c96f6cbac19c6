"""Submit jobs to a cluster, as ``ray job submit`` does, and resubmit jobs that were lost with their cluster."""

import asyncio
import contextlib
import logging
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from app.cluster.jobs import Job, JobsApi
from app.cluster.state import read_state, running_cluster
from app.config import embedded, load_recipe, read_text, title_of
from app.errors import ClusterError
from app.storage import absolute_location

JOBS = Path("jobs")
_FOLDER = "rayloom_folder"
"""The key in a job's metadata under which the folder lies that it was submitted from."""
_RESUME = {
    "jobs.train": "train.resume=latest",
    "jobs.lifecycle": "train.resume=latest",
    "jobs.tune": "tune.resume=true",
}
"""What tells a job to go on with what it has done before."""
_LOST_TIMEOUT_S = 300.0
"""How long a supervisor at work may take to start the cluster anew."""


def submit(job: str, recipe: str, overrides: list[str]) -> int:
    """Submit ``python -m jobs.JOB RECIPE …`` from the current folder, show its log, return its exit code.

    The recipe is a path, a URI, or ``-`` for standard input. Ray uploads the current folder with the job. A recipe that
    is not part of this upload is embedded in the job's command, so a resubmitted job has it, too.

    The local cluster is used, unless ``RAY_API_SERVER_ADDRESS`` names another one. If the cluster is lost while the job
    runs, the one that its supervisor submits in its place is followed.

    Raises:
        RecipeError: the recipe is refused; nothing was sent.
        ClusterError: no such job here, no cluster answers, the token is not its own, or the cluster was lost and with
            it the job.
    """
    known = sorted(file.stem for file in JOBS.glob("[!_]*.py"))
    if job not in known:
        raise ClusterError(f"job {job!r} is not in {str(JOBS.absolute())!r}: known are {', '.join(known) or 'none'}")
    sent = recipe if _is_uploaded(recipe) else embedded(read_text(recipe), title_of(recipe))
    storage = load_recipe(sent, overrides).storage
    return send_job(job, sent, [*overrides, *([f"storage={absolute_location(storage)}"] if storage else [])])


def _is_uploaded(recipe: str) -> bool:
    """Return True if Ray uploads the recipe with the working directory. Ray leaves out files that git ignores."""
    path = Path(recipe)
    if path.is_absolute() or ".." in path.parts or not path.is_file():
        return False
    try:
        command = ["git", "check-ignore", "--no-index", "-q", recipe]
        ignored = subprocess.run(command, capture_output=True, check=False)
    except OSError:  # git is not installed
        return False
    return ignored.returncode == 1


def send_job(job: str, recipe: str, overrides: list[str]) -> int:
    """Submit a job on a recipe that every node can read, show its log, return its exit code.

    Raises:
        ClusterError: no cluster answers, or it rejects the token or the job.
    """
    environment = dict(os.environ)
    if "RAY_API_SERVER_ADDRESS" not in environment:
        environment |= running_cluster().client_environment()
    JobsApi.of(environment).require_access()
    submission_id = f"{job}-{secrets.token_hex(4)}"
    client = _connect(environment)
    try:
        client.submit_job(
            entrypoint=shlex.join(["python", "-m", f"jobs.{job}", recipe, *overrides]),
            submission_id=submission_id,
            runtime_env={"working_dir": "."},
            metadata={_FOLDER: str(Path.cwd())},
        )
    except (RuntimeError, ValueError) as error:
        raise ClusterError(f"the cluster refused the job: {_first_line(error)}") from error
    print(f"Job '{submission_id}' submitted. To stop it: ray job stop {submission_id}", flush=True)
    code = _follow(client, submission_id)
    return _exit_code(submission_id, code, environment)


def resubmit(job: Job, environment: Mapping[str, str]) -> str | None:
    """Submit again, from the folder that it came from, a job that was lost; one that trains or tunes is told to resume.

    Returns the new id, or None for a job that ``submit`` has not sent, or that was submitted again before.

    Raises:
        ClusterError: Ray refuses it.
    """
    folder = job.metadata.get(_FOLDER)
    if folder is None:
        return None
    entrypoint = shlex.split(job.entrypoint)
    for how in {_RESUME[word] for word in entrypoint if word in _RESUME}:
        key = how.partition("=")[0]
        if not any(word.startswith(f"{key}=") for word in entrypoint):
            entrypoint.append(how)
    second = _again(job.submission_id)
    try:
        _connect(environment).submit_job(
            entrypoint=shlex.join(entrypoint), submission_id=second, runtime_env={"working_dir": folder}
        )
    except (OSError, RuntimeError, ValueError) as error:
        reason = _first_line(error)
        raise ClusterError(f"job {job.submission_id} was lost, and Ray refused to submit it again: {reason}") from error
    return second


def _connect(environment: Mapping[str, str]) -> Any:
    """Return Ray's ``JobSubmissionClient``. Ray reads its settings from this process's environment, so extend that.

    The command ``ray job`` does the same, but imports four times as much.
    """
    os.environ.update(environment)
    from ray.job_submission import JobSubmissionClient

    for handler in logging.getLogger("ray").handlers:
        handler.setLevel(logging.ERROR)  # Ray would log a line for each file that it leaves out
    return JobSubmissionClient(environment["RAY_API_SERVER_ADDRESS"])


def _follow(client: Any, submission_id: str) -> int:
    """Print the job's log until the job ends. Return 1 if it failed or its cluster no longer answers, else 0."""

    import aiohttp  # Ray's client has already imported it

    async def print_log() -> None:
        async for lines in client.tail_job_logs(submission_id):
            print(lines, end="", flush=True)

    try:
        asyncio.run(print_log())
        job = client.get_job_info(submission_id)
    except (aiohttp.ClientError, OSError, RuntimeError) as error:
        print(f"the log of job {submission_id} ended: {_first_line(error)}", file=sys.stderr)
        return 1
    if job.status != "FAILED":
        return 0
    print(f"job {submission_id} failed: {str(job.message).partition(chr(10))[0]}", file=sys.stderr)
    return 1


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _exit_code(submission_id: str, code: int, environment: Mapping[str, str]) -> int:
    """``code``; or, if the cluster was lost while the job ran, that of the job that takes its place, at its end."""
    api = JobsApi.of(environment)
    if not _was_lost(api, submission_id):
        return code
    print("the cluster was lost while the job ran", file=sys.stderr)
    second = _again(submission_id)
    deadline = time.monotonic() + _LOST_TIMEOUT_S
    while not _look(api, second):
        if time.monotonic() > deadline or not _is_supervised(api.address):
            raise ClusterError(
                f"job {submission_id} was lost with its cluster, and is not submitted again: look at 'rayloom status', "
                "and once a cluster is up, submit it yourself"
            )
        time.sleep(1.0)
    _follow(_connect(environment), second)
    ended = _look(api, second)
    return 0 if ended and ended.status == "SUCCEEDED" else 1


def _is_supervised(address: str) -> bool:
    """Whether the cluster there is the local one, and its supervisor at work."""
    local = read_state()
    return local is not None and local.dashboard == address and bool(local.supervisors())


def _was_lost(api: JobsApi, submission_id: str) -> bool:
    try:
        job = api.find(submission_id)
    except httpx.HTTPError:
        return True
    return job is not None and not job.has_ended


def _look(api: JobsApi, submission_id: str) -> Job | None:
    with contextlib.suppress(httpx.HTTPError):
        return api.find(submission_id)
    return None


def _again(submission_id: str) -> str:
    """The id under which a lost job is submitted again."""
    return f"{submission_id}-again"
