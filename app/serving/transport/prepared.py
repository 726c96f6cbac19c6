"""Prepared requests: the constant part of an inference request is read once, even if it repeats with other tensors.

Over HTTP that is the JSON around the tensors, over gRPC the message without its tensors and id.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import orjson
from tritonclient.grpc import service_pb2 as pb

from app.serving.model.served import ServedModel
from app.serving.protocol.grpc import read_infer as read_message
from app.serving.protocol.grpc import write_infer as write_message
from app.serving.protocol.infer import InferRequest, InferResponse, build_response
from app.serving.protocol.rest import JSON_LENGTH, read_array, read_infer, write_array, write_infer
from app.serving.protocol.tensors import DATATYPES
from app.tensors import Tensors, shape_key

_MAX_PREPARED = 1024
_MAX_AROUND_BYTES = 4096
"""Limit on a request or message without its tensors."""
_MAX_WHOLE_BYTES = 256 * 2**10
"""Limit on a whole message. Splitting a larger one costs more than reading it again."""
_DATA = b'"data":'
# At most ``_MIN_BYTES`` of ``compression``, or this route would not compress what the general one does.
_MAX_UNCOMPRESSED = 1024
"""A smaller body, in bytes, is never compressed."""


@dataclass(frozen=True, slots=True)
class _TensorSpan:
    """The position of a tensor's bytes in a body."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class _ResponseTemplate:
    """A response without its outputs, whose shapes are known."""

    shapes: dict[str, tuple[int, ...]]
    lines: bytes
    """The HTTP header lines, without the length."""
    around: list[bytes]
    """The JSON. If ``is_json``, in parts with an output between each two, else whole before the outputs' bytes."""
    is_json: bool

    def body(self, outputs: Tensors) -> bytes:
        """Return the body of a response. Raises RequestError if JSON cannot carry an output."""
        if not self.is_json:
            return b"".join([*self.around, *[outputs[name].tobytes() for name in self.shapes]])
        arrays = [write_array(name, outputs[name]) for name in self.shapes]
        return _joined(self.around, [*arrays, b""])


@dataclass(slots=True)
class PreparedRequest:
    """The common part of requests that differ only in their tensors. ``request`` has no inputs."""

    served: ServedModel
    request: InferRequest
    rows: int
    shape: Hashable
    spans: list[_TensorSpan]
    """The tensors' positions. Empty if tensors are in the JSON, or must be read element by element."""
    num_bytes: int
    """The size of the body."""
    heads: list[tuple[str, str, list[int]]] = field(default_factory=list)
    """The name, datatype and shape of each tensor. Empty if their JSON arrays cannot be read alone."""
    template: _ResponseTemplate | None = field(default=None)

    @classmethod
    def read(
        cls, served: ServedModel, name: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple["PreparedRequest", Tensors]:
        """Read a request, and check that the model can answer it. Raises RequestError."""
        request = read_infer(body, headers, name, None, served.inputs)
        served.check_request(request)
        return cls.of(served, request, int(headers.get(JSON_LENGTH, 0)), len(body)), request.inputs

    @classmethod
    def of(cls, served: ServedModel, request: InferRequest, start: int, num_bytes: int) -> "PreparedRequest":
        """Return the common part of requests like ``request``, whose tensors follow each other from ``start`` on."""
        spans = []
        for name, tensor in request.inputs.items():
            spans.append(_TensorSpan(name, tensor.dtype, tensor.shape, start))
            start += tensor.nbytes
        # Strings have no fixed size, and a bool has to be checked, so both are read one by one.
        # Another size means that some tensors are in the JSON.
        if start != num_bytes or any(span.dtype.hasobject or span.dtype == np.bool_ for span in spans):
            spans = []
        rows = len(request.inputs[served.inputs[0].name])
        return cls(served, replace(request, inputs={}), rows, shape_key(request.inputs), spans, num_bytes)

    def tensors(self, body: bytes) -> Tensors:
        """Return views of a body with the same JSON. Raises RequestError for values that the model does not take."""
        return self._checked({span.name: np.ndarray(span.shape, span.dtype, body, span.start) for span in self.spans})

    def listed(self, arrays: list[bytes]) -> Tensors:
        """Return the tensors of JSON arrays with the same JSON around them.

        Raises:
            JSONDecodeError: an array is not JSON.
            RequestError: an array does not fit its datatype and shape, or has values that the model does not take.
        """
        heads = zip(self.heads, arrays, strict=True)
        return self._checked({head[0]: read_array(*head, array) for head, array in heads})

    def _checked(self, tensors: Tensors) -> Tensors:
        # The shapes and datatypes are those of the first request. Only values can differ.
        for spec in self.served.inputs:
            if spec.values_below is not None:
                spec.check(tensors[spec.name])
        return tensors

    def write(self, outputs: Tensors, accept_encoding: str) -> tuple[bytes, bytes]:
        """Return the header lines and body of a response. Raises RequestError if JSON cannot carry an output."""
        template = self.template
        if template and all(outputs[name].shape == shape for name, shape in template.shapes.items()):
            body = template.body(outputs)
            if not accept_encoding or len(body) < _MAX_UNCOMPRESSED:
                return b"%s%d\r\n" % (template.lines, len(body)), body
        response = build_response(self.request, self.served.version, outputs, self.served.model.labels_by_output)
        body, headers = write_infer(response, self.request, accept_encoding)
        lines_before = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        lines = f"{lines_before}content-length: ".encode("latin-1")
        # A compressed body has no parts that stay the same.
        if "content-encoding" not in headers:
            self.template = self._template_of(response, lines, body, int(headers.get(JSON_LENGTH, 0)))
        return b"%s%d\r\n" % (lines, len(body)), body

    def _template_of(
        self, response: InferResponse, lines: bytes, body: bytes, json_bytes: int
    ) -> _ResponseTemplate | None:
        """Return the template of a response; None if it has strings, or outputs both in JSON and as bytes."""
        outputs = response.outputs
        in_json = {not self.request.wants_bytes(name) for name in outputs}
        if len(in_json) > 1 or any(tensor.dtype.hasobject for tensor in outputs.values()):
            return None
        (is_json,) = in_json
        # A name in the JSON cannot look like '"data":', because its quotes are escaped.
        around = _split(body, len(outputs))[0] if is_json else [body[:json_bytes]]
        return _ResponseTemplate({name: tensor.shape for name, tensor in outputs.items()}, lines, around, is_json)


class PreparedRequests:
    """The prepared forms of recent requests."""

    def __init__(self) -> None:
        self._prepared: dict[tuple[ServedModel, str, Hashable], PreparedRequest] = {}

    def clear(self) -> None:
        """Forget all requests, because other models are served."""
        self._prepared.clear()

    def read(
        self, served: ServedModel, name: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[PreparedRequest, Tensors]:
        """Read a request to a model.

        Raises:
            JSONDecodeError: the data of a tensor is not JSON.
            RequestError: as ``read_infer`` and ``ServedModel.check_request``.
        """
        length = headers.get(JSON_LENGTH)
        if length is None:
            return self._read_listed(served, name, body, headers)
        if not length.isdecimal() or not 0 < int(length) <= _MAX_AROUND_BYTES:
            return PreparedRequest.read(served, name, body, headers)
        key = (served, name, body[: int(length)])
        known = self._prepared.get(key)
        # Equal JSON means equal shapes, and so equal sizes. With another size, the full way finds the error.
        if known and known.num_bytes == len(body):
            return known, known.tensors(body)
        prepared, tensors = PreparedRequest.read(served, name, body, headers)
        if prepared.spans:
            self._keep(key, prepared)
        return prepared, tensors

    def _read_listed(
        self, served: ServedModel, name: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[PreparedRequest, Tensors]:
        """Read a request that is only JSON."""
        # The key is the JSON without its numbers, so the numbers have to be cut out first.
        around, arrays = _split(body, len(served.inputs))
        if len(body) - sum(map(len, arrays)) > _MAX_AROUND_BYTES:
            return PreparedRequest.read(served, name, body, headers)
        key = (served, name, tuple(around))
        if known := self._prepared.get(key):
            return known, known.listed(arrays)
        prepared, tensors = PreparedRequest.read(served, name, body, headers)
        if _surround_data(around, len(tensors)):
            prepared.heads = _heads(tensors)
            self._keep(key, prepared)
        return prepared, tensors

    def _keep(self, key: tuple[ServedModel, str, Hashable], prepared: PreparedRequest) -> None:
        # All at once: it is rare, and needs no record of which was used last.
        if len(self._prepared) >= _MAX_PREPARED:
            self.clear()
        self._prepared[key] = prepared


def _heads(tensors: Tensors) -> list[tuple[str, str, list[int]]]:
    return [(name, DATATYPES[tensor.dtype], list(tensor.shape)) for name, tensor in tensors.items()]


def _split(body: bytes, count: int) -> tuple[list[bytes], list[bytes]]:
    """Return the parts of a JSON body around the first ``count`` arrays of data, and these arrays.

    An array ends before the next quote or the end of the object, so it has no strings or objects. Fewer arrays are
    returned if one is not found. Text inside a string may be mistaken for an array.
    """
    around: list[bytes] = []
    arrays: list[bytes] = []
    offset = 0
    while len(arrays) < count and (found := body.find(_DATA, offset)) >= 0:
        start = body.find(b"[", found)
        stop = body.find(b"}", start)
        quote = body.find(b'"', start, stop)
        # From the right, because arrays may be nested.
        end = body.rfind(b"]", start, stop if quote < 0 else quote) + 1
        if not 0 < start < end:
            break
        around.append(body[offset:start])
        arrays.append(body[start:end])
        offset = end
    return [*around, body[offset:]], arrays


def _joined(around: list[bytes], arrays: list[bytes]) -> bytes:
    return b"".join(chain.from_iterable(zip(around, arrays, strict=True)))


def _surround_data(around: list[bytes], count: int) -> bool:
    """Return whether these parts of a request surround the data of its ``count`` inputs, complete and in order.

    If they do, any other array may replace the data, because JSON is context-free. To check this, insert the numbers
    0, 1, … in place of the arrays, and see where they are read.
    """
    numbers = [*map(b"%d".__mod__, range(len(around) - 1)), b""]
    given = orjson.loads(_joined(around, numbers))
    return [entry.get("data") for entry in given["inputs"]] == list(range(count))


@dataclass(slots=True)
class PreparedMessage:
    """The common part of messages that differ only in their tensors and id."""

    prepared: PreparedRequest
    _shapes: dict[str, tuple[int, ...]] | None = None
    _begin: bytes = b""
    """The first part of a response whose outputs have these shapes. The bytes of the outputs follow."""

    def write(self, outputs: Tensors, request_id: str | None) -> bytes:
        """Return the message of a response. Raises RequestError if an output cannot be classified."""
        shapes = self._shapes
        if shapes and request_id is None and all(outputs[name].shape == shape for name, shape in shapes.items()):
            raw = [outputs[name].tobytes() for name in shapes]
            rest: bytes = pb.ModelInferResponse(raw_output_contents=raw).SerializeToString()
            # To protobuf, concatenated messages of one type are a single message.
            return self._begin + rest
        served, request = self.prepared.served, replace(self.prepared.request, id=request_id)
        response = build_response(request, served.version, outputs, served.model.labels_by_output)
        message = write_message(response)
        whole: bytes = message.SerializeToString()
        # A response with an id is no template, because the id is one request's own.
        if request_id is None and not any(sent.dtype.hasobject for sent in response.outputs.values()):
            message.ClearField("raw_output_contents")
            self._shapes = {name: sent.shape for name, sent in response.outputs.items()}
            self._begin = message.SerializeToString()
        return whole


class PreparedMessages:
    """The common parts of recent messages."""

    def __init__(self) -> None:
        self._known: dict[tuple[ServedModel, bytes, tuple[int, ...]], PreparedMessage] = {}

    def clear(self) -> None:
        """Forget all messages."""
        self._known.clear()

    def read(self, served: ServedModel, message: Any, num_bytes: int) -> tuple[PreparedMessage, Tensors]:
        """Read a ModelInferRequest of ``num_bytes`` for a model. The message may lose its id.

        Raises:
            RequestError: as ``read_infer`` and ``ServedModel.check_request``.
        """
        if num_bytes > _MAX_WHOLE_BYTES:
            return self._read(served, message, 0)
        # Without their ids and tensors, repeated messages have equal bytes, which are the key.
        raw = list(message.raw_input_contents)
        message.ClearField("id")
        message.ClearField("raw_input_contents")
        key = served, message.SerializeToString(), tuple(map(len, raw))
        if known := self._known.get(key):
            return known, known.prepared.tensors(b"".join(raw))
        message.raw_input_contents.extend(raw)
        call, tensors = self._read(served, message, sum(key[2]))
        if call.prepared.spans and len(key[1]) <= _MAX_AROUND_BYTES:
            if len(self._known) >= _MAX_PREPARED:
                self.clear()
            self._known[key] = call
        return call, tensors

    def _read(self, served: ServedModel, message: Any, num_bytes: int) -> tuple[PreparedMessage, Tensors]:
        request = read_message(message, served.inputs)
        served.check_request(request)
        return PreparedMessage(PreparedRequest.of(served, request, 0, num_bytes)), request.inputs
