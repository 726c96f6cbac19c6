"""The OpenAPI description of requests that are not read by FastAPI.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/open_inference_rest.yaml
"""

from collections.abc import Callable, Collection
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from app.serving.protocol.openai.chat import ChatRequest
from app.serving.protocol.openai.completions import CompletionRequest
from app.serving.protocol.openai.embeddings import EmbeddingsRequest
from app.serving.protocol.predict import PredictRequest
from app.serving.protocol.tensors import DTYPES

_TEXT, _OBJECT = {"type": "string"}, {"type": "object", "additionalProperties": True}
_DATATYPE = {"type": "string", "enum": sorted(DTYPES)}
_SHAPE = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_DATA = {
    "type": "array",
    "items": {},
    "description": "in row-major order, flat or nested; absent if the tensor is sent as bytes",
}
_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {"name": _TEXT, "shape": _SHAPE, "datatype": _DATATYPE, "parameters": _OBJECT, "data": _DATA},
}
_REQUESTED = {"type": "object", "required": ["name"], "properties": {"name": _TEXT, "parameters": _OBJECT}}
_REQUEST = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": _TEXT,
        "parameters": _OBJECT,
        "inputs": {"type": "array", "items": _TENSOR},
        "outputs": {"type": "array", "items": _REQUESTED, "description": "default: all"},
    },
}
_RESPONSE = {
    "type": "object",
    "required": ["model_name", "outputs"],
    "properties": {
        "model_name": _TEXT,
        "model_version": _TEXT,
        "id": _TEXT,
        "parameters": _OBJECT,
        "outputs": {"type": "array", "items": _TENSOR},
    },
}
_BYTES = {"schema": {"type": "string", "format": "binary"}}

PREDICT: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": PredictRequest.model_json_schema()}, "image/*": _BYTES},
    }
}
"""The body of ``predict``."""

_COMPONENT = "#/components/schemas/{model}"


def _json_body(model: type[BaseModel], example: object) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template=_COMPONENT)
    schema.pop("$defs", None)  # they are among the components
    return {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}


EMBEDDINGS: dict[str, Any] = {
    "requestBody": _json_body(EmbeddingsRequest, {"model": "answers", "input": ["Where is my invoice?"]})
}
"""The body of ``embeddings``."""
_CHAT_EXAMPLE = {
    "model": "assistant",
    "messages": [{"role": "user", "content": "How do I open a file in Python?"}],
    "max_tokens": 200,
    "temperature": 0,
}
_COMPLETION_EXAMPLE = {"model": "writer", "prompt": "def area(width, height):", "max_tokens": 40, "temperature": 0}


def describe(api: FastAPI, needs_token: Callable[[], bool], open_paths: Collection[str]) -> None:
    """Complete the application's OpenAPI document: by what bypasses its routes, and by the token.

    Args:
        needs_token: whether the endpoint asks for a token now.
        open_paths: the paths that never do.
    """
    described = api.openapi()
    described["paths"] |= {
        "/v2/models/{name}/infer": {"post": _infer("name")},
        "/v2/models/{name}/versions/{version}/infer": {"post": _infer("name", "version")},
        "/v1/chat/completions": {"post": _generation("chat_completions", ChatRequest, _CHAT_EXAMPLE)},
        "/v1/completions": {"post": _generation("completions", CompletionRequest, _COMPLETION_EXAMPLE)},
    }
    parts = [model.model_json_schema(ref_template=_COMPONENT)["$defs"] for model in (ChatRequest, CompletionRequest)]
    described["components"]["schemas"] |= {name: schema for defined in parts for name, schema in defined.items()}
    locked = _locked(described, open_paths)
    api.openapi = lambda: locked if needs_token() else described  # type: ignore[method-assign]


def _locked(described: dict[str, Any], open_paths: Collection[str]) -> dict[str, Any]:
    """Return a description in which all paths except ``open_paths`` need a bearer token."""
    needed: dict[str, Any] = {"security": [{"HTTPBearer": []}]}
    paths = {
        path: {method: operation | needed for method, operation in methods.items()}
        for path, methods in described["paths"].items()
        if path not in open_paths
    }
    schemes = {"HTTPBearer": {"type": "http", "scheme": "bearer"}}
    return described | {
        "paths": described["paths"] | paths,
        "components": described["components"] | {"securitySchemes": schemes},
    }


def _generation(operation: str, model: type[BaseModel], example: object) -> dict[str, Any]:
    responses = {
        "200": {
            "description": "The answers; with stream, one event for each part of an answer, and [DONE]",
            "content": {"application/json": {"schema": _OBJECT}, "text/event-stream": {"schema": _TEXT}},
        },
        "4XX": {"description": "OpenAI's error object", "content": {"application/json": {"schema": _OBJECT}}},
    }
    return {
        "tags": ["OpenAI"],
        "summary": operation.replace("_", " ").title(),  # as the framework writes the others
        "description": "As OpenAI defines it. A field that this server does not have is refused by its name.",
        "operationId": operation,
        "requestBody": _json_body(model, example),
        "responses": responses,
    }


def _infer(*parameters: str) -> dict[str, Any]:
    # Bytes follow the JSON, or are the whole body.
    body = {"application/json": {"schema": _REQUEST}, "application/octet-stream": _BYTES}
    return {
        "tags": ["models"],
        "summary": "Infer",
        "description": "Tensors in, tensors out: in JSON, or as bytes behind it.",
        "operationId": "_".join(["infer", *parameters]),
        "parameters": [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in parameters],
        "requestBody": {"required": True, "content": body},
        "responses": {"200": {"description": "The outputs", "content": {"application/json": {"schema": _RESPONSE}}}},
    }
