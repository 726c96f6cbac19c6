"""Run jobs with a driver attached to a cluster, which avoids the startup time of ``ray job submit``."""

import subprocess
from functools import cache
from typing import Any

from app.serving.pools import application_of
from tests.forks import JOBS, Command, Forks
from tests.helpers import latest, result_of
from tests.launch import Cluster

_GCS = "--gcs-address="


def run_job(cluster: dict[str, str], job: str, *arguments: str, succeeds: bool = True) -> dict[str, Any]:
    """Run ``python -m jobs.JOB ARGUMENT…`` with the environment of a submitted job, and return its result."""
    return result_of(shown_by_job(cluster, job, *arguments, succeeds=succeeds))


def shown_by_job(cluster: dict[str, str], job: str, *arguments: str, succeeds: bool = True) -> str:
    """Run a job as ``run_job`` does, and return its standard output."""
    done = _driven(cluster, f"jobs.{job}", *latest(arguments))
    assert (done.returncode == 0) is succeeds, done.stdout + done.stderr
    return done.stdout


def serve_nothing(cluster: dict[str, str]) -> None:
    """Delete the endpoint of a running cluster, and keep Serve running.

    Serve's REST API would end Serve, and the next job would have to start it.
    """
    done = _driven(cluster, "tests.jobs:delete_endpoint")
    assert done.returncode == 0, done.stdout + done.stderr


def delete_endpoint() -> None:
    """Delete the endpoint of the cluster that this process's environment names."""
    from ray import serve  # takes seconds to import

    from jobs._cluster import connect
    from jobs._endpoint import desired_pools

    connect()
    for pool in desired_pools().by_pool:
        serve.delete(application_of(pool))


def _driven(cluster: dict[str, str], module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module in a fork with the environment of a submitted job."""
    forks, environment = drivers(cluster["RAYLOOM_HOME"])
    return forks.run(Command(module, list(arguments), environment), timeout_s=500)


@cache
def drivers(home: str) -> tuple[Forks, dict[str, str]]:
    """Return the fork server for all jobs of a cluster, and the environment of these jobs.

    The server ends when nothing refers to it any more.
    """
    (monitor,) = Cluster({"RAYLOOM_HOME": home}).processes("log_monitor.py")
    (address,) = (word.removeprefix(_GCS) for word in monitor.cmdline() if word.startswith(_GCS))
    environment = monitor.environ() | {"RAY_ADDRESS": address}
    return Forks(environment | {"DS_ACCELERATOR": "cpu"}, JOBS), environment
