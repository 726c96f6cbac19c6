"""Watch over the control processes of the local cluster: python -m app.cluster.supervisor

``rayloom up`` leaves one of these behind, ``rayloom down`` ends it first. If Ray's GCS dies, it is started again and
reads its store: nothing is lost. If the raylet of the head dies, the cluster is lost: it is started anew with the same
store, and the jobs that 'rayloom submit' sent and that had not ended are submitted once more. One that keeps dying is
given up. What it did is in ``supervisor.log`` in the cluster's folder.
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

from app.cluster import local
from app.cluster.jobs import JobsApi
from app.cluster.state import GCS, ClusterState, running_cluster
from app.cluster.submit import resubmit
from app.errors import ClusterError

Answer = TypeVar("Answer")
LOG = logging.getLogger("supervisor")
_PERIOD_S = 0.5
_API_TIMEOUT_S = 120.0
_NOT_AGAIN = "not submitted again, for 'rayloom submit' has not sent it, or it was lost before"


@dataclass
class Budget:
    """How often something may be started again: ``limit`` times in any ``window_s`` seconds."""

    what: str
    limit: int = 5
    window_s: float = 600.0
    _spent: deque[float] = field(default_factory=deque)

    def spend(self) -> None:
        """Count one more start. Raises ClusterError if that is one too many."""
        now = time.monotonic()
        while self._spent and self._spent[0] < now - self.window_s:
            self._spent.popleft()
        if len(self._spent) == self.limit:
            raise ClusterError(
                f"{self.what} died {self.limit + 1} times within {self.window_s / 60:.0f} minutes: look at Ray's logs, "
                "then run 'rayloom down' and 'rayloom up'"
            )
        self._spent.append(now)


@dataclass(frozen=True)
class Head:
    """The two processes that a cluster cannot be without, and what its GCS was started with."""

    gcs: psutil.Process
    raylet: psutil.Process
    command: list[str]
    environment: dict[str, str]
    folder: str

    @classmethod
    def of(cls, cluster: ClusterState) -> Self:
        """Those of a cluster that runs. Raises ClusterError if one of them is not there."""
        gcs, raylet = _oldest(cluster, GCS), _oldest(cluster, "raylet")
        return cls(gcs, raylet, gcs.cmdline(), gcs.environ(), gcs.cwd())

    def relaunch_gcs(self) -> Self:
        """Start a GCS with the command, the environment and the folder of the one that died."""
        gcs = psutil.Popen(
            self.command,
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # it writes to the logs that its command names
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return replace(self, gcs=gcs)


def supervise(cluster: ClusterState) -> NoReturn:
    """Look after a cluster for as long as that helps.

    Raises:
        ClusterError: a process dies too often, or the cluster cannot be started anew.
    """
    gcs_starts, cluster_starts = Budget("the GCS"), Budget("the raylet of the head")
    head = Head.of(cluster)
    LOG.info("watches the GCS, process %d, and the raylet of the head, process %d", head.gcs.pid, head.raylet.pid)
    while True:
        if not _lives(head.raylet):
            cluster_starts.spend()
            head = _start_anew(cluster)
        elif not _lives(head.gcs):
            gcs_starts.spend()
            died, head = head.gcs.pid, head.relaunch_gcs()
            LOG.info("relaunched the GCS: process %d died, %d goes on from its store", died, head.gcs.pid)
        time.sleep(_PERIOD_S)


def _start_anew(cluster: ClusterState) -> Head:
    lost_at = time.time()
    LOG.info("the raylet of the head died, and the cluster with it: starting it anew")
    local.restart(cluster)
    head = Head.of(cluster)
    LOG.info("started the cluster anew, after %.0f s", time.time() - lost_at)
    _resubmit_lost(cluster, lost_at)
    return head


def _resubmit_lost(cluster: ClusterState, lost_at: float) -> None:
    """Submit once more what had not ended at ``lost_at``, in seconds since 1970."""
    environment = {**os.environ, **cluster.client_environment()}
    api = JobsApi.of(environment)
    lost = [job for job in _patiently(api.jobs) if not job.has_ended and job.start_time < lost_at * 1000]
    for job in lost:
        _patiently(partial(api.stop, job.submission_id))  # Ray finds that it is gone, and calls it failed
    for job in lost:
        try:
            again = resubmit(job, environment)
            LOG.info("job %s was lost: %s", job.submission_id, f"submitted again as {again}" if again else _NOT_AGAIN)
        except ClusterError as error:
            LOG.error("%s", error)


def _patiently(ask: Callable[[], Answer]) -> Answer:
    """What the jobs API answers, when it answers: a dashboard that has just started does not yet.

    Raises:
        ClusterError: it still does not after a while.
    """
    deadline = time.monotonic() + _API_TIMEOUT_S
    while True:
        try:
            return ask()
        except httpx.HTTPError as error:
            if time.monotonic() > deadline:
                raise ClusterError(f"the jobs API does not answer, so no job is submitted again: {error}") from error
            time.sleep(_PERIOD_S)


def _oldest(cluster: ClusterState, name: str) -> psutil.Process:
    """The oldest, because a raylet's fork bears its name until it becomes a worker."""
    found = [process for process in cluster.processes() if process.name() == name]
    if not found:
        raise ClusterError(f"no process {name!r} is in the cluster")
    return min(found, key=lambda process: process.create_time())


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main() -> NoReturn:
    """Look after the cluster of ``RAYLOOM_HOME``; to standard error goes what was done."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    LOG.setLevel(logging.INFO)
    try:
        supervise(running_cluster())
    except (ClusterError, psutil.Error) as error:
        LOG.error("gave up: %s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
