"""All requests to a server except inference: metadata, health, statistics and the repository.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_statistics.md
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_repository.md

The gRPC messages have the same fields.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from app.errors import RequestError, short_repr
from app.import_string import did_you_mean
from app.problems import problems_of
from app.serving.protocol.infer import check_json
from app.serving.protocol.tensors import DATATYPES
from app.tensors import TensorSpec

EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
)
"""Triton's extensions that this package supports."""

ModelState = Literal["UNKNOWN", "READY", "UNAVAILABLE", "LOADING", "UNLOADING"]


class _Message(BaseModel):
    # The protocol's names begin with "model_", which pydantic protects.
    model_config = ConfigDict(frozen=True, protected_namespaces=())


class ServerLive(_Message):
    """The body for ``live``: whether the server answers."""

    live: bool


class ServerReady(_Message):
    """The body for ``ready``: whether all models are served."""

    ready: bool


class ModelReady(_Message):
    """The body for a model's ``ready``: whether it is served."""

    name: str
    ready: bool


class ServerMetadata(_Message):
    """The name, version and extensions of the server."""

    name: str = "rayloom"
    version: str
    extensions: tuple[str, ...] = EXTENSIONS


class TensorMetadata(_Message):
    """An input or output of a model."""

    name: str
    datatype: str
    shape: list[int]

    @classmethod
    def of(cls, spec: TensorSpec) -> Self:
        """Convert a spec to the protocol's terms."""
        return cls(name=spec.name, datatype=DATATYPES[spec.dtype], shape=list(spec.shape))


class ModelMetadata(_Message):
    """The inputs and outputs of a model, and its versions."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class StatisticDuration(_Message):
    """The number of events, and their total time."""

    count: int = 0
    ns: int = 0


class _ComputeStatistics(_Message):
    compute_input: StatisticDuration = StatisticDuration()
    """Time to batch requests into a call."""
    compute_infer: StatisticDuration = StatisticDuration()
    """Time in the engine."""
    compute_output: StatisticDuration = StatisticDuration()
    """Time to check an answer, and to split it between the requests."""


class InferenceStatistics(_ComputeStatistics):
    """Statistics of requests. There is no cache, so the last two stay 0."""

    success: StatisticDuration = StatisticDuration()
    fail: StatisticDuration = StatisticDuration()
    queue: StatisticDuration = StatisticDuration()
    cache_hit: StatisticDuration = StatisticDuration()
    cache_miss: StatisticDuration = StatisticDuration()


class BatchStatistics(_ComputeStatistics):
    """Statistics of the engine's calls with this number of rows."""

    batch_size: int


class GenerationCounts(_Message):
    """What a language model does now, and the tokens that it has read and written."""

    running: int
    """Answers that are being generated."""
    waiting: int
    """Answers that wait for their turn."""
    prompt_tokens: int
    generated_tokens: int


class ModelStatistics(_Message):
    """Statistics of a version since it was loaded."""

    name: str
    version: str
    last_inference: int = 0
    """Milliseconds since the epoch; 0 if there was none."""
    inference_count: int = 0
    """The number of rows."""
    execution_count: int = 0
    """The number of the engine's calls."""
    invalid_count: int = 0
    """The number of refused requests: malformed, or not what the model takes. Triton counts these nowhere."""
    generation: GenerationCounts | None = None
    """Only of language models, which Triton's messages do not know."""
    inference_stats: InferenceStatistics = InferenceStatistics()
    batch_stats: list[BatchStatistics] = []
    response_stats: dict[str, Any] = {}
    """Always empty: it is for models with several responses to a request, and there are none here."""
    memory_usage: list[Any] = []
    """Always empty: engines share the memory of their process, so it is not measured."""


class Statistics(_Message):
    """The body for ``stats``."""

    model_stats: list[ModelStatistics]


class _RequestBody(_Message):
    model_config = ConfigDict(extra="forbid", strict=True)


class IndexRequest(_RequestBody):
    """The body of the repository's ``index``, which may be empty."""

    ready: bool = False
    """Whether to list only served models."""


class ModelIndex(_Message):
    """A version in the response to ``index``."""

    name: str
    version: str = ""
    state: ModelState
    reason: str = ""
    """The reason for its state, if there is one."""


class LoadRequest(_RequestBody):
    """The body of ``load``, which may be empty."""

    parameters: dict[str, Any] = {}

    @field_validator("parameters")
    @classmethod
    def _refuse_parameters(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        if parameters:
            raise ValueError(f"{short_repr(sorted(parameters))} cannot be given: a model is loaded as it was published")
        return parameters


class UnloadParameters(_RequestBody):
    """The parameters of ``unload``."""

    unload_dependents: Literal[False] = False
    """Only False is allowed, because no model here depends on another."""


class UnloadRequest(_RequestBody):
    """The body of ``unload``, which may be empty."""

    parameters: UnloadParameters = UnloadParameters()


Body = TypeVar("Body", bound=BaseModel)


def parse_body(model: type[Body], body: bytes) -> Body:
    """Read a JSON body. An empty one counts as ``{}`` if ``model`` has no required fields.

    Raises:
        RequestError: the body is not valid; the problem and its place are named.
    """
    # Triton's clients send no body where all fields are optional.
    if not body and not any(field.is_required() for field in model.model_fields.values()):
        body = b"{}"
    check_json(body, has_tensors=False)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(model, error, body) from None


def check_fields(model: type[Body], fields: Mapping[str, object]) -> Body:
    """Read a message's fields. Raises RequestError, which names the problem and its place."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _refusal(model, error, json.dumps(dict(fields), default=str)) from None


def _refusal(model: type[Body], error: ValidationError, given: bytes | str) -> RequestError:
    """Return a refusal that names the first problem and its key. The client's keys may be of any length."""
    reason = error.errors(include_url=False)[0]
    if reason["type"] == "json_invalid":
        required = " and ".join(name for name, field in model.model_fields.items() if field.is_required())
        expected = f"an object with {required}" if required else "an object"
        return RequestError(f"the body is not JSON ({reason['ctx']['error']}): expected {expected}").of("json.invalid")
    problems = list(problems_of(error, json.loads(given)))
    # A mistyped name explains the one that is missing.
    problem = next((problem for problem in problems if problem.first["type"] == "extra_forbidden"), problems[0])
    key = problem.key[:200]
    match problem.first["type"]:
        case "extra_forbidden":
            way_out = ": leave it out" if "." in key else f"; {did_you_mean(key, model.model_fields)}"
            return RequestError(f"unknown key {key!r}{way_out}").of("key.unknown", key)
        case "missing":
            return RequestError(f"{key!r} is missing: add it").of("key.missing", key)
        case "value_error":
            said = str(problem.first["ctx"]["error"])
            return RequestError(f"{key}: {said}" if key else said).of("parameter.unsupported", key)
        case _:
            return RequestError(
                f"{key or 'the body'} is {json.dumps(problem.given)[:80]}: expected {problem.expected}"
            ).of("key.type", key or None)
