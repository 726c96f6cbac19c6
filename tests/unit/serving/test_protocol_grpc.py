"""Inference over gRPC, against the messages that Triton's client makes and reads."""

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tritonclient.grpc import InferInput, InferRequestedOutput, InferResult, service_pb2
from tritonclient.grpc._utils import _get_inference_request

from app.serving.protocol.grpc import read_infer, write_infer, write_stream_error, write_stream_infer
from app.serving.protocol.infer import Limits, RequestedOutput, RequestParameters, build_response, check_outputs
from app.serving.protocol.tensors import BINARY_ONLY, DATATYPES, DTYPES
from app.serving.transport.grpc import SERVICE
from app.tensors import TensorSpec
from tests.helpers import run
from tests.protocol import EXAMPLES, in_client
from tests.wording import refused

READ = "import os, pickle; print(*(type(m).__name__ for m in pickle.loads(bytes.fromhex(os.environ['MESSAGES']))))"
FIELDS = {
    "bool_contents": ["BOOL"],
    "int_contents": ["INT8", "INT16", "INT32"],
    "int64_contents": ["INT64"],
    "uint_contents": ["UINT8", "UINT16", "UINT32"],
    "uint64_contents": ["UINT64"],
    "fp32_contents": ["FP32"],
    "fp64_contents": ["FP64"],
    "bytes_contents": ["BYTES"],
}


def given(name: str, tensor: NDArray[Any]) -> InferInput:
    return InferInput(name, tensor.shape, DATATYPES[tensor.dtype]).set_data_from_numpy(in_client(tensor))


def message(inputs: Sequence[InferInput], **fields: Any) -> service_pb2.ModelInferRequest:
    """What the client sends; it has no public function that makes it and does not send it."""
    names = (
        "model_version",
        "request_id",
        "outputs",
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "priority",
        "timeout",
    )
    defaults = ("", "", None, 0, False, False, 0, None)
    arguments = dict(zip(names, defaults, strict=True)) | {"parameters": None} | fields
    return _get_inference_request(model_name="m", inputs=inputs, **arguments)


def listed(datatype: str = "INT8", **changed: Any) -> service_pb2.ModelInferRequest:
    tensor = {"name": "x", "shape": [2], "datatype": datatype, "contents": {"int_contents": [1, 2]}, **changed}
    return service_pb2.ModelInferRequest(model_name="m", inputs=[tensor])


def test_serves_own_proxy_can_pickle_every_message() -> None:
    kinds = sorted(SERVICE.file.message_types_by_name)
    messages = pickle.dumps([getattr(service_pb2, kind)() for kind in kinds])
    read = run("python", "-c", READ, environment={"MESSAGES": messages.hex()})
    assert read.stdout.split() == kinds, read.stderr


@pytest.mark.parametrize("datatype", EXAMPLES)
def test_every_datatype_goes_there_and_back(datatype: str) -> None:
    tensor = EXAMPLES[datatype]
    request = read_infer(message([given("x", tensor)]))
    assert request.inputs["x"].dtype == tensor.dtype
    assert np.array_equal(request.inputs["x"], tensor)
    result = InferResult(write_infer(build_response(request, "3", {"y": tensor})))
    assert np.array_equal(result.as_numpy("y"), in_client(tensor))
    assert result.get_output("y").datatype == datatype


@pytest.mark.parametrize(
    ("field", "datatype"), [(field, item) for field, several in FIELDS.items() for item in several]
)
def test_every_datatype_but_halves_may_be_listed(field: str, datatype: str) -> None:
    tensor = EXAMPLES[datatype]
    read = read_infer(listed(datatype, shape=[1, 3], contents={field: tensor.ravel().tolist()})).inputs["x"]
    assert read.dtype == tensor.dtype
    assert np.array_equal(read, tensor)


def test_all_that_a_request_says_is_read_and_answered() -> None:
    custom = {"trace": "on", "n": 2, "b": True, "f": 2.5}
    request = read_infer(
        message(
            [given("a", np.ones(2, np.float32)), given("b", np.zeros((1, 3), np.int8))],
            model_version="7",
            request_id="r1",
            outputs=[InferRequestedOutput("z", class_count=1), InferRequestedOutput("y")],
            priority=2,
            timeout=5000,
            parameters=custom,
        )
    )
    assert (request.model, request.version, request.id) == ("m", "7", "r1")
    assert list(request.inputs) == ["a", "b"]
    assert request.outputs == (RequestedOutput("z", True, 1), RequestedOutput("y", True))
    assert request.parameters == RequestParameters(2, 0.005, binary_data_output=True)

    outputs = {name: np.array([[1, 5, 2]], np.float32) for name in "xyz"}
    response = build_response(request, "7", outputs, {"z": ["p", "q", "r"]}, custom)
    said = write_stream_infer(write_infer(response)).infer_response
    assert (said.model_name, said.model_version, said.id) == ("m", "7", "r1")
    assert [output.name for output in said.outputs] == ["z", "y"]
    assert InferResult(said).as_numpy("z").tolist() == [[b"5.0:1:q"]]
    assert {
        name: getattr(parameter, parameter.WhichOneof("parameter_choice"))
        for name, parameter in said.parameters.items()
    } == custom | {"triton_final_response": True}


def test_an_error_in_a_stream_says_whose_it_is() -> None:
    said = write_stream_error("no", "r1")
    assert (said.error_message, said.infer_response.id) == ("no", "r1")


@pytest.mark.parametrize(
    ("request_", "rule"),
    [
        (service_pb2.ModelInferRequest(model_name="m"), "inputs.none"),
        (listed("INT65"), "datatype.unknown"),
        (listed(shape=[-2]), "shape.invalid"),
        (listed(shape=[2**62]), "data.count"),
        (listed(contents={"int_contents": [1, 128]}), "data.type"),
        (listed("INT64"), "contents.type"),
        (listed("FP16"), "contents.type"),
        (listed(contents={}), "data.count"),
        (listed(parameters={"shared_memory_region": {"string_param": "r"}}), "parameter.unsupported"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_wrong_requests_are_refused_by_name(request_: service_pb2.ModelInferRequest, rule: str) -> None:
    with refused(rule):
        read_infer(request_)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"sequence_id": 42}, "parameter.unsupported"),
        ({"sequence_end": True, "sequence_id": 1}, "parameter.unsupported"),
        ({"sequence_id": "s"}, "parameter.unsupported"),
        ({"timeout": -1}, "parameter.type"),
        ({"outputs": [InferRequestedOutput("y")] * 2}, "names.twice"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields: dict[str, Any], rule: str) -> None:
    with refused(rule):
        read_infer(message([given("x", np.ones(1, np.int8))], **fields))


# In each, the data would be refused in other words if it were read.
@pytest.mark.parametrize(
    ("request_", "rule"),
    [
        (listed(name="z"), "input.unknown"),
        (listed(), "tensor.type"),
        (listed("BYTES", name="y", shape=[11]), "request_too_large"),
    ],
    ids=["name", "datatype", "strings"],
)
def test_what_the_model_does_not_take_is_refused_before_its_data_is_read(
    request_: service_pb2.ModelInferRequest, rule: str
) -> None:
    specs = [TensorSpec("x", np.dtype(np.float32), (-1,)), TensorSpec("y", np.dtype(np.object_), (-1,))]
    request_.raw_input_contents.extend([b"too", b"many"])
    with refused(rule):
        read_infer(request_, specs, Limits(strings=10))


def test_a_tensor_in_shared_memory_is_refused_as_such_beside_one_that_is_not() -> None:
    request = message([given("x", np.ones(2, np.float32)), given("y", np.ones(2, np.float32))])
    request.inputs[1].parameters["shared_memory_region"].string_param = "r"
    request.raw_input_contents.pop()
    with refused("parameter.unsupported"):
        read_infer(request)


def test_every_output_is_bytes_whatever_is_asked() -> None:
    request = message([given("x", np.ones(2, np.float32))])
    check_outputs(read_infer(request), [TensorSpec("y", DTYPES["BF16"], (-1,))])
    request.parameters["binary_data_output"].bool_param = False
    check_outputs(read_infer(request), [TensorSpec("y", DTYPES["BF16"], (-1,))])


def test_bytes_that_do_not_fit_are_refused_by_name() -> None:
    two = [given("x", np.ones(2, np.float32)), given("y", np.ones(2, np.float32))]
    request = message(two)
    request.raw_input_contents[1] = b"123"
    with refused("bytes.count"):
        read_infer(request)
    request.raw_input_contents.pop()
    with refused("contents.count"):
        read_infer(request)
    with refused("names.twice"):
        read_infer(message([two[0], two[0]]))
    request = message(two)
    request.inputs[0].contents.fp32_contents.append(1)
    with refused("contents.twice"):
        read_infer(request)
    request = message(two[:1])
    request.parameters["mine"].SetInParent()
    with refused("parameter.type"):
        read_infer(request)


@pytest.mark.parametrize("datatype", sorted(BINARY_ONLY))
def test_halves_are_carried_as_bytes_only(datatype: str) -> None:
    with refused("contents.bytes_only"):
        read_infer(listed(datatype, shape=[0], contents={}))


def test_what_is_not_finite_may_be_sent_and_answered() -> None:
    given = [float("nan"), float("inf"), -1.5]
    request = read_infer(listed("FP32", shape=[3], contents={"fp32_contents": given}))
    said = InferResult(write_infer(build_response(request, "1", {"y": request.inputs["x"]})))
    assert np.array_equal(said.as_numpy("y"), np.array(given, np.float32), equal_nan=True)
