"""Send a job to a cluster with ``ray job submit``."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import httpx

from app.cluster.state import running_cluster
from app.config import load_recipe
from app.errors import ClusterError, RecipeError
from app.storage import absolute_location

JOBS = Path("jobs")


def submit(job: str, recipe: str, overrides: list[str]) -> int:
    """Submit ``python -m jobs.JOB RECIPE …`` from the current folder, show its log, return its exit code.

    The local cluster is used, unless ``RAY_API_SERVER_ADDRESS`` names another one.

    Raises:
        RecipeError: the recipe is refused; nothing was sent.
        ClusterError: no such job here, no cluster answers, or the token is not its own.
    """
    known = sorted(file.stem for file in JOBS.glob("[!_]*.py"))
    if job not in known:
        raise ClusterError(f"job {job!r} is not in {str(JOBS.absolute())!r}: known are {', '.join(known) or 'none'}")
    if Path(recipe).is_absolute() or ".." in Path(recipe).parts:
        raise RecipeError(f"recipe {recipe!r} lies outside the working directory, which is what a job gets a copy of")
    storage = load_recipe(recipe, overrides).storage
    overrides = [*overrides, *([f"storage={absolute_location(storage)}"] if storage else [])]
    environment = {"RAY_LOGGER_LEVEL": "error", **os.environ}  # not a line for each file that is left out
    if "RAY_API_SERVER_ADDRESS" not in environment:
        environment |= running_cluster().client_environment()
    _require_access(environment)
    command = [str(Path(sys.executable).with_name("ray")), "job", "submit", "--working-dir", "."]
    return subprocess.run(
        [*command, "--", "python", "-m", f"jobs.{job}", recipe, *overrides], env=environment, check=False
    ).returncode


def _require_access(environment: Mapping[str, str]) -> None:
    """Ask the jobs API for its version, as 'ray job submit' will; what that tells in a traceback is one sentence here.

    Raises:
        ClusterError: nothing answers, or the token is refused.
    """
    address = environment["RAY_API_SERVER_ADDRESS"]
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    token = environment.get("RAY_AUTH_TOKEN") or (path.read_text(encoding="utf-8").strip() if path.is_file() else "")
    try:
        answer = httpx.get(f"{address}/api/version", headers={"Authorization": f"Bearer {token}"}, timeout=30.0)
    except httpx.HTTPError as error:
        raise ClusterError(f"no cluster answers at {address} ({error}): check RAY_API_SERVER_ADDRESS") from error
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        source = "RAY_AUTH_TOKEN" if "RAY_AUTH_TOKEN" in environment else path
        raise ClusterError(
            f"the cluster at {address} refuses the token of {source}: set RAY_AUTH_TOKEN_PATH to its own"
        )
