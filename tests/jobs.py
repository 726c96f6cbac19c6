"""Run jobs with a driver attached to a cluster, which avoids the startup time of ``ray job submit``."""

from functools import cache
from typing import Any

from tests.forks import JOBS, Command, Forks
from tests.helpers import result_of
from tests.launch import Cluster

_GCS = "--gcs-address="


def run_job(cluster: dict[str, str], job: str, *arguments: str, succeeds: bool = True) -> dict[str, Any]:
    """Run ``python -m jobs.JOB ARGUMENT…`` with the environment of a submitted job, and return its result."""
    return result_of(shown_by_job(cluster, job, *arguments, succeeds=succeeds))


def shown_by_job(cluster: dict[str, str], job: str, *arguments: str, succeeds: bool = True) -> str:
    """Run a job as ``run_job`` does, and return its standard output."""
    drivers, environment = _drivers(cluster["RAYLOOM_HOME"])
    done = drivers.run(Command(f"jobs.{job}", list(arguments), environment), timeout_s=500)
    assert (done.returncode == 0) is succeeds, done.stdout + done.stderr
    return done.stdout


@cache
def _drivers(home: str) -> tuple[Forks, dict[str, str]]:
    """Return the fork server for all jobs of a cluster, and the environment of these jobs."""
    (monitor,) = Cluster({"RAYLOOM_HOME": home}).processes("log_monitor.py")
    (address,) = (word.removeprefix(_GCS) for word in monitor.cmdline() if word.startswith(_GCS))
    environment = monitor.environ() | {"RAY_ADDRESS": address}
    return Forks(environment | {"DS_ACCELERATOR": "cpu"}, JOBS), environment
