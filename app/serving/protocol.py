"""The Open Inference Protocol v2 over JSON, and natural input beside it.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
"""

from collections.abc import Sequence
from typing import Any, Self, TypeVar

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from app.errors import RequestError
from app.tensors import Tensors, TensorSpec

DTYPES = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}
DATATYPES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


class RequestTensor(BaseModel):
    """A tensor as JSON: its elements flat or nested, in row-major order."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Any]


class RequestedOutput(BaseModel):
    """An output that the client asks for."""

    name: str


class InferRequest(BaseModel):
    """The body of ``infer``."""

    id: str | None = None
    inputs: list[RequestTensor] = Field(min_length=1)
    outputs: list[RequestedOutput] = []


class ResponseTensor(BaseModel):
    """A tensor of the answer, its elements flat."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Any]


class InferResponse(BaseModel):
    """The answer of ``infer``."""

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[ResponseTensor]


class TensorMetadata(BaseModel):
    """A tensor that a model takes or gives."""

    name: str
    datatype: str
    shape: list[int]

    @classmethod
    def of(cls, spec: TensorSpec) -> Self:
        """The protocol's words for a spec."""
        return cls(name=spec.name, datatype=DATATYPES[spec.dtype], shape=list(spec.shape))


class ModelMetadata(BaseModel):
    """What a model takes and gives."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ServerMetadata(BaseModel):
    """What the server is."""

    name: str = "rayloom"
    version: str
    extensions: list[str] = ["model_repository"]


class ModelIndex(BaseModel):
    """A model in the answer of the repository extension's ``index``."""

    name: str
    version: str
    state: str


class PredictRequest(BaseModel):
    """The body of ``predict``: one text or base64 image, or several."""

    inputs: str | list[str]


class Prediction(BaseModel):
    """The most likely label of an input, and the probability of each."""

    label: str
    scores: dict[str, float]


class PredictResponse(BaseModel):
    """The answer of ``predict``, a prediction for each input."""

    model_name: str
    model_version: str
    predictions: list[Prediction]


Body = TypeVar("Body", bound=BaseModel)


def parse_body(model: type[Body], body: bytes) -> Body:
    """Read a JSON body. Raises RequestError that says what is wrong and where."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"]) or "the body"
        raise RequestError(f"{where}: {problem['msg']}; expected JSON of the form of {model.__name__}") from None


def decode_tensors(request: InferRequest) -> Tensors:
    """The request's tensors. Raises RequestError, naming the tensor."""
    tensors = {tensor.name: _decode(tensor) for tensor in request.inputs}
    if len(tensors) < len(request.inputs):
        raise RequestError(f"inputs {[each.name for each in request.inputs]} repeat a name: give each tensor once")
    return tensors


def _decode(tensor: RequestTensor) -> np.ndarray[Any, np.dtype[Any]]:
    if tensor.datatype not in DTYPES:
        raise RequestError(f"input {tensor.name!r} has datatype {tensor.datatype!r}: expected {', '.join(DTYPES)}")
    dtype = np.dtype(DTYPES[tensor.datatype])
    try:
        given = np.array(tensor.data)
    except ValueError as error:
        raise RequestError(f"input {tensor.name!r} has rows of different lengths: expected a full array") from error
    if given.dtype.kind not in ("b" if dtype.kind == "b" else "iu" if dtype.kind in "iu" else "iuf"):
        raise RequestError(f"input {tensor.name!r} has elements that are not {tensor.datatype}")
    if any(size < 0 for size in tensor.shape) or given.size != np.prod(tensor.shape, dtype=object):
        raise RequestError(f"input {tensor.name!r} has {given.size} elements, its shape is {tensor.shape}")
    with np.errstate(over="ignore"):
        cast = given.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(cast, given):
        raise RequestError(f"input {tensor.name!r} has elements out of the range of {tensor.datatype}")
    return cast.reshape(tensor.shape)


def encode_tensors(tensors: Tensors, wanted: Sequence[RequestedOutput]) -> list[ResponseTensor]:
    """The answer's tensors: those that the client wants, or all. Raises RequestError for an unknown one."""
    for output in wanted:
        if output.name not in tensors:
            raise RequestError(f"output {output.name!r} is not known: expected {', '.join(tensors)}")
    names = [output.name for output in wanted] or list(tensors)
    return [
        ResponseTensor(
            name=name,
            shape=list(tensors[name].shape),
            datatype=DATATYPES[tensors[name].dtype],
            data=tensors[name].ravel().tolist(),
        )
        for name in names
    ]
