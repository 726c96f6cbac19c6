"""What is asked of a server beside inference: what it is, what it serves, how that goes, and what it is to serve.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_statistics.md
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_repository.md

The fields are those of the gRPC messages, too.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from app.errors import RequestError, short_repr
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
"""What of Triton's extensions this package reads and writes."""

ModelState = Literal["UNKNOWN", "READY", "UNAVAILABLE", "LOADING", "UNLOADING"]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, protected_namespaces=())


class ServerLive(_Message):
    """Whether the server answers."""

    live: bool


class ServerReady(_Message):
    """Whether every model that is to be served is."""

    ready: bool


class ModelReady(_Message):
    """Whether a model is served."""

    name: str
    ready: bool


class ServerMetadata(_Message):
    """What the server is."""

    name: str = "rayloom"
    version: str
    extensions: tuple[str, ...] = EXTENSIONS


class TensorMetadata(_Message):
    """A tensor that a model takes or gives."""

    name: str
    datatype: str
    shape: list[int]

    @classmethod
    def of(cls, spec: TensorSpec) -> Self:
        """The protocol's words for a spec."""
        return cls(name=spec.name, datatype=DATATYPES[spec.dtype], shape=list(spec.shape))


class ModelMetadata(_Message):
    """What a model takes and gives."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class Duration(_Message):
    """How often something was done, and how long that took in all."""

    count: int = 0
    ns: int = 0


class _ComputeStatistics(_Message):
    compute_input: Duration = Duration()
    """Time to join requests into a call."""
    compute_infer: Duration = Duration()
    """Time in the engine."""
    compute_output: Duration = Duration()
    """Time to check an answer and to give each request its part."""


class InferenceStatistics(_ComputeStatistics):
    """Of requests. Nothing is cached here, so the last two stay 0."""

    success: Duration = Duration()
    fail: Duration = Duration()
    queue: Duration = Duration()
    cache_hit: Duration = Duration()
    cache_miss: Duration = Duration()


class BatchStatistics(_ComputeStatistics):
    """Of calls of the engine with this many rows."""

    batch_size: int


class ModelStatistics(_Message):
    """What a version has done since it was loaded."""

    name: str
    version: str
    last_inference: int = 0
    """Milliseconds since the epoch; 0 if there was none."""
    inference_count: int = 0
    """Rows."""
    execution_count: int = 0
    """Calls of the engine."""
    inference_stats: InferenceStatistics = InferenceStatistics()
    batch_stats: list[BatchStatistics] = []
    response_stats: dict[str, Any] = {}
    """Always empty: it is for models that give several answers to a request, and none does here."""
    memory_usage: list[Any] = []
    """Always empty: engines share the memory of their process, so it is not measured."""


class Statistics(_Message):
    """The answer of ``stats``."""

    model_stats: list[ModelStatistics]


class _Request(_Message):
    model_config = ConfigDict(extra="forbid", strict=True)


class IndexRequest(_Request):
    """The body of the repository's ``index``, which may be empty."""

    ready: bool = False
    """Only of models that are served."""


class ModelIndex(_Message):
    """A version in the answer of ``index``."""

    name: str
    version: str = ""
    state: ModelState
    reason: str = ""
    """Why it is in this state, where that needs a reason."""


class LoadRequest(_Request):
    """The body of ``load``, which may be empty."""

    parameters: dict[str, Any] = {}

    @field_validator("parameters")
    @classmethod
    def _nothing_is_replaced(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        if parameters:
            raise ValueError(f"{short_repr(sorted(parameters))} cannot be given: a model is loaded as it was published")
        return parameters


class UnloadParameters(_Request):
    """How a model is unloaded."""

    unload_dependents: Literal[False] = False
    """No model here depends on another."""


class UnloadRequest(_Request):
    """The body of ``unload``, which may be empty."""

    parameters: UnloadParameters = UnloadParameters()


Body = TypeVar("Body", bound=BaseModel)


def parse_body(model: type[Body], body: bytes) -> Body:
    """Read a JSON body; an empty one is ``{}`` to a model that requires nothing.

    Raises:
        RequestError: it says what is wrong and where.
    """
    if not body and not any(field.is_required() for field in model.model_fields.values()):
        body = b"{}"
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(model, error) from None


def check_fields(model: type[Body], fields: Mapping[str, object]) -> Body:
    """The same of a message's fields. Raises RequestError that says what is wrong and where."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _refusal(model, error) from None


def _refusal(model: type[Body], error: ValidationError) -> RequestError:
    problem = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in problem["loc"]) or "the body"
    return RequestError(f"{where[:200]}: {problem['msg']}; expected JSON of the form of {model.__name__}")
