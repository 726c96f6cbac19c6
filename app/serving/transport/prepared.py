"""Requests for inference whose JSON is read once, however often it comes with other tensors in it or behind it."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import orjson

from app.serving.model.served import ServedModel
from app.serving.protocol.infer import InferRequest, InferResponse, build_response
from app.serving.protocol.rest import JSON_LENGTH, read_array, read_infer, write_array, write_infer
from app.serving.protocol.tensors import DATATYPES
from app.tensors import OUTPUT, Tensors, shape_key

_MAX_PREPARED = 1024
_MAX_JSON_BYTES = 4096
"""Of a request without its tensors."""
_DATA = b'"data":'
_MAX_UNCOMPRESSED = 1024
"""Bytes of a body that is never compressed."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the bytes of a tensor lie in a body."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """An answer whose outputs have known shapes, without these."""

    shapes: dict[str, tuple[int, ...]]
    lines: bytes
    """Of its HTTP header, without the length."""
    around: list[bytes]
    """The JSON, in parts with an output between each two if ``is_json``, else whole and before the outputs' bytes."""
    is_json: bool

    def body(self, outputs: Tensors) -> bytes:
        """Return the body of an answer. Raises RequestError if JSON cannot carry an output."""
        if not self.is_json:
            return b"".join([*self.around, *[outputs[name].tobytes() for name in self.shapes]])
        arrays = [write_array(name, outputs[name]) for name in self.shapes]
        return _joined(self.around, [*arrays, b""])


@dataclass(slots=True)
class Prepared:
    """The common part of requests with the same head. ``request`` has no inputs."""

    served: ServedModel
    request: InferRequest
    rows: int
    shape: Hashable
    places: list[_Place]
    """Empty if the head contains tensors, or if the bytes after it must be read element by element."""
    num_bytes: int
    """Of the body."""
    heads: list[tuple[str, str, list[int]]] = field(default_factory=list)
    """The name, datatype and shape of each tensor. Empty if their JSON arrays cannot be read alone."""
    layout: _Layout | None = field(default=None)

    @classmethod
    def read(
        cls, served: ServedModel, name: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple["Prepared", Tensors]:
        """Read a request, and check that the model can answer it. Raises RequestError."""
        request = read_infer(body, headers, name, None, served.inputs)
        served.check_request(request)
        return cls.of(served, request, int(headers.get(JSON_LENGTH, 0)), len(body)), request.inputs

    @classmethod
    def of(cls, served: ServedModel, request: InferRequest, start: int, num_bytes: int) -> "Prepared":
        """Return the common part of requests like ``request``, whose tensors follow each other from ``start`` on."""
        places = []
        for name, tensor in request.inputs.items():
            places.append(_Place(name, tensor.dtype, tensor.shape, start))
            start += tensor.nbytes
        if start != num_bytes or any(place.dtype.hasobject or place.dtype == np.bool_ for place in places):
            places = []
        rows = len(request.inputs[served.inputs[0].name])
        return cls(served, replace(request, inputs={}), rows, shape_key(request.inputs), places, num_bytes)

    def tensors(self, body: bytes) -> Tensors:
        """Return views on a body with the same JSON. Raises RequestError of values that the model does not take."""
        return self._checked(
            {place.name: np.ndarray(place.shape, place.dtype, body, place.start) for place in self.places}
        )

    def listed(self, arrays: list[bytes]) -> Tensors:
        """Return the tensors of JSON arrays with the same JSON around them.

        Raises:
            JSONDecodeError: one is not JSON.
            RequestError: one does not fit its datatype and shape, or has values that the model does not take.
        """
        heads = zip(self.heads, arrays, strict=True)
        return self._checked({head[0]: read_array(*head, array) for head, array in heads})

    def _checked(self, tensors: Tensors) -> Tensors:
        for spec in self.served.inputs:
            if spec.values_below is not None:
                spec.check(tensors[spec.name])
        return tensors

    def write(self, outputs: Tensors, accept_encoding: str) -> tuple[bytes, bytes]:
        """Return the header lines of an answer and its body. Raises RequestError if JSON cannot carry an output."""
        layout = self.layout
        if layout and all(outputs[name].shape == shape for name, shape in layout.shapes.items()):
            body = layout.body(outputs)
            if not accept_encoding or len(body) < _MAX_UNCOMPRESSED:
                return b"%s%d\r\n" % (layout.lines, len(body)), body
        labels = {OUTPUT: self.served.model.labels}
        response = build_response(self.request, self.served.version, outputs, labels)
        body, headers = write_infer(response, self.request, accept_encoding)
        named = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        lines = f"{named}content-length: ".encode("latin-1")
        if "content-encoding" not in headers:
            self.layout = self._layout(response, lines, body, int(headers.get(JSON_LENGTH, 0)))
        return b"%s%d\r\n" % (lines, len(body)), body

    def _layout(self, response: InferResponse, lines: bytes, body: bytes, json_bytes: int) -> _Layout | None:
        """Return the layout of an answer. None if it has strings, or outputs of both kinds."""
        outputs = response.outputs
        in_json = {not self.request.wants_bytes(name) for name in outputs}
        if len(in_json) > 1 or any(tensor.dtype.hasobject for tensor in outputs.values()):
            return None
        (is_json,) = in_json
        # No name in the answer looks like data, since its quotes are escaped.
        around = _cut(body, len(outputs))[0] if is_json else [body[:json_bytes]]
        return _Layout({name: tensor.shape for name, tensor in outputs.items()}, lines, around, is_json)


class PreparedRequests:
    """What is known of the JSON of recent requests."""

    def __init__(self) -> None:
        self._prepared: dict[tuple[ServedModel, str, Hashable], Prepared] = {}

    def clear(self) -> None:
        """Forget all, when other models are served."""
        self._prepared.clear()

    def read(self, served: ServedModel, name: str, body: bytes, headers: Mapping[str, str]) -> tuple[Prepared, Tensors]:
        """Read a request to a model.

        Raises:
            JSONDecodeError: a tensor that is listed is not JSON.
            RequestError: as ``read_infer`` and ``ServedModel.check_request`` do.
        """
        length = headers.get(JSON_LENGTH)
        if length is None:
            return self._read_listed(served, name, body, headers)
        if not length.isdecimal() or not 0 < int(length) <= _MAX_JSON_BYTES:
            return Prepared.read(served, name, body, headers)
        key = (served, name, body[: int(length)])
        known = self._prepared.get(key)
        if known and known.num_bytes == len(body):
            return known, known.tensors(body)
        prepared, tensors = Prepared.read(served, name, body, headers)
        if prepared.places:
            self._keep(key, prepared)
        return prepared, tensors

    def _read_listed(
        self, served: ServedModel, name: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[Prepared, Tensors]:
        """Read a request that is JSON alone."""
        around, arrays = _cut(body, len(served.inputs))
        if len(body) - sum(map(len, arrays)) > _MAX_JSON_BYTES:
            return Prepared.read(served, name, body, headers)
        key = (served, name, tuple(around))
        if known := self._prepared.get(key):
            return known, known.listed(arrays)
        prepared, tensors = Prepared.read(served, name, body, headers)
        if _surround_data(around, len(tensors)):
            prepared.heads = _heads(tensors)
            self._keep(key, prepared)
        return prepared, tensors

    def _keep(self, key: tuple[ServedModel, str, Hashable], prepared: Prepared) -> None:
        if len(self._prepared) >= _MAX_PREPARED:
            self.clear()
        self._prepared[key] = prepared


def _heads(tensors: Tensors) -> list[tuple[str, str, list[int]]]:
    return [(name, DATATYPES[tensor.dtype], list(tensor.shape)) for name, tensor in tensors.items()]


def _cut(body: bytes, count: int) -> tuple[list[bytes], list[bytes]]:
    """Return the parts of a JSON body around the first ``count`` arrays of data, and these.

    An array ends before the next quote or the end of the object, so it holds no strings and objects. There are fewer
    if one is not found. Text inside a string may be taken for one.
    """
    around: list[bytes] = []
    arrays: list[bytes] = []
    at = 0
    while len(arrays) < count and (found := body.find(_DATA, at)) >= 0:
        start = body.find(b"[", found)
        stop = body.find(b"}", start)
        quote = body.find(b'"', start, stop)
        end = body.rfind(b"]", start, stop if quote < 0 else quote) + 1
        if not 0 < start < end:
            break
        around.append(body[at:start])
        arrays.append(body[start:end])
        at = end
    return [*around, body[at:]], arrays


def _joined(around: list[bytes], arrays: list[bytes]) -> bytes:
    return b"".join(chain.from_iterable(zip(around, arrays, strict=True)))


def _surround_data(around: list[bytes], count: int) -> bool:
    """Whether these parts of a request surround the data of its ``count`` inputs, each whole and in order.

    Then any other array may take its place, since JSON is free of context. Numbers in their places show it.
    """
    numbers = [*map(b"%d".__mod__, range(len(around) - 1)), b""]
    given = orjson.loads(_joined(around, numbers))
    return [entry.get("data") for entry in given["inputs"]] == list(range(count))
