"""Prepared gRPC calls: an inference message is read once, even if it repeats with other tensors."""

from dataclasses import dataclass, replace
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from app.serving.model.served import ServedModel
from app.serving.protocol.grpc import read_infer, write_infer
from app.serving.protocol.infer import build_response
from app.serving.transport.prepared import MAX_PREPARED, PreparedRequest
from app.tensors import Tensors

_MAX_BYTES = 4096
"""Limit on a message without its tensors."""
_MAX_WHOLE_BYTES = 256 * 2**10
"""Limit on a whole message. Splitting a larger one costs more than reading it again."""


@dataclass(slots=True)
class PreparedCall:
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
        message = write_infer(response)
        whole: bytes = message.SerializeToString()
        # A response with an id is no template, because the id is one request's own.
        if request_id is None and not any(sent.dtype.hasobject for sent in response.outputs.values()):
            message.ClearField("raw_output_contents")
            self._shapes = {name: sent.shape for name, sent in response.outputs.items()}
            self._begin = message.SerializeToString()
        return whole


class PreparedCalls:
    """The common parts of recent messages."""

    def __init__(self) -> None:
        self._known: dict[tuple[ServedModel, bytes, tuple[int, ...]], PreparedCall] = {}

    def clear(self) -> None:
        """Forget all messages."""
        self._known.clear()

    def read(self, served: ServedModel, message: Any, num_bytes: int) -> tuple[PreparedCall, Tensors]:
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
        if call.prepared.spans and len(key[1]) <= _MAX_BYTES:
            if len(self._known) >= MAX_PREPARED:
                self.clear()
            self._known[key] = call
        return call, tensors

    def _read(self, served: ServedModel, message: Any, num_bytes: int) -> tuple[PreparedCall, Tensors]:
        request = read_infer(message, served.inputs)
        served.check_request(request)
        return PreparedCall(PreparedRequest.of(served, request, 0, num_bytes)), request.inputs
