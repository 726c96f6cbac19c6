"""An inference: what is asked and what is answered, however it is carried."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from app.errors import RequestError
from app.serving.protocol.wording import shown
from app.tensors import Tensors

Parameter = bool | int | float | str

_SHARED_MEMORY = "shared_memory_region"
_SEQUENCE = frozenset({"sequence_id", "sequence_start", "sequence_end"})
_NO_SEQUENCE = (0, "", False)
_MOST = 2**64
"""More is in no message: gRPC has no larger number, and JSON, as it is read here, neither."""


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """An output that the client asks for."""

    name: str
    binary: bool = False
    """As bytes, not as JSON. gRPC carries bytes whatever is asked."""
    classification: int = 0
    """How many of the likeliest classes to answer in place of the tensor; 0 for the tensor."""

    @classmethod
    def of(cls, name: object, parameters: Mapping[str, object], binary: bool) -> Self:
        """With the output's own parameters; ``binary`` is what the request says of every output.

        Raises:
            RequestError: the name is no string, or a parameter is not what the protocol says.
        """
        if type(name) is not str:
            raise RequestError(f"an output has the name {shown(name)}: expected a string")
        if not parameters:
            return cls(name, binary)
        refuse_shared_memory(parameters, "output", name)
        return cls(
            name,
            boolean("binary_data", parameters.get("binary_data", binary), "output", name),
            whole("classification", parameters.get("classification", 0), "output", name),
        )


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """How a request is to be treated."""

    priority: int = 0
    """1 is the most urgent; 0 is what the server gives to who does not ask."""
    timeout_s: float | None = None
    """After which nobody waits for the answer, sent in whole microseconds; None leaves it to the server."""
    binary_data_output: bool = False
    """Outputs that say nothing of their own are wanted as bytes."""

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Self:
        """From the parameters of a request.

        Raises:
            RequestError: one is not what the protocol says, or makes the request part of a sequence.
        """
        priority, timeout_s, binary = 0, None, False
        for name, value in given.items():
            if name == "binary_data_output":
                binary = boolean(name, value)
            elif name == "priority":
                priority = whole(name, value)
            elif name == "timeout":
                timeout_s = whole(name, value) / 1e6 or None
            elif name in _SEQUENCE:
                _refuse_sequence(name, value)
            elif not isinstance(value, Parameter):  # others are the client's own
                raise RequestError(
                    f"the request has the parameter {shown(name)} {shown(value)}: expected a string, number or bool"
                )
        return cls(priority, timeout_s, binary)


@dataclass(frozen=True, slots=True)
class InferRequest:
    """What a client asks of a model."""

    model: str
    version: str | None
    """None leaves it to the server."""
    id: str | None
    """What the answer is to carry, too."""
    inputs: Tensors
    outputs: tuple[RequestedOutput, ...] = ()
    """None given, all are wanted."""
    parameters: RequestParameters = field(default_factory=RequestParameters)

    @property
    def num_bytes(self) -> int:
        """Of the inputs."""
        return sum(tensor.nbytes for tensor in self.inputs.values())

    def wants_bytes(self, output: str) -> bool:
        """Whether an output is to be carried as bytes, where there is a choice."""
        for requested in self.outputs:
            if requested.name == output:
                return requested.binary
        return self.parameters.binary_data_output


@dataclass(frozen=True, slots=True)
class InferResponse:
    """What a model answers."""

    model: str
    version: str
    id: str | None
    outputs: Tensors
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


def requested_outputs(outputs: list[RequestedOutput]) -> tuple[RequestedOutput, ...]:
    """Raises RequestError if one is asked for twice."""
    names = [output.name for output in outputs]
    if len(set(names)) < len(names):
        raise RequestError(f"outputs {shown(names)} repeat a name: ask for each once")
    return tuple(outputs)


def refuse_shared_memory(parameters: Mapping[str, object], kind: str, name: str) -> None:
    """Raises RequestError if the tensor lies in shared memory, which a server on another machine cannot read."""
    if _SHARED_MEMORY in parameters:
        raise RequestError(
            f"{owner(kind, name)} has the parameter {_SHARED_MEMORY!r}: shared memory is not spoken here, send bytes"
        )


def whole(parameter: str, value: object, kind: str = "request", name: str | None = None) -> int:
    """A parameter that counts something. Raises RequestError, naming what it is a parameter of."""
    if type(value) is not int or not 0 <= value < _MOST:
        raise RequestError(
            f"{owner(kind, name)} has the parameter {parameter!r} {shown(value)}: expected a whole number from 0 on"
        )
    return value


def boolean(parameter: str, value: object, kind: str = "request", name: str | None = None) -> bool:
    """A parameter that is true or false. Raises RequestError, naming what it is a parameter of."""
    if type(value) is not bool:
        raise RequestError(
            f"{owner(kind, name)} has the parameter {parameter!r} {shown(value)}: expected true or false"
        )
    return value


def owner(kind: str, name: str | None) -> str:
    """What has a parameter, in an error's words."""
    return f"the {kind}" if name is None else f"{kind} {shown(name)}"


def _refuse_sequence(name: str, value: object) -> None:
    if value not in _NO_SEQUENCE:
        raise RequestError(
            f"the request has the parameter {shown(name)} {shown(value)}: models here keep no state between requests, "
            "send each request by itself"
        )
