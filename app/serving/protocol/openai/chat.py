"""Requests for answers in a conversation.

https://developers.openai.com/api/reference/resources/chat/subresources/completions/methods/create
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from app.engines.generation.base import Grammar
from app.errors import RequestError, short_repr
from app.serving.protocol.openai.fields import Fields, GenerationFields, MaxTokens, unsupported

_NAME = r"^[a-zA-Z0-9_-]{1,64}$"


class TextPart(Fields):
    """A part of a message."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _require_text(cls, given: Any) -> Any:
        kind = given.get("type", "text") if isinstance(given, dict) else "text"
        if kind != "text":
            raise ValueError(f"parts of type {short_repr(kind)} are not read: expected parts of type 'text' alone")
        return given


class CalledFunction(Fields):
    """The function of a tool call, and its arguments as JSON."""

    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _require_object(cls, given: str) -> str:
        try:
            is_object = isinstance(json.loads(given), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise ValueError(f"{short_repr(given)} is not a JSON object")
        return given


class GivenCall(Fields):
    """A tool call that the model made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_turn(self) -> dict[str, Any]:
        """Return it as templates read it, with arguments as values."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class ChatMessage(Fields):
    """A turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = Field(default=None, description="for templates that read it")
    tool_calls: list[GivenCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(default=None, description="for templates that read it")
    refusal: Annotated[Any, unsupported("read refusals")] = None
    audio: Annotated[Any, unsupported("read audio")] = None
    annotations: Annotated[Any, unsupported("read annotations", [])] = None
    function_call: Annotated[Any, unsupported("read the deprecated function_call", instead="tool_calls")] = None

    @field_validator("role", mode="before")
    @classmethod
    def _refuse_function(cls, given: Any) -> Any:
        if given == "function":
            raise ValueError("'function' is deprecated: use 'tool', with the tool_call_id of the call")
        return given

    @model_validator(mode="after")
    def _fits_role(self) -> "ChatMessage":
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing: add it")
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(f"tool_calls belong to the role 'assistant', not to {self.role!r}")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("tool_call_id belongs to the role 'tool', which needs it")
        return self

    def as_turn(self) -> dict[str, Any]:
        """Return it as templates read it."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        turn = self.model_dump(include={"name", "tool_call_id", "reasoning_content"}, exclude_none=True)
        if self.tool_calls:
            turn["tool_calls"] = [call.as_turn() for call in self.tool_calls]
        # Templates have one role for both, and concatenate the content, which may be None.
        return {"role": "system" if self.role == "developer" else self.role, "content": content or "", **turn}


class FunctionDefinition(Fields):
    """A function that the model may call."""

    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="a JSON schema of its arguments")
    strict: Annotated[Any, unsupported("hold arguments to a schema", False)] = None


class ToolDefinition(Fields):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition

    @model_validator(mode="before")
    @classmethod
    def _require_function(cls, given: Any) -> Any:
        kind = given.get("type", "function") if isinstance(given, dict) else "function"
        if kind != "function":
            raise ValueError(f"tools of type {short_repr(kind)} are not supported: expected type 'function'")
        return given


class JsonSchema(Fields):
    """A schema for the answer."""

    name: str = Field(pattern=_NAME)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(default=None, description="changes nothing: answers always follow the schema")


class ResponseFormat(Fields):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise ValueError("json_schema belongs to type 'json_schema', which needs it")
        return self

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of this format."""
        if self.type == "text":
            return None
        return Grammar("json_schema", json.dumps(self.json_schema.schema_ if self.json_schema else {"type": "object"}))


class ChatRequest(GenerationFields):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=2**14, fail_fast=True)]
    max_completion_tokens: MaxTokens | None = Field(default=None, description="the new name of max_tokens")
    logprobs: bool = Field(default=False, description="whether to send the log-probability of each token")
    top_logprobs: Annotated[Any, unsupported("know the probabilities of other tokens", 0)] = None
    response_format: ResponseFormat | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: Annotated[Any, unsupported("force or restrict tool calls", "auto", "none")] = None
    parallel_tool_calls: bool = True
    metadata: dict[str, str] | None = Field(default=None, description="changes nothing, because nothing is stored")
    safety_identifier: str | None = Field(default=None, description="changes nothing")
    prompt_cache_key: str | None = Field(default=None, description="changes nothing: equal beginnings are found")
    store: Annotated[Any, unsupported("store answers", False)] = None
    audio: Annotated[Any, unsupported("speak")] = None
    modalities: Annotated[Any, unsupported("answer with anything but text", ["text"])] = None
    moderation: Annotated[Any, unsupported("moderate")] = None
    prediction: Annotated[Any, unsupported("take predicted answers")] = None
    prompt_cache_options: Annotated[Any, unsupported("promise how long prompts are cached")] = None
    prompt_cache_retention: Annotated[Any, unsupported("promise how long prompts are cached")] = None
    reasoning_effort: Annotated[Any, unsupported("control reasoning")] = None
    service_tier: Annotated[Any, unsupported("have service tiers", "auto", "default", instead="priority")] = None
    verbosity: Annotated[Any, unsupported("control verbosity")] = None
    web_search_options: Annotated[Any, unsupported("search the web")] = None
    functions: Annotated[Any, unsupported("take the deprecated functions", instead="tools")] = None
    function_call: Annotated[Any, unsupported("take the deprecated function_call", instead="tool_choice")] = None

    @model_validator(mode="after")
    def _agrees(self) -> "ChatRequest":
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise _conflict("max_completion_tokens", "max_tokens has another value: send one of them")
        if not self.callable_tools:
            return self
        if not self.parallel_tool_calls:
            raise _conflict("parallel_tool_calls", "the model may make several calls: leave it out, and run the first")
        if self.logprobs:
            raise _conflict("logprobs", "tokens of tool calls are not sent: leave logprobs or tools out")
        if self.grammar:
            raise _conflict("response_format", "it would forbid tool calls: leave it or tools out")
        return self

    @property
    def turns(self) -> Sequence[dict[str, Any]]:
        """The conversation as templates read it."""
        return [message.as_turn() for message in self.messages]

    @property
    def callable_tools(self) -> Sequence[dict[str, Any]] | None:
        """The tools that the model may call, as templates read them; None if there are none."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def wants_logprobs(self) -> bool:
        """Whether tokens are answered with their log-probabilities."""
        return self.logprobs

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that an answer must follow."""
        return self.response_format.grammar if self.response_format else None


def _conflict(field: str, why: str) -> RequestError:
    return RequestError(f"{field}: {why}").of("parameter.unsupported", field)
