"""The OpenAPI description of requests that are not read by FastAPI.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/open_inference_rest.yaml
"""

from typing import Any

from fastapi import FastAPI

from app.serving.protocol.embeddings import EmbeddingsRequest
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

EMBEDDINGS: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": EmbeddingsRequest.model_json_schema()}},
    }
}
"""The body of ``embeddings``."""


def describe_infer(api: FastAPI) -> None:
    """Add ``infer``, which bypasses the application's routes, to its OpenAPI document, which FastAPI caches."""
    api.openapi()["paths"] |= {
        "/v2/models/{name}/infer": {"post": _infer("name")},
        "/v2/models/{name}/versions/{version}/infer": {"post": _infer("name", "version")},
    }


def _infer(*parameters: str) -> dict[str, Any]:
    # Bytes follow the JSON, or are the whole body.
    body = {"application/json": {"schema": _REQUEST}, "application/octet-stream": _BYTES}
    return {
        "tags": ["models"],
        "summary": "Infer",
        "description": "Tensors in, tensors out: in JSON, or as bytes behind it.",
        "operationId": "_".join(["infer", *parameters]),
        "security": [{"HTTPBearer": []}],
        "parameters": [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in parameters],
        "requestBody": {"required": True, "content": body},
        "responses": {"200": {"description": "The outputs", "content": {"application/json": {"schema": _RESPONSE}}}},
    }
