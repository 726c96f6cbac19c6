"""Inference over gRPC: the messages of ``inference.GRPCInferenceService``.

https://github.com/triton-inference-server/common/blob/main/protobuf/grpc_service.proto

The classes are those of Triton's client, since a process can have but one of each name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as pb

from app.errors import RequestError
from app.serving.protocol.datatypes import DATATYPES
from app.serving.protocol.infer import (
    InferRequest,
    InferResponse,
    Parameter,
    RequestedOutput,
    RequestParameters,
    refuse_shared_memory,
    requested_outputs,
)
from app.serving.protocol.tensors import from_bytes, from_elements, to_buffer
from app.serving.protocol.wording import shown

_CONTENTS = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field that lists the elements of a datatype."""

_DEFAULT = RequestParameters()


def read_infer(request: pb.ModelInferRequest) -> InferRequest:
    """Read a request. Tensors in ``raw_input_contents`` are views on the message's bytes.

    Raises:
        RequestError: it is not what the protocol says; the tensor or parameter is named.
    """
    parameters = RequestParameters.of(_parameters(request.parameters)) if request.parameters else _DEFAULT
    return InferRequest(
        request.model_name,
        request.model_version or None,
        request.id or None,
        _inputs(request.inputs, request.raw_input_contents),
        requested_outputs(
            [RequestedOutput.of(each.name, _parameters(each.parameters), True) for each in request.outputs]
        ),
        parameters,
    )


def write_infer(response: InferResponse) -> pb.ModelInferResponse:
    """The message of an answer, with its tensors in ``raw_output_contents``."""
    message = pb.ModelInferResponse(
        model_name=response.model, model_version=response.version or "", id=response.id or ""
    )
    for name, value in response.parameters.items():
        _set(message.parameters[name], value)
    for name, tensor in response.outputs.items():
        message.outputs.add(name=name, datatype=DATATYPES[tensor.dtype], shape=tensor.shape)
        message.raw_output_contents.append(to_buffer(tensor).tobytes())
    return message


def write_stream_infer(response: InferResponse) -> pb.ModelStreamInferResponse:
    """The message of an answer in a stream."""
    return pb.ModelStreamInferResponse(infer_response=write_infer(response))


def write_stream_error(error: str, request_id: str | None) -> pb.ModelStreamInferResponse:
    """The message of a refused request in a stream, which goes on; ``request_id`` says which was refused."""
    return pb.ModelStreamInferResponse(error_message=error, infer_response=pb.ModelInferResponse(id=request_id or ""))


def _inputs(inputs: Sequence[Any], raw: Sequence[bytes]) -> dict[str, NDArray[Any]]:
    if not inputs:
        raise RequestError("the request has no inputs: expected one tensor at least")
    if raw and len(raw) != len(inputs):
        raise RequestError(
            f"the request has {len(inputs)} inputs and {len(raw)} raw_input_contents: expected one for each, or none"
        )
    tensors: dict[str, NDArray[Any]] = {}
    for index, entry in enumerate(inputs):
        name, shape = entry.name, list(entry.shape)
        if name in tensors:
            raise RequestError(f"inputs repeat the name {shown(name)}: give each tensor once")
        refuse_shared_memory(entry.parameters, "input", name)
        if not raw:
            tensors[name] = from_elements(name, entry.datatype, shape, _elements(name, entry.datatype, entry.contents))
        elif entry.HasField("contents"):
            raise RequestError(f"input {shown(name)} has contents beside raw_input_contents: send one of the two")
        else:
            data = raw[index]
            tensors[name] = from_bytes(name, entry.datatype, shape, data, 0, len(data))
    return tensors


def _elements(name: str, datatype: str, contents: pb.InferTensorContents) -> Sequence[Any]:
    """The field of the datatype. Raises RequestError if another one is filled."""
    expected = _CONTENTS.get(datatype)
    for field, elements in contents.ListFields():
        if field.name != expected:
            raise RequestError(
                f"input {shown(name)} is {shown(datatype)} and has {len(elements)} {field.name}: expected "
                f"{expected or 'raw_input_contents'}"
            )
    return getattr(contents, expected) if expected else ()


def _parameters(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    return {
        name: getattr(value, choice) if (choice := value.WhichOneof("parameter_choice")) else None
        for name, value in parameters.items()
    }


def _set(parameter: pb.InferParameter, value: Parameter) -> None:
    match value:
        case bool():
            parameter.bool_param = value
        case int():
            parameter.int64_param = value
        case float():
            parameter.double_param = value
        case str():
            parameter.string_param = value
