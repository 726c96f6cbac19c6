"""The endpoint, as the command line asks it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from app.cluster.state import ClusterState
from app.errors import ClusterError, RequestError
from app.serving.access import ENDPOINT_TOKEN_FILE, read_token
from app.serving.protocol.management import ModelIndex, Statistics
from app.serving.protocol.natural import PredictRequest, PredictResponse

TOKEN_FILE_VARIABLE = "RAYLOOM_TOKEN_FILE"  # noqa: S105 # its name
_INDEX, _STATISTICS = TypeAdapter(list[ModelIndex]), TypeAdapter(Statistics)

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class EndpointClient:
    """Where an endpoint is, and the file of the token that it is told, if any."""

    url: str
    token_file: Path | None

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {read_token(self.token_file)}"} if self.token_file else {}

    def models(self) -> list[ModelIndex]:
        """The models that it serves: none, if nothing was ever deployed.

        Raises:
            ClusterError: something is there and does not say.
        """
        return self._told("POST", "v2/repository/index", _INDEX) or []

    def holds(self, name: str, version: int) -> bool:
        """Whether it has a version in memory, in whichever role: an earlier stage of a cascade is in no index.

        Raises:
            ClusterError: something is there and does not say.
        """
        told = self._told("GET", "v2/models/stats", _STATISTICS)
        held = told.model_stats if told else []
        return (name, str(version)) in {(each.name.rpartition("/")[2], each.version) for each in held}

    def _told(self, method: str, path: str, kind: TypeAdapter[Answer]) -> Answer | None:
        """What it answers; None if nothing was ever deployed."""
        try:
            answer = httpx.request(method, f"{self.url}/{path}", headers=self._headers, timeout=5.0)
            if answer.status_code == httpx.codes.NOT_FOUND:  # Serve without an application
                return None
            return kind.validate_json(answer.raise_for_status().content)
        except httpx.ConnectError:
            return None
        except (httpx.HTTPError, ValidationError) as error:
            raise ClusterError(
                f"the endpoint {self.url} does not say which models it has loaded ({error}): if it asks for a token, "
                f"name its file in {TOKEN_FILE_VARIABLE}; its logs are in the Ray dashboard"
            ) from error

    def predict(self, model: str, request: PredictRequest) -> PredictResponse:
        """Ask a model. Raises ClusterError if nothing answers, RequestError if the endpoint refuses."""
        url, content = f"{self.url}/v1/models/{model}/predict", request.model_dump_json()
        try:
            answer = httpx.post(url, content=content, headers=self._headers, timeout=60.0)
        except httpx.HTTPError as error:
            raise ClusterError(
                f"nothing answers at {self.url} ({error}): deploy a model with 'rayloom submit deploy RECIPE'"
            ) from error
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise RequestError(f"{self.url} answered 401: {answer.text}: name the token's file with --token-file")
        if answer.is_error:
            raise RequestError(f"{self.url} answered {answer.status_code}: {answer.text}")
        return PredictResponse.model_validate_json(answer.content)

    def curl(self, model: str) -> str:
        """A line to paste that asks a model."""
        token = f' -H "Authorization: Bearer $(cat {self.token_file})"' if self.token_file else ""
        return f'curl{token} {self.url}/v1/models/{model}/predict -d \'{{"inputs": "..."}}\''


def local_endpoint(cluster: ClusterState, token_file: Path | None = None) -> EndpointClient:
    """That of the local cluster, told a token if it asks for one.

    It lies in ``token_file``, else where ``$RAYLOOM_TOKEN_FILE`` says, else where jobs.deploy has made one.
    """
    named = token_file or os.environ.get(TOKEN_FILE_VARIABLE)
    known = Path(named) if named else ENDPOINT_TOKEN_FILE if ENDPOINT_TOKEN_FILE.exists() else None
    return EndpointClient(cluster.endpoint, known if known and _asks_for_token(cluster.endpoint) else None)


def _asks_for_token(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v2", timeout=5.0).status_code == httpx.codes.UNAUTHORIZED
    except httpx.HTTPError:
        return False
