"""What of a cluster Ray itself does not export: jobs that failed, and processes and nodes that were lost."""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import httpx
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.cluster.jobs import Actor, Job, JobsApi

_SHOWN_S = 900.0
"""For how long after its end a failed job is shown: rules look for one that failed lately."""
_STATUSES = ("PENDING", "RUNNING", "SUCCEEDED", "STOPPED", "FAILED")
_LOST = ("WORKER_DIED", "NODE_DIED")
"""Ray's reasons for the death of an actor whose process or node was lost. Others were ended on purpose."""
_KINDS = {
    "replica": re.compile("ServeReplica"),
    "proxy": re.compile("ProxyActor|HAProxyManager"),
    "train_worker": re.compile("RayTrainWorker"),
    "trial": re.compile("TrialActor"),
}
KINDS = (*_KINDS, "other")
_JOB = re.compile(r"(?<!\S)[\"']?jobs\.(\w+)")
"""Matches a job in an entrypoint, which may be any text: anybody can submit anything."""


@dataclass(eq=False)  # a registry keeps collectors by their identity
class ClusterWatch(Collector):
    """Asks a cluster's API what there is, and counts what was lost since the first look."""

    api: JobsApi
    clock: Callable[[], float] = time.time
    """Returns the seconds since 1970."""
    _jobs: list[Job] = field(default_factory=list)
    _nodes: Counter[str] = field(default_factory=Counter)
    _dead: dict[str, set[str]] = field(default_factory=dict)
    """What was dead at the last look, by resource."""
    _lost_actors: Counter[str] = field(default_factory=Counter)
    _lost_nodes: int = 0
    _failed_looks: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self) -> None:
        """Ask once. What does not answer is counted, and asked again at the next look."""
        # Each list is polled separately, so that a failure does not affect the others.
        looks = [self._look(look) for look in (self._look_at_jobs, self._look_at_nodes, self._look_at_actors)]
        self._failed_looks += not all(looks)

    def _look(self, look: Callable[[], None]) -> bool:
        """Return whether the cluster gave a valid answer."""
        try:
            look()
        except (httpx.HTTPError, AttributeError, LookupError, TypeError, ValueError):
            return False
        return True

    # Take the lock only once there is an answer, so that Prometheus never waits for the cluster's API.

    def _look_at_jobs(self) -> None:
        jobs = self.api.jobs()
        with self._lock:
            self._jobs = jobs

    def _look_at_nodes(self) -> None:
        nodes = self.api.nodes()
        with self._lock:
            self._nodes = Counter(node.state.lower() for node in nodes)
            self._lost_nodes += len(self._new("nodes", [node.node_id for node in nodes if node.state == "DEAD"]))

    def _look_at_actors(self) -> None:
        dead = self.api.dead_actors()
        with self._lock:
            new = self._new("actors", [actor.actor_id for actor in dead])
            self._lost_actors.update(
                kind_of(actor.class_name) for actor in dead if actor.actor_id in new and _was_lost(actor)
            )

    def collect(self) -> Iterable[Metric]:
        """Return what the last look found, when Prometheus asks."""
        with self._lock:
            # A list, because a generator would run after the lock is released.
            return list(self._collect())

    def _collect(self) -> Iterator[Metric]:
        jobs = GaugeMetricFamily("rayloom_jobs", "Submitted jobs.", labels=["job", "status"])
        names = {job_of(job) for job in self._jobs}
        counted = Counter((job_of(job), job.status) for job in self._jobs)
        for name in sorted(names):
            for status in _STATUSES:
                jobs.add_metric([name, status.lower()], counted[name, status])
        yield jobs

        failed = GaugeMetricFamily(
            "rayloom_job_failed_timestamp_seconds", "When a job failed.", labels=["job", "submission_id"]
        )
        for job in self._jobs:
            ended_s = (job.end_time or 0) / 1e3
            if job.status == "FAILED" and self.clock() - ended_s < _SHOWN_S:
                failed.add_metric([job_of(job), job.submission_id], ended_s)
        yield failed

        nodes = GaugeMetricFamily("rayloom_nodes", "Nodes that Ray knows.", labels=["state"])
        for state in ("alive", "dead"):
            nodes.add_metric([state], self._nodes[state])
        yield nodes
        yield CounterMetricFamily("rayloom_nodes_lost", "Nodes that died since this began.", value=self._lost_nodes)

        actors = CounterMetricFamily("rayloom_actors_lost", "Actors whose process or node was lost.", labels=["kind"])
        for kind in KINDS:
            actors.add_metric([kind], self._lost_actors[kind])
        yield actors
        yield CounterMetricFamily(
            "rayloom_failed_looks", "Times that the cluster did not answer.", value=self._failed_looks
        )

    def _new(self, resource: str, dead: list[str]) -> set[str]:
        """Return which have died since the last look; none at the first."""
        before = self._dead.get(resource)
        self._dead[resource] = set(dead)
        return set() if before is None else set(dead) - before


def job_of(job: Job) -> str:
    """Return the name of a job, such as ``train``; ``other`` if it is none of Rayloom's."""
    found = _JOB.search(job.entrypoint)
    return found[1] if found else "other"


def kind_of(class_name: str) -> str:
    """Return what an actor is for, by its class."""
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(class_name)), "other")


def _was_lost(actor: Actor) -> bool:
    return any(reason in str(actor.death_cause) for reason in _LOST)
