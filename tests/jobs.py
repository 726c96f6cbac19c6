"""Jobs whose driver is attached to a cluster, which spares what ``ray job submit`` takes to load and start."""

from functools import cache
from typing import Any

from tests.forks import JOBS, Command, Forks
from tests.helpers import result_of
from tests.launch import Cluster

_GCS = "--gcs-address="


def run_job(cluster: dict[str, str], job: str, *arguments: str, succeeds: bool = True) -> dict[str, Any]:
    """The result of ``python -m jobs.JOB ARGUMENT…`` in a driver that has the environment of a submitted one."""
    return result_of(shown_by_job(cluster, job, *arguments, succeeds=succeeds))


def shown_by_job(cluster: dict[str, str], job: str, *arguments: str, succeeds: bool = True) -> str:
    """What it prints."""
    drivers, environment = _drivers(cluster["RAYLOOM_HOME"])
    done = drivers.run(Command(f"jobs.{job}", list(arguments), environment), timeout_s=500)
    assert (done.returncode == 0) is succeeds, done.stdout + done.stderr
    return done.stdout


@cache
def _drivers(home: str) -> tuple[Forks, dict[str, str]]:
    """One for all jobs of a cluster, and the environment of its jobs."""
    (monitor,) = Cluster({"RAYLOOM_HOME": home}).processes("log_monitor.py")
    (address,) = (word.removeprefix(_GCS) for word in monitor.cmdline() if word.startswith(_GCS))
    environment = monitor.environ() | {"RAY_ADDRESS": address}
    return Forks(environment | {"DS_ACCELERATOR": "cpu"}, JOBS), environment
