"""Inference over HTTP: JSON, with tensors in it or as bytes behind it, or the bytes of a single tensor.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from app.errors import RequestError, RequestTooLargeError, short_repr
from app.serving.protocol.compression import compress, too_large
from app.serving.protocol.infer import (
    LIMITS,
    InferRequest,
    InferResponse,
    Limits,
    RequestedOutput,
    RequestParameters,
    check_json,
    describe,
    parse_count,
    refuse_shared_memory,
    require_unique,
)
from app.serving.protocol.tensors import (
    AS_BYTES,
    BYTES,
    DATATYPES,
    byte_strings,
    check_input,
    from_bytes,
    from_elements,
    refuse_binary_only,
    to_buffer,
)
from app.tensors import Tensors, TensorSpec

JSON_LENGTH = "inference-header-content-length"
"""The header with the number of JSON bytes in a body; tensors follow. 0 means that the body is a single tensor."""

Body = bytes | memoryview
Headers = Mapping[str, str]

_NO_PARAMETERS: Mapping[str, object] = {}
_DEFAULT = RequestParameters()
_MAX_DIGITS = 18
_NOT_FINITE = ("NaN", "Infinity")
"""Common spellings in JSON of numbers that are not finite, which JSON does not allow."""


def max_body_bytes(headers: Headers) -> int:
    """Return the maximum size of a body with these headers, received or decompressed. Pure JSON has a lower limit."""
    # Only a header can announce tensors after the JSON.
    return LIMITS.body_bytes if JSON_LENGTH in headers else LIMITS.json_bytes


def bytes_to_read(body: Body, headers: Headers, inputs: Sequence[TensorSpec]) -> int:
    """Return how many bytes of a decompressed body take time to read: JSON and strings.

    Args:
        inputs: the model's inputs. Their tensors become views of the body, except strings.
    """
    length = headers.get(JSON_LENGTH, "")
    if any(spec.dtype.hasobject for spec in inputs) or not length.isdecimal() or len(length) > _MAX_DIGITS:
        return len(body)
    return int(length)


def read_infer(
    body: Body,
    headers: Headers,
    model: str,
    version: str | None = None,
    inputs: Sequence[TensorSpec] = (),
    limits: Limits = LIMITS,
) -> InferRequest:
    """Read the decompressed body of ``infer``. Tensors that were sent as bytes become views of ``body``.

    Args:
        headers: of the request, by their names in lower case.
        model, version: from the request's path.
        inputs: the model's inputs. Other tensors and datatypes are refused before they are read. Required for a body
            that is a single tensor.

    Raises:
        RequestTooLargeError: the body or its JSON is larger than ``limits`` allow, or a tensor has too many strings.
        RequestError: anything else is wrong; the tensor or parameter is named.
    """
    if len(body) > limits.body_bytes:
        raise too_large(limits.body_bytes)

    # The header decides between three forms: JSON alone, JSON and bytes, or bytes alone.
    header = headers.get(JSON_LENGTH)
    length = len(body) if header is None else _json_length(header, len(body))
    if header is not None and length == 0:
        return InferRequest(
            model, version, None, read_raw(body, inputs), (), RequestParameters(binary_data_output=True)
        )
    if length > limits.json_bytes:
        raise RequestTooLargeError(
            f"the body has {length} bytes of JSON: expected {limits.json_bytes} at most, send tensors as bytes"
        )

    # A view, because the tensors behind the JSON may be large.
    text = body if length == len(body) else memoryview(body)[:length]
    check_json(text, has_tensors=True, limits=limits)
    given = _parsed(text)
    asked = _parameters(given, "request")
    parameters = RequestParameters.of(asked) if asked else _DEFAULT
    return InferRequest(
        model,
        version,
        _request_id(given.get("id")),
        _inputs(given.get("inputs"), body, length, {spec.name: spec for spec in inputs}, limits.strings),
        _outputs(given.get("outputs"), parameters.binary_data_output),
        parameters,
    )


def read_array(name: str, datatype: str, shape: list[int], text: bytes) -> NDArray[Any]:
    """Return the input whose data is the JSON array ``text``. Raises RequestError or JSONDecodeError."""
    # These letters are in true and false, and not in numbers.
    may_have_bools = b"t" in text or b"f" in text
    return _listed(name, datatype, shape, orjson.loads(text), may_have_bools)


def write_infer(
    response: InferResponse, request: InferRequest, accept_encoding: str = ""
) -> tuple[bytes, dict[str, str]]:
    """Return the body of a response, and its headers without the length. The request chooses JSON or bytes.

    Raises:
        RequestError: JSON cannot carry an output that is requested as JSON; it is named.
    """
    outputs: list[dict[str, Any]] = []
    # These are arrays. numpy's types make them buffers only from Python 3.12 on.
    tensors: list[Any] = []
    for name, tensor in response.outputs.items():
        output: dict[str, Any] = {"name": name, "datatype": DATATYPES[tensor.dtype], "shape": tensor.shape}
        if request.wants_bytes(name):
            tensors.append(to_buffer(tensor))
            output["parameters"] = {"binary_data_size": tensors[-1].nbytes}
        else:
            output["data"] = _elements(name, output["datatype"], tensor)
        outputs.append(output)

    fields: dict[str, Any] = {"model_name": response.model, "model_version": response.version, "outputs": outputs}
    if response.id is not None:
        fields["id"] = response.id
    if response.parameters:
        fields["parameters"] = response.parameters
    body = orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
    if not tensors:
        headers = {"content-type": "application/json"}
    else:
        headers = {"content-type": "application/octet-stream", JSON_LENGTH: str(len(body))}
        body = b"".join((body, *tensors))

    if accept_encoding:
        body, applied = compress(body, accept_encoding)
        if applied:
            headers["content-encoding"] = applied
    return body, headers


def write_array(name: str, tensor: NDArray[Any]) -> bytes:
    """Return the JSON array of an output's elements. Raises RequestError, as ``write_infer``."""
    return orjson.dumps(_elements(name, DATATYPES[tensor.dtype], tensor), option=orjson.OPT_SERIALIZE_NUMPY)


def _json_length(header: str, size: int) -> int:
    # A longer number is larger than any body, and ``int`` refuses thousands of digits.
    if not (header.isascii() and header.isdigit() and len(header) <= _MAX_DIGITS and int(header) <= size):
        raise RequestError(
            f"the header {JSON_LENGTH} is {short_repr(header)}: expected 0 to {size}, the bytes of the body"
        ).of("header.length")
    return int(header)


def _parsed(text: Body) -> dict[str, Any]:
    try:
        # orjson refuses NaN, Infinity, and more than 1,024 levels of nesting.
        given = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        hint = ": send what is not finite as bytes" if error.doc.startswith(_NOT_FINITE, error.pos) else ""
        raise RequestError(f"Invalid JSON: {error}{hint}").of("json.invalid") from None
    if type(given) is not dict:
        raise RequestError(f"the body is {short_repr(given)}: expected a JSON object with inputs").of("body.type")
    return given


def _parameters(given: dict[str, Any], kind: str, name: str | None = None) -> Mapping[str, object]:
    parameters = given.get("parameters")
    if parameters is None:
        return _NO_PARAMETERS
    if type(parameters) is not dict:
        raise RequestError(f"{describe(kind, name)} has parameters {short_repr(parameters)}: expected an object").of(
            "parameters.type"
        )
    return parameters


def _request_id(given: object) -> str | None:
    if given is not None and type(given) is not str:
        raise RequestError(f"the request has the id {short_repr(given)}: expected a string").of("id.type")
    return given or None


def _inputs(
    given: object, body: Body, start: int, specs: Mapping[str, TensorSpec], max_strings: int
) -> dict[str, NDArray[Any]]:
    """Return the tensors. The bytes of binary ones follow each other from ``start`` on."""
    if type(given) is not list or not given:
        raise RequestError(f"inputs is {short_repr(given)}: expected a list of one tensor at least").of("inputs.none")
    tensors: dict[str, NDArray[Any]] = {}
    for entry in given:
        name = entry.get("name") if type(entry) is dict else None
        if type(name) is not str:
            raise RequestError(
                f"inputs has {short_repr(entry)}: expected an object with a name, datatype, shape and data"
            ).of("tensor.type")
        if name in tensors:
            raise RequestError(f"inputs repeat the name {short_repr(name)}: give each tensor once").of("names.twice")
        check_input(name, entry.get("datatype"), entry.get("shape"), specs, max_strings)
        tensors[name], start = _input(name, entry, body, start)
    # Bytes that no tensor claims mean a wrong length, and probably shifted tensors.
    if start != len(body):
        raise RequestError(
            f"the body has {len(body) - start} bytes behind its tensors: expected as many as binary_data_size says"
        ).of("bytes.count")
    return tensors


def _input(name: str, entry: dict[str, Any], body: Body, start: int) -> tuple[NDArray[Any], int]:
    """Return one tensor, and the offset of the next one's bytes."""
    parameters = _parameters(entry, "input", name)
    if "binary_data_size" not in parameters:
        refuse_shared_memory(parameters, "input", name)
        return _listed(name, entry.get("datatype"), entry.get("shape"), entry.get("data")), start
    if "data" in entry:
        raise RequestError(f"input {short_repr(name)} has both data and the parameter 'binary_data_size': send one").of(
            "contents.twice"
        )
    size = parse_count("binary_data_size", parameters["binary_data_size"], "input", name)
    if size > len(body) - start:
        raise RequestError(
            f"input {short_repr(name)} has the parameter 'binary_data_size' {size}, but the body has "
            f"{len(body) - start} bytes left: send all, and the JSON's length in the header {JSON_LENGTH}"
        ).of("bytes.count")
    return from_bytes(name, entry.get("datatype"), entry.get("shape"), body, start, size), start + size


def _listed(name: str, datatype: object, shape: object, data: object, may_have_bools: bool = True) -> NDArray[Any]:
    """Return a tensor from JSON data, which is flat or nested like its shape."""
    if type(data) is not list:
        raise RequestError(
            f"input {short_repr(name)} has data {short_repr(data)}: expected a list, or bytes as "
            "'binary_data_size' says"
        ).of("data.type")
    # The protocol allows both forms. The first element tells which one it is.
    if data and type(data[0]) is list and type(shape) is list:
        data = _flattened(name, shape, data)
    if datatype == BYTES:
        data = _encoded(name, data)
    return from_elements(name, datatype, shape, data, may_have_bools)


def _flattened(name: str, shape: list[Any], data: list[Any]) -> list[Any]:
    nested = len(data) == shape[0] if shape else False
    for size in shape[1:]:
        if not nested or any(type(row) is not list or len(row) != size for row in data):
            nested = False
            break
        elements: list[Any] = []
        # Each pass removes the outermost level that is left.
        for row in data:
            elements += row
        data = elements
    if not nested:
        raise RequestError(
            f"input {short_repr(name)} has data that is not nested as its shape {short_repr(shape)} is: "
            "nest it so, or list its elements flat"
        ).of("data.nesting")
    return data


def _encoded(name: str, data: list[Any]) -> list[bytes]:
    for index, element in enumerate(data):
        if type(element) is not str:
            raise RequestError(
                f"input {short_repr(name)} has {short_repr(element)} at {index}: expected a string, for BYTES"
            ).of("data.type")
    return [element.encode() for element in data]


def _outputs(given: object, binary: bool) -> tuple[RequestedOutput, ...]:
    if given is None:
        return ()
    if type(given) is not list:
        raise RequestError(f"outputs is {short_repr(given)}: expected a list").of("outputs.type")
    outputs = []
    for entry in given:
        if type(entry) is not dict:
            raise RequestError(f"outputs has {short_repr(entry)}: expected an object with a name").of("outputs.type")
        outputs.append(RequestedOutput.of(entry.get("name"), _parameters(entry, "output", entry.get("name")), binary))
    return require_unique(outputs)


def _elements(name: str, datatype: str, tensor: NDArray[Any]) -> NDArray[Any] | list[str]:
    """Return the elements of an output for JSON."""
    refuse_binary_only(name, datatype)
    if datatype == BYTES:
        try:
            return [element.decode() for element in byte_strings(tensor)]
        except UnicodeError:
            raise RequestError(f"output {name!r} has bytes that are not UTF-8, as JSON is: {AS_BYTES}").of(
                "output.bytes_only"
            ) from None
    elements = tensor.ravel()
    if elements.dtype.kind == "f" and not np.isfinite(elements).all():
        raise RequestError(f"output {name!r} has numbers that are not finite, which JSON cannot carry: {AS_BYTES}").of(
            "output.bytes_only"
        )
    return elements


def read_raw(body: bytes | memoryview, inputs: Sequence[TensorSpec]) -> Tensors:
    """Read a body that is one row of the model's only input. For a BYTES input it is a single string without length.

    https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md#raw-binary-request

    Raises:
        RequestError: the model has several inputs, or the body's size does not determine the shape.
    """
    if len(inputs) != 1:
        names = ", ".join(spec.name for spec in inputs) or "none"
        raise RequestError(
            f"the body is bytes alone, for a model with one input: this one has {names}, send JSON first"
        ).of("body.bytes_alone")
    (spec,) = inputs
    if spec.dtype == np.object_:
        tensor = np.empty([1] * len(spec.shape), np.object_)
        tensor[...] = bytes(body)
        return {spec.name: tensor}
    return {spec.name: from_bytes(spec.name, DATATYPES[spec.dtype], _shape(spec, len(body)), body, 0, len(body))}


def _shape(spec: TensorSpec, size: int) -> list[int]:
    """Return the shape of one row. The body's size determines one dynamic size beside the batch."""
    shape = [1 if axis == 0 and length == -1 else length for axis, length in enumerate(spec.shape)]
    if (unknown := shape.count(-1)) > 1:
        raise RequestError(
            f"input {spec.name!r} has {unknown} sizes beside its batch that vary: send JSON with its shape"
        ).of("body.bytes_alone")
    known = math.prod(length for length in shape if length != -1) * spec.dtype.itemsize
    # ``from_bytes`` refuses a size with a remainder.
    return [size // known if length == -1 else length for length in shape]
