"""Supervise the control processes of the local cluster: python -m app.cluster.supervisor

``rayloom up`` starts a supervisor, and ``rayloom down`` ends it first. If Ray's GCS dies, the supervisor relaunches it.
The GCS reads its store, and nothing is lost. If the raylet of the head dies, the cluster is lost. The supervisor
restarts it with the same store, and resubmits the jobs of 'rayloom submit' that had not ended. It gives up if a process
keeps dying. Its actions are in ``supervisor.log`` in the cluster's folder.
"""

import logging
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn, Self, TypeVar

import httpx
import psutil
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from app.cluster import local
from app.cluster.jobs import JobsApi
from app.cluster.state import GCS, ClusterState, running_cluster
from app.cluster.submit import resubmit
from app.errors import ClusterError

Answer = TypeVar("Answer")
LOG = logging.getLogger("supervisor")
_PERIOD_S = 0.5
_API_TIMEOUT_S = 120.0
_NOT_RESUBMITTED = "not submitted again, because 'rayloom submit' has not sent it, or it was lost before"


@dataclass
class RestartLimit:
    """Allows ``max_restarts`` of a process in any ``window_s`` seconds."""

    process: str
    max_restarts: int = 5
    window_s: float = 600.0
    _restarts: deque[float] = field(default_factory=deque)

    def count(self) -> None:
        """Count a restart. Raise ClusterError if there were too many."""
        now = time.monotonic()
        while self._restarts and self._restarts[0] < now - self.window_s:
            self._restarts.popleft()
        if len(self._restarts) == self.max_restarts:
            raise ClusterError(
                f"{self.process} died {self.max_restarts + 1} times within {self.window_s / 60:.0f} minutes: look at "
                "Ray's logs, then run 'rayloom down' and 'rayloom up'"
            ).of("restarts.too_many")
        self._restarts.append(now)


@dataclass(frozen=True)
class ControlProcesses:
    """The two processes of the head that a cluster needs, and how its GCS was started."""

    gcs: psutil.Process
    raylet: psutil.Process
    command: list[str]
    environment: dict[str, str]
    folder: str

    @classmethod
    def of(cls, cluster: ClusterState) -> Self:
        """Find the processes of a running cluster. Raise ClusterError if one is missing."""
        gcs, raylet = _oldest(cluster, GCS), _oldest(cluster, "raylet")
        return cls(gcs, raylet, gcs.cmdline(), gcs.environ(), gcs.cwd())

    def relaunch_gcs(self) -> Self:
        """Start the GCS again, with the command, the environment and the folder of the one that died."""
        gcs = psutil.Popen(
            self.command,
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # it writes to log files that its command names
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return replace(self, gcs=gcs)


def supervise(cluster: ClusterState) -> NoReturn:
    """Restart the cluster's control processes until one dies too often.

    Raises:
        ClusterError: a process dies too often, or the cluster cannot be restarted.
    """
    gcs_limit, raylet_limit = RestartLimit("the GCS"), RestartLimit("the raylet of the head")
    head = ControlProcesses.of(cluster)
    LOG.info("watches the GCS, process %d, and the raylet of the head, process %d", head.gcs.pid, head.raylet.pid)
    while True:
        # The raylet comes first, because restarting the cluster replaces the GCS, too.
        if not _is_alive(head.raylet):
            raylet_limit.count()
            head = _restart_cluster(cluster)
        elif not _is_alive(head.gcs):
            gcs_limit.count()
            died, head = head.gcs.pid, head.relaunch_gcs()
            LOG.info("relaunched the GCS: process %d died, %d continues from its store", died, head.gcs.pid)
        time.sleep(_PERIOD_S)


def _restart_cluster(cluster: ClusterState) -> ControlProcesses:
    lost_at = time.time()
    LOG.info("the raylet of the head died, and the cluster with it: restarting it")
    local.restart(cluster)
    head = ControlProcesses.of(cluster)
    LOG.info("restarted the cluster after %.0f s", time.time() - lost_at)
    _resubmit_lost(cluster, lost_at)
    return head


def _resubmit_lost(cluster: ClusterState, lost_at: float) -> None:
    """Resubmit the jobs that had not ended at ``lost_at``, in seconds since 1970."""
    environment = {**os.environ, **cluster.client_environment()}
    api = JobsApi.of(environment)
    # A job that began after the loss runs on the new cluster.
    lost = [job for job in _retry_until_up(api.jobs) if not job.has_ended and job.start_time < lost_at * 1000]
    for job in lost:
        try:
            # Ray notices that the job is gone, and marks it as failed.
            _retry_until_up(partial(api.stop, job.submission_id))
        except ClusterError as error:
            LOG.error("%s", error)
    for job in lost:
        try:
            new_id = resubmit(job, environment)
            outcome = f"submitted again as {new_id}" if new_id else _NOT_RESUBMITTED
            LOG.info("job %s was lost: %s", job.submission_id, outcome)
        except ClusterError as error:
            # The other jobs are submitted again, even if one is refused.
            LOG.error("%s", error)


def _retry_until_up(request: Callable[[], Answer]) -> Answer:
    """Repeat a request to the jobs API until it succeeds. A dashboard that has just started does not answer yet.

    Raises:
        ClusterError: the API does not answer within ``_API_TIMEOUT_S``.
    """
    retrying = Retrying(
        retry=retry_if_exception_type(httpx.HTTPError),
        wait=wait_fixed(_PERIOD_S),
        stop=stop_after_delay(_API_TIMEOUT_S),
        reraise=True,
    )
    try:
        return retrying(request)
    except httpx.HTTPError as error:
        raise ClusterError(f"the jobs API does not answer, so no job is submitted again: {error}").of(
            "cluster.no_answer"
        ) from error


def _oldest(cluster: ClusterState, name: str) -> psutil.Process:
    """Return the oldest process of this name. A raylet's fork has the same name until it becomes a worker."""
    found = [process for process in cluster.processes() if process.name() == name]
    if not found:
        raise ClusterError(f"no process {name!r} is in the cluster").of("process.missing")
    return min(found, key=lambda process: process.create_time())


def _is_alive(process: psutil.Process) -> bool:
    try:
        # The supervisor is the parent of a relaunched GCS, which becomes a zombie when it dies.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main() -> NoReturn:
    """Supervise the cluster of ``RAYLOOM_HOME``, and log to standard error."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    LOG.setLevel(logging.INFO)
    try:
        supervise(running_cluster())
    except (ClusterError, psutil.Error) as error:
        LOG.error("gave up: %s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
