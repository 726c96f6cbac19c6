"""Requests for inference whose JSON is read once, however often it comes before other tensors."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from app.serving.batching.rows import shape_of
from app.serving.model.served import ServedModel
from app.serving.protocol.answer import answer
from app.serving.protocol.infer import InferRequest, InferResponse
from app.serving.protocol.rest import JSON_LENGTH, read_infer, write_infer
from app.tensors import OUTPUT, Tensors

_MAX_PREPARED = 1024
_MAX_JSON_BYTES = 4096
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
    """An answer whose outputs have known shapes, up to the bytes of these."""

    shapes: dict[str, tuple[int, ...]]
    lines: bytes
    """Of its HTTP header."""
    json: bytes


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
        return cls(served, replace(request, inputs={}), rows, shape_of(request.inputs), places, num_bytes)

    def tensors(self, body: bytes) -> Tensors:
        """Return views on a body with the same JSON. Raises RequestError of values that the model does not take."""
        tensors = {place.name: np.ndarray(place.shape, place.dtype, body, place.start) for place in self.places}
        for spec in self.served.inputs:
            if spec.values_below is not None:
                spec.check(tensors[spec.name])
        return tensors

    def write(self, outputs: Tensors, accept_encoding: str) -> tuple[bytes, bytes]:
        """Return the header lines of an answer and its body. Raises RequestError if JSON cannot carry an output."""
        layout = self.layout
        if layout and all(outputs[name].shape == shape for name, shape in layout.shapes.items()):
            body = b"".join([layout.json, *[outputs[name].tobytes() for name in layout.shapes]])
            if not accept_encoding or len(body) < _MAX_UNCOMPRESSED:
                return layout.lines, body
        model = self.served.model
        response = answer(self.request, model.version, outputs, {OUTPUT: model.labels})
        body, headers = write_infer(response, self.request, accept_encoding)
        named = {**headers, "content-length": str(len(body))}
        lines = b"".join(f"{name}: {value}\r\n".encode("latin-1") for name, value in named.items())
        if "content-encoding" not in headers and self._is_bytes(response):
            shapes = {name: tensor.shape for name, tensor in response.outputs.items()}
            self.layout = _Layout(shapes, lines, body[: int(headers[JSON_LENGTH])])
        return lines, body

    def _is_bytes(self, response: InferResponse) -> bool:
        """Whether all outputs follow the JSON as they are in memory."""
        outputs = response.outputs.items()
        return all(self.request.wants_bytes(name) and not tensor.dtype.hasobject for name, tensor in outputs)


class PreparedRequests:
    """What is known of the JSON of recent requests."""

    def __init__(self) -> None:
        self._prepared: dict[tuple[ServedModel, str, bytes], Prepared] = {}

    def clear(self) -> None:
        """Forget all, when other models are served."""
        self._prepared.clear()

    def read(self, served: ServedModel, name: str, body: bytes, headers: Mapping[str, str]) -> tuple[Prepared, Tensors]:
        """Read a request to a model. Raises RequestError, as ``read_infer`` and ``ServedModel.check_request`` do."""
        length = headers.get(JSON_LENGTH)
        if length is None or not length.isdecimal() or not 0 < int(length) <= _MAX_JSON_BYTES:
            return Prepared.read(served, name, body, headers)
        key = (served, name, body[: int(length)])
        known = self._prepared.get(key)
        if known and known.num_bytes == len(body):
            return known, known.tensors(body)
        prepared, tensors = Prepared.read(served, name, body, headers)
        if prepared.places:
            if len(self._prepared) >= _MAX_PREPARED:
                self.clear()
            self._prepared[key] = prepared
        return prepared, tensors
