"""How a row is put to a server, and its answer read: each server is sent what it natively takes and reads fastest."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import httpx
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as pb

from app.serving.protocol.tensors import DATATYPES
from app.tensors import OUTPUT, Tensors

Scheme = Literal["http", "grpc"]
Answer = NDArray[np.float32]
"""The numbers of one row's answer, flat."""

_JSON = {"Content-Type": "application/json"}
_HEADER_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class Request:
    """A POST."""

    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: _JSON)

    def raw(self, host: str) -> bytes:
        """Return the request's bytes on a persistent connection."""
        lines = [f"POST {self.path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(self.body)}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + self.body


class Wire(Protocol):
    """The encoding of requests to a server."""

    @property
    def scheme(self) -> Scheme:
        """The protocol that carries it."""
        ...

    def request(self, row: Tensors) -> Request:
        """The request for a batch of one row."""
        ...

    def answer(self, response: httpx.Response) -> Answer:
        """The row's answer. Raises KeyError or ValueError if the response is of another form."""
        ...


@dataclass(frozen=True)
class BinaryTensors:
    """The Open Inference Protocol with the binary tensor extension, both ways."""

    scheme: ClassVar[Scheme] = "http"
    model: str

    def __str__(self) -> str:
        return "Open Inference Protocol, binary tensors"

    def request(self, row: Tensors) -> Request:
        """A JSON header, then each tensor's bytes."""
        contents = {name: tensor.tobytes() for name, tensor in row.items()}
        inputs = [
            {**_described(name, tensor), "parameters": {"binary_data_size": len(contents[name])}}
            for name, tensor in row.items()
        ]
        header = _dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
        headers = {"Content-Type": "application/octet-stream", _HEADER_LENGTH: str(len(header))}
        return Request(_path(self.model), header + b"".join(contents.values()), headers)

    def answer(self, response: httpx.Response) -> Answer:
        """Return the answer after the response's header."""
        length = int(response.headers[_HEADER_LENGTH])
        (output,) = json.loads(response.content[:length])["outputs"]
        assert output["name"] == OUTPUT
        return np.frombuffer(response.content[length:], np.float32)


@dataclass(frozen=True)
class JsonTensors:
    """The Open Inference Protocol in JSON."""

    scheme: ClassVar[Scheme] = "http"
    model: str

    def __str__(self) -> str:
        return "Open Inference Protocol, JSON"

    def request(self, row: Tensors) -> Request:
        """Each tensor's elements, flat."""
        inputs = [{**_described(name, tensor), "data": tensor.ravel().tolist()} for name, tensor in row.items()]
        return Request(_path(self.model), _dumps({"inputs": inputs}))

    def answer(self, response: httpx.Response) -> Answer:
        """The data of the one output."""
        (output,) = response.json()["outputs"]
        return _flat(output["data"])


@dataclass(frozen=True)
class GrpcTensors:
    """The Open Inference Protocol over gRPC, with raw contents both ways."""

    scheme: ClassVar[Scheme] = "grpc"
    model: str

    def __str__(self) -> str:
        return "Open Inference Protocol over gRPC, raw contents"

    def request(self, row: Tensors) -> Request:
        """A ModelInferRequest, for a unary call."""
        message = pb.ModelInferRequest(model_name=self.model)
        for name, tensor in row.items():
            message.inputs.add(**_described(name, tensor))
            message.raw_input_contents.append(tensor.tobytes())
        return Request("/inference.GRPCInferenceService/ModelInfer", message.SerializeToString(), {})

    def answer(self, response: httpx.Response) -> Answer:
        """The raw contents of the one output."""
        try:
            message = pb.ModelInferResponse.FromString(response.content)
        except DecodeError as error:
            raise ValueError(str(error)) from error
        (output,), (contents,) = message.outputs, message.raw_output_contents
        assert output.name == OUTPUT
        return np.frombuffer(contents, np.float32)


@dataclass(frozen=True)
class NamedLists:
    """A JSON object with a list for each input; the answer has the one output."""

    scheme: ClassVar[Scheme] = "http"
    path: str

    def __str__(self) -> str:
        return "JSON, a list for each input"

    def request(self, row: Tensors) -> Request:
        """The row's tensors without their first axis: the server joins rows."""
        return Request(self.path, _dumps({name: tensor[0].tolist() for name, tensor in row.items()}))

    def answer(self, response: httpx.Response) -> Answer:
        """The list named ``output``."""
        return _flat(response.json()["output"])


@dataclass(frozen=True)
class StackedList:
    """One JSON list, several inputs stacked along a second axis, for a server that batches a single argument."""

    scheme: ClassVar[Scheme] = "http"
    path: str

    def __str__(self) -> str:
        return "JSON, one list for all inputs"

    def request(self, row: Tensors) -> Request:
        """A batch of one row."""
        tensors = list(row.values())
        stacked = tensors[0] if len(tensors) == 1 else np.stack(tensors, axis=1)
        return Request(self.path, _dumps({"inputs": stacked.tolist()}))

    def answer(self, response: httpx.Response) -> Answer:
        """The list that the body is."""
        return _flat(response.json())


def _path(model: str) -> str:
    return f"/v2/models/{model}/infer"


def _described(name: str, tensor: NDArray[Any]) -> dict[str, Any]:
    return {"name": name, "shape": list(tensor.shape), "datatype": DATATYPES[tensor.dtype]}


def _dumps(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _flat(content: object) -> Answer:
    return np.asarray(content, np.float32).ravel()
