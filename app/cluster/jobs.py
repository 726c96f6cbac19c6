"""A client for the jobs API of a Ray cluster, which returns typed values."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar
from urllib.parse import urlencode

import httpx
from pydantic import BaseModel, BeforeValidator, ValidationError

from app.best_effort import warn
from app.errors import ClusterError, first_line
from app.ports import LOOPBACK, host_port

_ENDED = ("SUCCEEDED", "STOPPED", "FAILED")
_LAST_LINES = 20
_ON_THIS_MACHINE = {"0.0.0.0": LOOPBACK, "::": "::1"}  # noqa: S104
"""The address at which this machine reaches a listener on all interfaces."""
_MAX_LISTED = 10_000
"""Entries that Ray's state API returns at most."""


class Job(BaseModel):
    """A job, as the cluster describes it."""

    submission_id: str
    status: str
    entrypoint: str
    start_time: Annotated[int, BeforeValidator(lambda given: given or 0)] = 0
    """Milliseconds since 1970; 0 if Ray does not know."""
    end_time: int | None = None
    """The same; None before the end."""
    metadata: Annotated[dict[str, str], BeforeValidator(lambda given: given or {})] = {}
    message: str | None = None
    """The reason of a failure, in Ray's words."""
    driver_node_id: str | None = None
    """The node that runs the job's command; None before it starts."""
    driver_exit_code: int | None = None
    """The exit code of the job's command; None before its end, or if the node was lost."""

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended, in any way."""
        return self.status in _ENDED

    @property
    def reason(self) -> str:
        """Why the job failed, in one sentence."""
        if self.driver_exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL):  # a shell reports it as 137
            return (
                "it was killed (SIGKILL), as Linux does when a node has no memory left: 'dmesg' on the node names what "
                "it killed; give the job less to hold, and submit it again"
            )
        # Ray appends the end of the log, which was printed before.
        return (self.message or "no reason is known").partition("\n")[0].partition(", last available logs")[0]


class Node(BaseModel):
    """A node, as the cluster describes it."""

    node_id: str
    state: str


class Actor(BaseModel):
    """An actor, as the cluster describes it."""

    actor_id: str
    class_name: str
    death_cause: Any = None


class HttpAddress(BaseModel):
    """The address at which Ray Serve listens for HTTP."""

    host: str
    port: int

    def with_port(self, port: int) -> str:
        """Return HOST:PORT for a port of the same host, as this machine reaches it."""
        return host_port(_ON_THIS_MACHINE.get(self.host, self.host), port)


class GrpcOptions(BaseModel):
    """The gRPC options of Ray Serve."""

    port: int | None = None
    """None if Ray Serve was started without gRPC."""


class DeploymentConfig(BaseModel):
    """The configuration of a deployment."""

    user_config: dict[str, Any] | None = None


class Deployment(BaseModel):
    """A deployment of an application."""

    deployment_config: DeploymentConfig


class Application(BaseModel):
    """An application of Ray Serve."""

    deployments: dict[str, Deployment]

    @property
    def user_configs(self) -> list[dict[str, Any]]:
        """The ``user_config`` of each deployment."""
        return [deployment.deployment_config.user_config or {} for deployment in self.deployments.values()]


class ServeDetails(BaseModel):
    """The state of Ray Serve, as the cluster's API reports it."""

    http_options: HttpAddress | None = None
    """None if Ray Serve does not run."""
    grpc_options: GrpcOptions = GrpcOptions()
    applications: dict[str, Application] = {}


Item = TypeVar("Item", bound=BaseModel)


@dataclass(frozen=True)
class JobsApi:
    """The address of the jobs API, and the token for it."""

    address: str
    token: str
    token_source: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """Return the API that 'ray job' would use in this environment. Raises ClusterError for an empty token file."""
        path = Path(environment.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
        given = environment.get("RAY_AUTH_TOKEN")
        # Ray's own precedence: the variable before the file.
        token = given or (path.read_text(encoding="utf-8").strip() if path.is_file() else "")
        if "RAY_AUTH_TOKEN_PATH" in environment and not token:
            raise ClusterError(
                f"RAY_AUTH_TOKEN_PATH names {str(path)!r}, which has no token: give the file with the cluster's token"
            ).of("token.missing")
        return cls(environment["RAY_API_SERVER_ADDRESS"], token, "RAY_AUTH_TOKEN" if given else str(path))

    def require_access(self) -> None:
        """Request the version, as 'ray job submit' will, to turn its tracebacks into one sentence.

        Raises:
            ClusterError: nothing answers, or the token is refused.
        """
        try:
            answer = self._request("GET", "version")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ClusterError(
                f"no cluster answers at {self.address!r} ({first_line(error)}): check RAY_API_SERVER_ADDRESS, such as "
                "http://127.0.0.1:8265"
            ).of("cluster.no_answer") from error
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            refused = f"refuses the token of {self.token_source}" if self.token else "asks for a token"
            raise ClusterError(
                f"the cluster at {self.address} {refused}: set RAY_AUTH_TOKEN_PATH to the file with its token"
            ).of("token.refused")

    def jobs(self) -> list[Job]:
        """Return every submitted job, without drivers that were started by hand. Raises httpx.HTTPError."""
        answer = self._request("GET", "jobs/").raise_for_status()
        return _readable(Job, [job for job in answer.json() if job.get("type") == "SUBMISSION"])

    def last_lines(self, job: Job) -> list[str]:
        """Return the last lines of a job's log; none if it cannot be read. Raises httpx.HTTPError."""
        if job.driver_node_id is None:
            return []
        query = urlencode(
            {
                "node_id": job.driver_node_id,
                "submission_id": job.submission_id,
                "lines": str(_LAST_LINES),
                "filter_ansi_code": "true",
            }
        )
        answer = self._request("GET", f"v0/logs/file?{query}")
        # The log of a lost node cannot be read.
        return answer.text.splitlines() if answer.is_success else []

    def find(self, submission_id: str) -> Job | None:
        """Return the job with this id; None if there is none. Raises httpx.HTTPError."""
        return next((job for job in self.jobs() if job.submission_id == submission_id), None)

    def beginning_with(self, beginning: str) -> Job | None:
        """Return the job with this id, or the only one whose id begins so; None if there is none.

        Raises:
            ClusterError: there are several, or ``beginning`` is empty.
            httpx.HTTPError: the cluster does not answer.
        """
        if not beginning:
            # Every id begins so. A script may have left the id out.
            raise ClusterError(f"no job {beginning!r}: give a job's id, or its beginning").of("job.unknown")
        found = {job.submission_id: job for job in self.jobs() if job.submission_id.startswith(beginning)}
        if beginning in found or len(found) < 2:
            return found.get(beginning, next(iter(found.values()), None))
        some = ", ".join(sorted(found)[:3])
        raise ClusterError(
            f"{beginning!r} is the beginning of {len(found)} jobs, such as {some}: give more of the id"
        ).of("job.ambiguous")

    def nodes(self) -> list[Node]:
        """Return every node, dead or alive. Raises httpx.HTTPError."""
        return _readable(Node, self._listed("nodes"))

    def dead_actors(self) -> list[Actor]:
        """Return the actors that have ended for any reason. Raises httpx.HTTPError."""
        dead = {"filter_keys": "state", "filter_predicates": "=", "filter_values": "DEAD"}
        return _readable(Actor, self._listed("actors", **dead))

    def serve(self) -> ServeDetails:
        """Return the state of Ray Serve. Raises httpx.HTTPError, or ValidationError if the answer has another form."""
        answer = self._request("GET", "serve/applications/").raise_for_status()
        return ServeDetails.model_validate_json(answer.content)

    def _listed(self, resource: str, **options: str) -> list[Any]:
        query = urlencode({"detail": "1", "limit": str(_MAX_LISTED), **options})
        answer = self._request("GET", f"v0/{resource}?{query}").raise_for_status()
        entries: list[Any] = answer.json()["data"]["result"]["result"]
        return entries

    def stop(self, submission_id: str) -> None:
        """Stop a job, if it runs. Raises httpx.HTTPError."""
        self._request("POST", f"jobs/{submission_id}/stop").raise_for_status()

    def _request(self, method: str, path: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return httpx.request(method, f"{self.address}/api/{path}", headers=headers, timeout=30.0)


def _readable(kind: type[Item], entries: list[Any]) -> list[Item]:
    """Parse entries as ``kind``. Leave out malformed ones with a warning, so that they do not hide others."""
    found = []
    for entry in entries:
        try:
            found.append(kind.model_validate(entry))
        except ValidationError as error:
            _warn_once(f"the cluster lists a {kind.__name__.lower()} that cannot be read ({error!r:.300}): left out")
    return found


_warn_once = lru_cache(maxsize=256)(warn)
"""Logs each warning only once, because the cluster is polled every few seconds."""
