"""A client of the endpoint, for the command line."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from app.cluster.jobs import JobsApi, ServeDetails
from app.cluster.state import ClusterState
from app.errors import ClusterError, RequestError, first_line
from app.serving.access import ENDPOINT_TOKEN_FILE, read_token
from app.serving.pools import is_ours
from app.serving.protocol.management import ModelIndex, Statistics
from app.serving.protocol.predict import ModelDescription, PredictRequest, PredictResponse

TOKEN_FILE_VARIABLE = "RAYLOOM_TOKEN_FILE"  # noqa: S105 # the name of a variable
_INDEX, _STATISTICS = TypeAdapter(list[ModelIndex]), TypeAdapter(Statistics)
_NATURAL = TypeAdapter(list[ModelDescription])
_ANSWER_TIMEOUT_S = 300.0

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class EndpointClient:
    """An endpoint's address, and the file of its token if it has one."""

    url: str
    token_file: Path | None
    may_serve: bool = True
    """Whether models may be deployed. If not, the endpoint is not queried."""
    grpc: str = ""
    """The local endpoint's address for gRPC clients: HOST:PORT."""

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {read_token(self.token_file)}"} if self.token_file else {}

    def models(self) -> list[ModelIndex]:
        """Return the models that the endpoint serves; none if nothing is deployed.

        Raises:
            ClusterError: the endpoint does not answer the request.
        """
        return self._request("POST", "v2/repository/index", _INDEX) or []

    def holds(self, name: str, version: int) -> bool:
        """Return whether the endpoint serves a version in any role, or a sleeping pool may serve it.

        Raises:
            ClusterError: the endpoint does not answer the request.
        """
        # Only the index lists versions that are not loaded. Only the statistics list the stages of a cascade, as
        # CASCADE/STAGE. A sleeping pool does not report its version.
        held = {(model.name, model.version or str(version)) for model in self.models()}
        if statistics := self._request("GET", "v2/models/stats", _STATISTICS):
            held |= {(model.name.rpartition("/")[2], model.version) for model in statistics.model_stats}
        return (name, str(version)) in held

    def _request(self, method: str, path: str, kind: TypeAdapter[Answer]) -> Answer | None:
        """Return the endpoint's answer; None if nothing is deployed."""
        if not self.may_serve:
            return None
        try:
            answer = httpx.request(method, f"{self.url}/{path}", headers=self._headers, timeout=5.0)
            return kind.validate_json(answer.raise_for_status().content)
        except httpx.ConnectError as error:
            raise ClusterError(
                f"nothing answers at {self.url} ({first_line(error)}), although models may be deployed: ask again "
                "in a minute; the endpoint's logs are in the Ray dashboard"
            ).of("endpoint.no_answer") from error
        except (httpx.HTTPError, ValidationError) as error:
            raise ClusterError(
                f"the endpoint {self.url} did not list its models ({first_line(error)}): if it requires "
                f"a token, name the token's file in {TOKEN_FILE_VARIABLE}; the endpoint's logs are in the Ray dashboard"
            ).of("endpoint.not_listed") from error

    def predict(self, model: str, request: PredictRequest) -> PredictResponse:
        """Send a request to a model. Raise ClusterError if nothing answers, RequestError if the endpoint refuses it."""
        url, content = f"{self.url}/v1/models/{model}/predict", _to_json(request.model_dump())
        try:
            answer = httpx.post(url, content=content, headers=self._headers, timeout=60.0)
        except httpx.HTTPError as error:
            raise self._no_answer(error) from error
        if answer.is_error:
            raise self._refused(answer)
        return PredictResponse.model_validate_json(answer.content)

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[str]:
        """Ask a language model by a route of OpenAI's, and yield the text of its answer as it comes.

        Raises:
            ClusterError: nothing answers, or the answer was cut off.
            RequestError: the endpoint refuses the request, or the answer ended with an error.
        """
        url, content, is_whole = f"{self.url}/v1/{path}", _to_json({**body, "stream": True}), False
        headers = {**self._headers, "Content-Type": "application/json"}
        try:
            # The first token may wait in the endpoint's queue.
            timeout = httpx.Timeout(10.0, read=_ANSWER_TIMEOUT_S)
            with httpx.stream("POST", url, content=content, headers=headers, timeout=timeout) as answer:
                if answer.is_error:
                    answer.read()
                    raise self._refused(answer)
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        is_whole = True
                    elif line.startswith("data: "):
                        yield _text_of(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            raise self._no_answer(error) from error
        if not is_whole:
            raise ClusterError("the answer was cut off, because its replica was replaced: ask again").of("answer.cut")

    def natural_models(self) -> list[ModelDescription]:
        """Return the models that answer texts, images, rows or records. Raises ClusterError as ``models`` does."""
        return self._request("GET", "v1/predict", _NATURAL) or []

    def curl(self, model: str) -> str:
        """Return a command line that asks for the tensors that a model takes."""
        return f"{self._curl} {self.url}/v2/models/{model}"

    def curl_text(self, model: str, is_chat: bool) -> str:
        """Return a command line that asks a language model for text, as a chat or as a completion."""
        begin = {"messages": [{"role": "user", "content": "Hello"}]} if is_chat else {"prompt": "Once"}
        path, body = "chat/completions" if is_chat else "completions", json.dumps({"model": model, **begin})
        return f"{self._curl} {self.url}/v1/{path} -d {shlex.quote(body)}"

    def _no_answer(self, error: httpx.HTTPError) -> ClusterError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ClusterError(
                f"nothing answers at {self.url} ({first_line(error)}): deploy a model with 'rayloom submit deploy "
                "RECIPE'"
            ).of("endpoint.no_answer")
        return ClusterError(
            f"{self.url} gave no complete answer ({first_line(error)}), because its replica is starting, is busy "
            "or was replaced: ask again"
        ).of("answer.cut")

    def _refused(self, answer: httpx.Response) -> RequestError:
        remedy = "; name the token's file with --token-file" if answer.status_code == httpx.codes.UNAUTHORIZED else ""
        return RequestError(f"{self.url} answered {answer.status_code}: {_reason(answer)}{remedy}").of(
            "endpoint.refuses"
        )

    @property
    def _curl(self) -> str:
        return f'curl -H "Authorization: Bearer $(cat {self.token_file})"' if self.token_file else "curl"


def _to_json(body: Mapping[str, Any]) -> bytes:
    """Return a body as JSON. Raise RequestError if a text, such as an argument of the command, was not UTF-8."""
    try:
        return json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RequestError("the request contains text that is not valid UTF-8: convert it to UTF-8").of(
            "text.encoding"
        ) from error


def _reason(answer: httpx.Response) -> str:
    """Return the sentence of a refusal: ``error`` of the endpoint's JSON, or the first line of another program's."""
    try:
        error = answer.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return answer.text.strip().partition("\n")[0][:200] or answer.reason_phrase


def _text_of(event: Mapping[str, Any]) -> str:
    """Return the text of an event, of a chat or a completion. Raises RequestError for an error."""
    if error := event.get("error"):
        raise RequestError(f"the answer ended with an error: {error['message']}").of("answer.error")
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in event["choices"])


def named_endpoint(url: str, token_file: Path | None) -> EndpointClient:
    """Return the endpoint at a URL. Raises RequestError if it is not a URL."""
    try:
        is_url = re.match("https?://[^/]", url) and httpx.URL(url).host.encode("idna")
    except (httpx.InvalidURL, UnicodeError):
        is_url = None
    if not is_url:
        example = "http://127.0.0.1:8000" if "://" in url else f"http://{url}"
        raise RequestError(f"--endpoint is {url!r}: expected a URL with http:// or https://, such as {example}").of(
            "url.invalid", "--endpoint"
        )
    return EndpointClient(url.rstrip("/"), token_file)


def local_endpoint(cluster: ClusterState, token_file: Path | None = None) -> EndpointClient:
    """Return the local cluster's endpoint, with a token if it needs one. Ray Serve reports its addresses.

    The token is in ``token_file``, else in ``$RAYLOOM_TOKEN_FILE``, else where jobs.deploy has made one.
    """
    serve = _serve_of(cluster)
    url, grpc = cluster.endpoint, cluster.grpc_endpoint
    if serve and (http := serve.http_options):
        url = f"http://{http.with_port(http.port)}"
        grpc = http.with_port(serve.grpc_options.port or cluster.grpc_port)
    may_serve = _has_models(serve) if serve else bool(cluster.processes())
    named = token_file or os.environ.get(TOKEN_FILE_VARIABLE)
    known = Path(named) if named else ENDPOINT_TOKEN_FILE if ENDPOINT_TOKEN_FILE.exists() else None
    # The file outlives the endpoint that asked for a token, so this one is asked whether it does.
    return EndpointClient(url, known if known and _needs_token(url) else None, may_serve, grpc)


def _serve_of(cluster: ClusterState) -> ServeDetails | None:
    """Return the state of Ray Serve; None if the cluster does not report it."""
    try:
        return JobsApi.of(cluster.client_environment()).serve()
    except (ClusterError, httpx.HTTPError, ValidationError):
        return None


def _has_models(serve: ServeDetails) -> bool:
    """Return whether the configuration of the endpoint's applications names models, loaded or not."""
    ours = [application for name, application in serve.applications.items() if is_ours(name)]
    configs = [config for application in ours for config in application.user_configs]
    return any(config.get("models") or config.get("generators") for config in configs)


def _needs_token(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v2", timeout=5.0).status_code == httpx.codes.UNAUTHORIZED
    except httpx.HTTPError:
        return False
