"""The jobs API of a cluster, over HTTP: what 'ray job' asks, as far as we need the answers as values."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx
from pydantic import BaseModel

from app.errors import ClusterError

_ENDED = ("SUCCEEDED", "STOPPED", "FAILED")


class Job(BaseModel):
    """What the cluster knows of a job."""

    submission_id: str
    status: str
    entrypoint: str
    start_time: int
    """In milliseconds since 1970."""
    metadata: dict[str, str]
    message: str | None = None
    """Why it failed, if it did."""

    @property
    def has_ended(self) -> bool:
        """Whether it will not go on."""
        return self.status in _ENDED


@dataclass(frozen=True)
class JobsApi:
    """Where the jobs API answers, and the token that it asks for."""

    address: str
    token: str
    token_source: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """The API that 'ray job' would use in this environment."""
        path = Path(environment.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
        given = environment.get("RAY_AUTH_TOKEN")
        token = given or (path.read_text(encoding="utf-8").strip() if path.is_file() else "")
        return cls(environment["RAY_API_SERVER_ADDRESS"], token, "RAY_AUTH_TOKEN" if given else str(path))

    def require_access(self) -> None:
        """Ask for the version, as 'ray job submit' will; what that tells in a traceback is one sentence here.

        Raises:
            ClusterError: nothing answers, or the token is refused.
        """
        try:
            answer = self._ask("GET", "version")
        except httpx.HTTPError as error:
            raise ClusterError(
                f"no cluster answers at {self.address} ({error}): check RAY_API_SERVER_ADDRESS"
            ) from error
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise ClusterError(
                f"the cluster at {self.address} refuses the token of {self.token_source}: set RAY_AUTH_TOKEN_PATH "
                "to its own"
            )

    def jobs(self) -> list[Job]:
        """Every job that was submitted, not drivers that came without. Raises httpx.HTTPError without an answer."""
        answer = self._ask("GET", "jobs/").raise_for_status()
        return [Job.model_validate(each) for each in answer.json() if each["type"] == "SUBMISSION"]

    def find(self, submission_id: str) -> Job | None:
        """The job of that id, if there is one. Raises httpx.HTTPError without an answer."""
        return next((job for job in self.jobs() if job.submission_id == submission_id), None)

    def stop(self, submission_id: str) -> None:
        """Stop a job, if it runs. Raises httpx.HTTPError without an answer."""
        self._ask("POST", f"jobs/{submission_id}/stop").raise_for_status()

    def _ask(self, method: str, path: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.request(method, f"{self.address}/api/{path}", headers=headers, timeout=30.0)
