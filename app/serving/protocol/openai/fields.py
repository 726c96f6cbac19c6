"""The common part of requests for text: their fields, and the parser of a body.

A field that OpenAI defines and this server does not support is refused by name. Only values that change nothing are
accepted. So a client never gets an answer to a request that was not understood.
"""

import json
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    field_validator,
    model_validator,
)

from app.engines.generation.base import Grammar, Sampling
from app.errors import RequestError, short_repr
from app.serving.protocol.management import parse_body

_MAX_STOP_TEXTS = 16
_MAX_TOP_K = 2**31 - 1
_SMALLEST_TEMPERATURE = _SMALLEST_TOP_P = 1e-6
_SMALLEST_PENALTY = 0.01
"""Engines compute in float32, where the division by a smaller number overflows, and tokens become random."""


MaxTokens = Annotated[int, Field(ge=1, lt=2**31)]


class Fields(BaseModel):
    """An object of a request. Null means the default, as in OpenAI's API."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, given: Any) -> Any:
        return {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else given


Request = TypeVar("Request", bound=Fields)


def read_request(model: type[Request], body: bytes) -> Request:
    """Read a JSON body.

    Raises:
        RequestError: it is not valid, or ambiguous. The field is named.
    """
    request = parse_body(model, body)
    # Pydantic accepts these. It has already refused JSON that is nested too deeply for this parser.
    json.loads(body.decode(), object_pairs_hook=_require_distinct, parse_constant=_refuse_constant)
    return request


def _require_distinct(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise RequestError(f"the body has the key {short_repr(key)} twice in an object: send it once").of(
                "key.repeated", key[:200]
            )
        seen.add(key)


def _refuse_constant(name: str) -> None:
    raise RequestError(f"the body has {name}, which JSON does not have: send a finite number").of("json.invalid")


def unsupported(what: str, *harmless: object, instead: str | None = None) -> AfterValidator:
    """Return the validator of a field that this server does not support.

    Args:
        what: the action that the server does not support.
        harmless: values besides null that change nothing.
        instead: the field to use.
    """

    def check(given: Any) -> Any:
        if not any(type(given) is type(value) and given == value for value in harmless):
            use = f"use {instead}, " if instead else ""
            expected = f"send {json.dumps(harmless[0])}, or leave it out" if harmless else "leave it out"
            raise ValueError(f"this server does not {what}: {use}{expected}")
        return given

    return AfterValidator(check)


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool = Field(default=False, description="send the number of tokens before the end")
    include_obfuscation: Annotated[Any, unsupported("pad chunks", False)] = None


class GenerationFields(Fields):
    """The fields that requests for chats and for completions share."""

    model: str = Field(description="NAME, or NAME/VERSION")
    max_tokens: MaxTokens | None = Field(default=None, description="maximum tokens of an answer")
    temperature: float = Field(default=1.0, ge=0, le=2, description="0: the most probable token; else at least 1e-6")
    top_p: float = Field(default=1.0, ge=_SMALLEST_TOP_P, le=1)
    top_k: int | None = Field(
        default=None, ge=-1, le=_MAX_TOP_K, description="tokens that are drawn from; -1 and 0: all"
    )
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63, description="the same seed gives the same answer")
    n: int = Field(default=1, ge=1, le=128, description="answers to a prompt")
    stop: str | Annotated[list[str], Field(max_length=_MAX_STOP_TEXTS)] = Field(
        default=[], description="texts that end an answer, and are not part of it"
    )
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, ge=_SMALLEST_PENALTY, le=10)
    stream: bool = Field(default=False, description="send the answer as events, as it is generated")
    stream_options: StreamOptions | None = None
    priority: NonNegativeInt = Field(default=0, description="1 is the most urgent; 0 means the default")
    timeout_s: PositiveFloat | None = Field(default=None, description="time until the whole answer")
    user: str | None = Field(default=None, description="changes nothing")
    logit_bias: Annotated[Any, unsupported("bias single tokens", {})] = None

    @field_validator("temperature")
    @classmethod
    def _refuse_tiny(cls, given: float) -> float:
        if 0 < given < _SMALLEST_TEMPERATURE:
            raise ValueError(f"{given} is too small to divide by: send 0, or {_SMALLEST_TEMPERATURE:g} at least")
        return given

    @model_validator(mode="after")
    def _require_stream(self) -> "GenerationFields":
        if self.stream_options and not self.stream:
            raise RequestError("stream_options is for streams: leave it out, or set stream to true").of(
                "parameter.unsupported", "stream_options"
            )
        return self

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_logprobs(self) -> bool:
        """Whether tokens are answered with their log-probabilities."""
        return False

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that an answer must follow."""
        return None

    def sampling(self, max_tokens: int) -> Sampling:
        """Return the sampling parameters of an answer with at most ``max_tokens``."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k if self.top_k and self.top_k > 0 else None,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            grammar=self.grammar,
            has_logprobs=self.wants_logprobs,
        )
