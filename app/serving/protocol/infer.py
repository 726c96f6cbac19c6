"""Inference requests and responses, independent of the transport.

Classification: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_classification.md
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from app.errors import RequestError, short_repr
from app.serving.protocol.tensors import BYTES, DATATYPES, refuse_binary_only
from app.tensors import Tensors, TensorSpec

Parameter = bool | int | float | str

_SHARED_MEMORY = "shared_memory_region"
_SEQUENCE = frozenset({"sequence_id", "sequence_start", "sequence_end"})
# The values that stand for no sequence.
_NO_SEQUENCE = (0, "", False)
_MAX_COUNT = 2**64
"""Exclusive upper bound. Neither gRPC nor orjson can carry a larger number."""
# A class is chosen by the highest score, and these have no scores.
_UNORDERED = frozenset({"BOOL", BYTES})
_MAX_CLASSIFIED = 1_000_000
"""Elements of an output, as in Triton."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on a request, which are checked before it is read."""

    body_bytes: int = 64 * 2**20
    """Size of a body, decompressed."""
    json_bytes: int = 8 * 2**20
    """Size of the JSON in a body. Parsed JSON takes about 40 times as much memory."""
    containers: int = 2**17
    """Maximum objects, lists and keys of JSON. Each takes 3 bytes or more, and a hundred times as much in memory."""
    values: int = 2**19
    """Maximum values of JSON without tensors: texts, rows and the like. Commas are counted, also those in texts."""
    strings: int = 1_000_000
    """Elements of a BYTES tensor. Each is an object of any length, and takes about a microsecond to read."""


LIMITS = Limits()
"""The default limits."""


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """An output that the client asks for."""

    name: str
    binary: bool = False
    """Whether to send it as bytes, not as JSON. gRPC always sends bytes."""
    classification: int = 0
    """The number of likeliest classes to return in place of the tensor; 0 for the tensor itself."""

    @classmethod
    def of(cls, name: object, parameters: Mapping[str, object], binary: bool) -> Self:
        """Read an output and its parameters; ``binary`` is the request's default for all outputs.

        Raises:
            RequestError: the name is not a string, or a parameter is not valid.
        """
        if type(name) is not str:
            raise RequestError(f"an output has the name {short_repr(name)}: expected a string").of("name.type")
        if not parameters:
            return cls(name, binary)
        refuse_shared_memory(parameters, "output", name)
        return cls(
            name,
            parse_bool("binary_data", parameters.get("binary_data", binary), "output", name),
            parse_count("classification", parameters.get("classification", 0), "output", name),
        )


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """The parameters of a request that the server acts on."""

    priority: int = 0
    """1 is the most urgent; 0 means the server's default."""
    timeout_s: float | None = None
    """Time until the answer, sent in whole microseconds; None means the server's default."""
    binary_data_output: bool = False
    """Whether to send outputs as bytes by default."""

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Self:
        """Read the parameters of a request.

        Raises:
            RequestError: a parameter is not valid, or makes the request part of a sequence.
        """
        priority, timeout_s, binary = 0, None, False
        for name, value in sorted(given.items()):  # a map of protobuf has no order
            if name == "binary_data_output":
                binary = parse_bool(name, value)
            elif name == "priority":
                priority = parse_count(name, value)
            elif name == "timeout":
                # 0 means the server's default, as no timeout does.
                timeout_s = parse_count(name, value) / 1e6 or None
            # Empty values ask for no sequence, so only real sequences are refused.
            elif name in _SEQUENCE:
                _refuse_sequence(name, value)
            elif not isinstance(value, Parameter):
                # Clients may send parameters of their own.
                raise RequestError(
                    f"the request has the parameter {short_repr(name)} {short_repr(value)}: expected a string, number "
                    "or bool"
                ).of("parameter.type")
        return cls(priority, timeout_s, binary)


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request for inference."""

    model: str
    version: str | None
    """None leaves the choice to the server."""
    id: str | None
    """Returned in the response."""
    inputs: Tensors
    outputs: tuple[RequestedOutput, ...] = ()
    """The outputs to return; empty for all."""
    parameters: RequestParameters = field(default_factory=RequestParameters)

    @property
    def num_bytes(self) -> int:
        """The size of the inputs in memory."""
        return sum(tensor.nbytes for tensor in self.inputs.values())

    def wants_bytes(self, output: str) -> bool:
        """Return whether an output is to be sent as bytes, where there is a choice."""
        for requested in self.outputs:
            if requested.name == output:
                return requested.binary
        return self.parameters.binary_data_output


@dataclass(frozen=True, slots=True)
class InferResponse:
    """A model's answer."""

    model: str
    version: str
    id: str | None
    outputs: Tensors
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


def check_json(text: bytes | memoryview, *, has_tensors: bool, limits: Limits = LIMITS) -> None:
    """Refuse JSON that would become too many objects, before it is parsed.

    Characters in strings count, too, because telling them apart would take as long as parsing.

    Raises:
        RequestError: the JSON has more objects, lists, keys or values than ``limits`` allow.
    """
    # Short JSON cannot have too many, so it is not searched.
    if len(text) <= limits.containers:
        return
    content = bytes(text)
    if (count := sum(map(content.count, (b"{", b"[", b":")))) > limits.containers:
        raise RequestError(
            f"the JSON has {count} objects, lists and keys: expected {limits.containers} at most, list elements flat "
            "or send fewer rows in a request"
        ).of("json.too_large")
    if not has_tensors and (count := content.count(b",")) > limits.values:
        raise RequestError(
            f"the JSON has {count} commas: expected {limits.values} at most, send fewer texts or rows in a request"
        ).of("json.too_large")


def check_outputs(request: InferRequest, specs: Sequence[TensorSpec]) -> None:
    """Refuse impossible outputs before the model runs.

    Args:
        specs: the model's outputs.

    Raises:
        RequestError: an output is unknown, has no order to classify by, or is wanted as JSON, which cannot carry it;
            it is named.
    """
    datatypes = {spec.name: DATATYPES[spec.dtype] for spec in specs}
    tensors = dict(datatypes) if not request.outputs else {}
    for requested in request.outputs:
        if (datatype := datatypes.get(requested.name)) is None:
            raise RequestError(f"output {short_repr(requested.name)} is not known: expected {', '.join(datatypes)}").of(
                "output.unknown"
            )
        if not requested.classification:
            tensors[requested.name] = datatype
        elif datatype in _UNORDERED:
            raise RequestError(
                f"output {requested.name!r} is {datatype}, which has no order: leave its classification out"
            ).of("classification.no_order")
    for name, datatype in tensors.items():
        # Refused before the model runs, because its answer could not be sent.
        if not request.wants_bytes(name):
            refuse_binary_only(name, datatype)


def build_response(
    request: InferRequest,
    version: str,
    outputs: Tensors,
    labels: Mapping[str, Sequence[str]] | None = None,
    parameters: Mapping[str, Parameter] | None = None,
) -> InferResponse:
    """Return the response with the requested outputs, as tensors or as classes.

    Args:
        request: one that ``check_outputs`` accepts.
        outputs: all outputs of the model.
        labels: the names of the classes, by output.

    Raises:
        RequestError: an output is too large to classify it; it is named.
    """
    chosen: dict[str, NDArray[Any]] = dict(outputs) if not request.outputs else {}
    for requested in request.outputs:
        tensor = outputs[requested.name]
        if requested.classification:
            names = (labels or {}).get(requested.name, ())
            tensor = _classes(requested.name, tensor, requested.classification, names)
        chosen[requested.name] = tensor
    return InferResponse(request.model, version, request.id, chosen, parameters or {})


def _classes(name: str, scores: NDArray[Any], count: int, labels: Sequence[str]) -> NDArray[Any]:
    """Return the highest scores of each row as ``score:index:label``, shape (rows, count). Ties keep their order.

    The first axis counts rows. A tensor with a single axis is one row, and gives the shape (count,).
    """
    if scores.size > _MAX_CLASSIFIED:
        raise RequestError(
            f"output {name!r} has {scores.size} elements: expected {_MAX_CLASSIFIED} at most to classify it, send "
            "fewer rows in a request"
        ).of("classification.too_large")
    rows = np.atleast_2d(scores)
    rows = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    # Sort the reversed scores: a stable ascending sort puts the last of equal scores last.
    order = rows.shape[1] - 1 - np.argsort(rows[:, ::-1], axis=1, kind="stable")[:, ::-1][:, :count]
    words = np.empty(order.shape, np.object_)
    for row, rank in np.ndindex(order.shape):
        index = int(order[row, rank])
        label = f":{labels[index]}" if index < len(labels) else ""
        words[row, rank] = f"{rows[row, index]!s}:{index}{label}".encode()
    return words if scores.ndim > 1 else words[0]


def require_unique(outputs: list[RequestedOutput]) -> tuple[RequestedOutput, ...]:
    """Return the requested outputs. Raises RequestError if a name is repeated."""
    names = [output.name for output in outputs]
    if len(set(names)) < len(names):
        raise RequestError(f"outputs {short_repr(names)} repeat a name: ask for each once").of("names.twice")
    return tuple(outputs)


def refuse_shared_memory(parameters: Mapping[str, object], kind: str, name: str) -> None:
    """Raise RequestError if the tensor is in shared memory, which a server on another machine cannot read."""
    if _SHARED_MEMORY in parameters:
        raise RequestError(
            f"{describe(kind, name)} has the parameter {_SHARED_MEMORY!r}: shared memory is not supported, send bytes"
        ).of("parameter.unsupported")


def parse_count(parameter: str, value: object, kind: str = "request", name: str | None = None) -> int:
    """Return a parameter that is a count. Raises RequestError, which names the parameter's owner."""
    # ``isinstance`` would accept a bool, which is an int.
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise RequestError(
            f"{describe(kind, name)} has the parameter {parameter!r} {short_repr(value)}: expected a whole number "
            "from 0 on"
        ).of("parameter.type")
    return value


def parse_bool(parameter: str, value: object, kind: str = "request", name: str | None = None) -> bool:
    """Return a parameter that is true or false. Raises RequestError, which names the parameter's owner."""
    if type(value) is not bool:
        raise RequestError(
            f"{describe(kind, name)} has the parameter {parameter!r} {short_repr(value)}: expected true or false"
        ).of("parameter.type")
    return value


def describe(kind: str, name: str | None) -> str:
    """Return the words for the owner of a parameter in an error message."""
    return f"the {kind}" if name is None else f"{kind} {short_repr(name)}"


def _refuse_sequence(name: str, value: object) -> None:
    if value not in _NO_SEQUENCE:
        raise RequestError(
            f"the request has the parameter {short_repr(name)} {short_repr(value)}: models here keep no state between "
            "requests, send each request by itself"
        ).of("parameter.unsupported")
