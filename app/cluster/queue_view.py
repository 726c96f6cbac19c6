"""The jobs of a cluster that run or wait, as ``rayloom jobs`` lists them."""

from typing import Literal

from pydantic import BaseModel

from app.cluster.jobs import Job, JobsApi
from app.cluster.queue import PRIORITY, USER, Place


class ListedJob(BaseModel):
    """A job that has not ended."""

    job: str
    user: str | None
    """None if the job runs and its metadata name no user."""
    priority: str
    state: Literal["starting", "running", "waiting"]
    place: int | None = None
    """The place of a waiting job in the line, from 1."""
    needs: dict[str, float] = {}
    """Resources that a waiting job needs."""
    behind: list[str] = []
    """The jobs that it waits for."""
    reason: str = ""
    """``needs`` and ``behind`` in words."""
    since: int
    """When it was submitted, in milliseconds since 1970."""

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """The row of a table."""
        state = f"waiting, place {self.place}" if self.place else self.state
        return self.job, self.user or "-", self.priority, state, self.reason


def listed_jobs(api: JobsApi) -> list[ListedJob]:
    """Return the running jobs, the oldest first, then the waiting jobs in the order of their turns.

    A waiting job prints its place in its log whenever it changes. Ray may print a few lines after it.

    Raises:
        httpx.HTTPError: the cluster does not answer.
    """
    rows = [_listed(api, job) for job in api.jobs() if not job.has_ended]
    return sorted(rows, key=lambda row: (row.place or 0, row.since))


def _listed(api: JobsApi, job: Job) -> ListedJob:
    user, priority = job.metadata.get(USER), job.metadata.get(PRIORITY) or "normal"
    place = Place.of_log(api.last_lines(job)) if job.status == "RUNNING" else None
    if place is None:
        state: Literal["starting", "running"] = "running" if job.status == "RUNNING" else "starting"
        return ListedJob(job=job.submission_id, user=user, priority=priority, state=state, since=job.start_time)
    return ListedJob(
        job=job.submission_id,
        user=place.user,
        priority=place.priority,
        state="waiting",
        place=place.place,
        needs=place.needs,
        behind=place.behind,
        reason=place.reason,
        since=job.start_time,
    )
