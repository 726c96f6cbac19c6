"""Inference over gRPC: the messages of ``inference.GRPCInferenceService``.

https://github.com/triton-inference-server/common/blob/main/protobuf/grpc_service.proto

The classes are those of Triton's client, because protobuf allows only one class per message name in a process.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as pb

from app.errors import RequestError, RequestTooLargeError, short_repr
from app.serving.protocol.infer import (
    LIMITS,
    InferRequest,
    InferResponse,
    Limits,
    Parameter,
    RequestedOutput,
    RequestParameters,
    refuse_shared_memory,
    require_unique,
)
from app.serving.protocol.tensors import DATATYPES, check_input, from_bytes, from_elements, to_buffer
from app.serving.reading import ON_LOOP_BYTES
from app.tensors import TensorSpec

_FIELD_OF = {
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

_RAW, _INPUTS = (
    pb.ModelInferRequest.DESCRIPTOR.fields_by_name[name].number for name in ("raw_input_contents", "inputs")
)
_CONTENTS = pb.ModelInferRequest.InferInputTensor.DESCRIPTOR.fields_by_name["contents"].number
_MAX_FIELDS = 2**13
"""Maximum number of fields of a large message and its inputs."""
_MAX_REST_BYTES = 2**20
"""Limit on a message without its tensors. An entry of 2 bytes becomes an object of 100 bytes."""
_SIZES = {1: 8, 5: 4}
"""Sizes of values, by wire type."""

_FINAL = "triton_final_response"
"""The parameter by which Triton's clients recognize the last answer to a request of a stream.

https://github.com/triton-inference-server/server/blob/main/docs/user_guide/decoupled_models.md
"""

_DEFAULT = RequestParameters(binary_data_output=True)
"""gRPC always sends bytes."""


def require_readable(message: bytes, limits: Limits = LIMITS) -> int:
    """Refuse a message whose field sizes show that parsing would take too much time or memory.

    Returns:
        The number of bytes that take time to read: all except ``raw_input_contents``.

    Raises:
        RequestTooLargeError: ``contents``, or the rest of the message, exceeds its limit.
        RequestError: the message has too many fields, or is malformed.
    """
    # A short message is cheap to parse.
    if len(message) <= ON_LOOP_BYTES:
        return len(message)
    raw, contents, left = 0, 0, iter(range(_MAX_FIELDS))
    for number, start, end in _fields(message, 0, len(message), left):
        if number == _RAW:
            raw += end - start
        elif number == _INPUTS:
            inner = _fields(message, start, end, left)
            contents += sum(stop - begin for number, begin, stop in inner if number == _CONTENTS)
    if contents > limits.json_bytes:
        raise RequestTooLargeError(
            f"the message has {contents} bytes of contents: expected {limits.json_bytes} at most, send tensors in "
            "raw_input_contents"
        )
    if (rest := len(message) - raw - contents) > _MAX_REST_BYTES:
        raise RequestTooLargeError(
            f"the message has {rest} bytes besides its tensors: expected {_MAX_REST_BYTES} at most, send shorter names "
            "and parameters"
        )
    return len(message) - raw


def bytes_to_read(request: pb.ModelInferRequest, num_bytes: int, inputs: Sequence[TensorSpec]) -> int:
    """Return how many of the ``num_bytes`` of a parsed message take time to read.

    Args:
        inputs: the model's inputs. Their tensors become views of the message's bytes, except strings.
    """
    has_strings = any(spec.dtype.hasobject for spec in inputs)
    return num_bytes if has_strings else num_bytes - sum(map(len, request.raw_input_contents))


def read_infer(
    request: pb.ModelInferRequest, inputs: Sequence[TensorSpec] = (), limits: Limits = LIMITS
) -> InferRequest:
    """Read a request. Tensors in ``raw_input_contents`` become views of the message's bytes.

    Args:
        inputs: the model's inputs. Other tensors and datatypes are refused before they are read.

    Raises:
        RequestTooLargeError: a tensor has more strings than ``limits`` allow.
        RequestError: the message violates the protocol; the tensor or parameter is named.
    """
    parameters = _request_parameters(request.parameters)
    # Check everything first: reading many elements takes time and memory.
    _check_inputs(request.inputs, {spec.name: spec for spec in inputs}, limits.strings)
    return InferRequest(
        request.model_name,
        request.model_version or None,
        request.id or None,
        _inputs(request.inputs, request.raw_input_contents),
        require_unique(
            [RequestedOutput.of(output.name, read_parameters(output.parameters), True) for output in request.outputs]
        ),
        parameters,
    )


def write_infer(response: InferResponse) -> pb.ModelInferResponse:
    """Return the message of a response, with its tensors in ``raw_output_contents``."""
    message = pb.ModelInferResponse(model_name=response.model, model_version=response.version, id=response.id or "")
    for name, value in response.parameters.items():
        _set(message.parameters[name], value)
    for name, tensor in response.outputs.items():
        message.outputs.add(name=name, datatype=DATATYPES[tensor.dtype], shape=tensor.shape)
        message.raw_output_contents.append(to_buffer(tensor).tobytes())
    return message


def write_stream_infer(message: pb.ModelInferResponse) -> pb.ModelStreamInferResponse:
    """Return the message of a response in a stream, the only one to its request."""
    message.parameters[_FINAL].bool_param = True
    return pb.ModelStreamInferResponse(infer_response=message)


def write_stream_error(error: str, request_id: str | None) -> pb.ModelStreamInferResponse:
    """Return the message of an error in a stream, which continues. ``request_id`` names the refused request."""
    return pb.ModelStreamInferResponse(error_message=error, infer_response=pb.ModelInferResponse(id=request_id or ""))


def read_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a message's parameters; None for a parameter without a value."""
    return {
        name: getattr(value, choice) if (choice := value.WhichOneof("parameter_choice")) else None
        for name, value in parameters.items()
    }


def _fields(message: bytes, start: int, end: int, left: Iterator[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each field between two offsets, and the offsets of its value. Each consumes one of ``left``.

    https://protobuf.dev/programming-guides/encoding/
    """
    while start < end:
        if next(left, None) is None:
            raise RequestError(f"the message has more than {_MAX_FIELDS} fields: send fewer inputs in a request").of(
                "message.too_many_fields"
            )
        tag, start = _varint(message, start, end)
        match tag & 7:
            case 0:
                stop = _varint(message, start, end)[1]
            case 2:
                size, start = _varint(message, start, end)
                stop = start + size
            case kind:
                stop = start + _SIZES.get(kind, end)
        if stop > end:
            raise _malformed()
        yield tag >> 3, start, stop
        start = stop


def _varint(message: bytes, start: int, end: int) -> tuple[int, int]:
    """Decode a number of up to ten bytes with seven bits each. Return it and the offset after it."""
    value = 0
    for index in range(start, min(start + 10, end)):
        value |= (message[index] & 0x7F) << 7 * (index - start)
        if message[index] < 0x80:
            return value, index + 1
    raise _malformed()


def _malformed() -> RequestError:
    return RequestError("the message cannot be parsed: send one of inference.GRPCInferenceService").of(
        "message.unreadable"
    )


def _request_parameters(parameters: Mapping[str, pb.InferParameter]) -> RequestParameters:
    # A request without any needs no object of its own.
    if not parameters:
        return _DEFAULT
    return replace(RequestParameters.of(read_parameters(parameters)), binary_data_output=True)


def _check_inputs(inputs: Sequence[Any], specs: Mapping[str, TensorSpec], max_strings: int) -> None:
    """Check names, datatypes and shapes of all inputs before any is read."""
    if not inputs:
        raise RequestError("the request has no inputs: expected one tensor at least").of("inputs.none")
    names: set[str] = set()
    for entry in inputs:
        if entry.name in names:
            raise RequestError(f"inputs repeat the name {short_repr(entry.name)}: give each tensor once").of(
                "names.twice"
            )
        names.add(entry.name)
        check_input(entry.name, entry.datatype, list(entry.shape), specs, max_strings)
        refuse_shared_memory(entry.parameters, "input", entry.name)


def _inputs(inputs: Sequence[Any], raw: Sequence[bytes]) -> dict[str, NDArray[Any]]:
    if raw and len(raw) != len(inputs):
        raise RequestError(
            f"the request has {len(inputs)} inputs and {len(raw)} raw_input_contents: expected one for each, or none"
        ).of("contents.count")
    tensors: dict[str, NDArray[Any]] = {}
    for index, entry in enumerate(inputs):
        name, shape = entry.name, list(entry.shape)
        # The protocol has two ways to carry tensors, and forbids to mix them in a request.
        if not raw:
            tensors[name] = from_elements(name, entry.datatype, shape, _elements(name, entry.datatype, entry.contents))
        elif entry.HasField("contents"):
            raise RequestError(
                f"input {short_repr(name)} has contents beside raw_input_contents: send one of the two"
            ).of("contents.twice")
        else:
            data = raw[index]
            tensors[name] = from_bytes(name, entry.datatype, shape, data, 0, len(data))
    return tensors


def _elements(name: str, datatype: str, contents: pb.InferTensorContents) -> Sequence[Any]:
    """Return the elements in the field of the datatype. Raises RequestError if another field is filled."""
    expected = _FIELD_OF.get(datatype)
    for field, elements in contents.ListFields():
        if field.name != expected:
            raise RequestError(
                f"input {short_repr(name)} is {short_repr(datatype)} and has {len(elements)} {field.name}: expected "
                f"{expected or 'raw_input_contents'}"
            ).of("contents.type")
    # A datatype without a field, such as FP16, comes as raw bytes only. ``from_elements`` refuses it.
    return getattr(contents, expected) if expected else ()


def _set(parameter: pb.InferParameter, value: Parameter) -> None:
    match value:
        # This case is first, because a bool is an int, too.
        case bool():
            parameter.bool_param = value
        case int():
            parameter.int64_param = value
        case float():
            parameter.double_param = value
        case str():
            parameter.string_param = value
