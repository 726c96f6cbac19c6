"""Whatever is sent, it is read or refused."""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from pydantic import BaseModel
from tritonclient.grpc import service_pb2

from app.errors import RequestError
from app.serving.protocol import grpc, rest
from app.serving.protocol.infer import InferRequest, InferResponse, RequestParameters, build_response, check_outputs
from app.serving.protocol.management import IndexRequest, LoadRequest, UnloadRequest, parse_body
from app.serving.protocol.predict import PredictRequest
from app.serving.protocol.rest import JSON_LENGTH
from app.serving.protocol.tensors import BINARY_ONLY, DTYPES, to_buffer
from app.tensors import Tensors, TensorSpec
from tests.fuzzing import LENGTHS, NASTY, damage, put_something
from tests.protocol import EXAMPLES

TRIES = 400
SPEC = TensorSpec("x", np.dtype(np.float32), (-1, -1))


def bodies() -> Iterator[tuple[dict[str, Any], list[bytes]]]:
    """A request of every datatype, as bytes and as JSON, and of all at once: the JSON and the bytes behind it."""
    for datatype, tensor in EXAMPLES.items():
        head = {"name": "x", "shape": list(tensor.shape), "datatype": datatype}
        data = to_buffer(tensor).tobytes()
        yield request({**head, "parameters": {"binary_data_size": len(data)}}), [data]
        if datatype not in BINARY_ONLY:
            elements = [item.decode() if datatype == "BYTES" else item for item in tensor.ravel().tolist()]
            yield request({**head, "data": elements}), []
    several = {name: to_buffer(EXAMPLES[name]).tobytes() for name in ("FP32", "BYTES", "BOOL")}
    entries = (
        {"name": name, "shape": [1, 3], "datatype": name, "parameters": {"binary_data_size": len(data)}}
        for name, data in several.items()
    )
    yield request(*entries), list(several.values())


def request(*inputs: dict[str, Any]) -> dict[str, Any]:
    outputs = [{"name": "y", "parameters": {"classification": 2, "binary_data": True}}, {"name": "z"}]
    return {
        "id": "1",
        "inputs": list(inputs),
        "outputs": outputs,
        "parameters": {"timeout": 9, "binary_data_output": True},
    }


def outcome(read: Callable[[], Any]) -> Any:
    """What is read; None if it is refused, in few words."""
    try:
        return read()
    except RequestError as error:
        words = str(error)
    assert len(words) < 1000
    return None


def answered(request: InferRequest) -> None:
    """Write back what was read, in the form that was asked for."""
    outputs = dict.fromkeys(["y", "z"], next(iter(request.inputs.values())))
    response = outcome(lambda: checked_answer(request, outputs)) or InferResponse("m", "1", None, outputs)
    outcome(lambda: rest.write_infer(response, request, "gzip"))
    grpc.write_infer(response)


def checked_answer(request: InferRequest, outputs: Tensors) -> InferResponse:
    check_outputs(request, [TensorSpec(name, array.dtype, array.shape) for name, array in outputs.items()])
    return build_response(request, "1", outputs)


def some_of(count: int) -> bool:
    """Neither nothing nor everything was read, so both were tried."""
    return TRIES / 20 < count < TRIES * 19 / 20


@pytest.mark.parametrize("seed", range(8))
def test_over_http(seed: int) -> None:
    rng = random.Random(seed)
    valid = list(bodies())
    read = []
    for _ in range(TRIES):
        body, tensors = rng.choice(valid)
        head = put_something(body, rng)
        whole = damage(head + b"".join(tensors), rng) if rng.random() < 0.3 else head + b"".join(tensors)
        headers = {JSON_LENGTH: rng.choice(LENGTHS) if rng.random() < 0.1 else str(len(head))}
        if rng.random() < 0.1:
            headers.pop(JSON_LENGTH)
        read.append(outcome(partial(rest.read_infer, whole, headers, "m", inputs=rng.choice([(), (SPEC,)]))))
    requests = [item for item in read if item]
    assert some_of(len(requests))
    for request in requests:
        answered(request)


@pytest.mark.parametrize("seed", range(4))
def test_over_grpc(seed: int) -> None:
    rng = random.Random(seed)
    read = []
    for _ in range(TRIES):
        with suppress(DecodeError):
            message = service_pb2.ModelInferRequest.FromString(damage(some_message(rng).SerializeToString(), rng))
            read.append(outcome(partial(grpc.read_infer, message)))
    requests = [item for item in read if item]
    assert some_of(len(requests))
    for request in requests:
        answered(request)


def some_message(rng: random.Random) -> service_pb2.ModelInferRequest:
    message = service_pb2.ModelInferRequest(model_name="m", id="id", outputs=[{"name": "y"}, {"name": "z"}])
    for datatype, tensor in rng.sample(list(EXAMPLES.items()), 2):
        message.inputs.add(name=datatype, datatype=datatype, shape=tensor.shape)
        message.raw_input_contents.append(to_buffer(tensor).tobytes())
    if rng.random() < 0.4:
        entry = rng.choice(message.inputs)
        entry.shape[:] = rng.choice([[], [-1], [2**62, 4], [0, 2**62], [1] * 100, [3], [1, 3]])
        entry.datatype = rng.choice([*DTYPES, "", "x"])
    if rng.random() < 0.3:
        del message.raw_input_contents[:]
        field = rng.choice(["int_contents", "fp32_contents", "bool_contents", "uint64_contents"])
        getattr(rng.choice(message.inputs).contents, field).extend([0, 1, 1])
    return message


@pytest.mark.parametrize("model", [PredictRequest, IndexRequest, LoadRequest, UnloadRequest])
def test_other_bodies(model: type[BaseModel]) -> None:
    rng = random.Random(0)
    body = {"inputs": ["a", "b"], "ready": True, "parameters": {"unload_dependents": False}}
    for _ in range(TRIES):
        outcome(partial(parse_body, model, damage(put_something(body, rng), rng)))


@pytest.mark.parametrize("given", NASTY, ids=lambda text: repr(text)[:20])
def test_every_parameter_is_read_or_refused(given: Any) -> None:
    for name in ("priority", "timeout", "binary_data_output", "sequence_id", "sequence_end", "mine"):
        outcome(partial(RequestParameters.of, {name: given}))
