"""Inference over HTTP, against the bodies that Triton's client writes and reads."""

import gzip
import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tritonclient.http import InferenceServerClient, InferRequestedOutput, InferResult

from app.serving.protocol.compression import decompress
from app.serving.protocol.infer import (
    Limits,
    RequestedOutput,
    RequestParameters,
    build_response,
    check_outputs,
)
from app.serving.protocol.rest import JSON_LENGTH, read_infer, write_infer
from app.serving.protocol.tensors import BINARY_ONLY, DTYPES
from app.tensors import Tensors, TensorSpec
from tests.protocol import EXAMPLES, SPEC, asked, given, in_client, sent, x
from tests.wording import refused


def received(body: bytes, headers: Mapping[str, str]) -> InferResult:
    length = headers.get(JSON_LENGTH)
    return InferenceServerClient.parse_response_body(
        body, header_length=length and int(length), content_encoding=headers.get("content-encoding")
    )


def same(one: Tensors, other: Tensors) -> bool:
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype and np.array_equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("datatype", EXAMPLES)
def test_every_datatype_goes_there_and_back_as_bytes(datatype: str) -> None:
    tensor = EXAMPLES[datatype]
    request = read_infer(*sent([given("x", tensor)]), "m")
    assert same(request.inputs, {"x": tensor})
    result = received(*write_infer(build_response(request, "3", {"y": request.inputs["x"]}), request))
    assert np.array_equal(result.as_numpy("y"), in_client(tensor))
    assert result.get_output("y")["datatype"] == datatype


@pytest.mark.parametrize("datatype", sorted(EXAMPLES.keys() - BINARY_ONLY))
def test_every_datatype_but_halves_goes_there_and_back_as_json(datatype: str) -> None:
    tensor = EXAMPLES[datatype]
    wanted = [InferRequestedOutput("y", binary_data=False)]
    request = read_infer(*sent([given("x", tensor, binary=False)], outputs=wanted), "m")
    assert same(request.inputs, {"x": tensor})
    body, headers = write_infer(build_response(request, "3", {"y": tensor}), request)
    assert JSON_LENGTH not in headers
    expected = np.array([[item.decode() for item in tensor[0]]], np.object_) if datatype == "BYTES" else tensor
    assert np.array_equal(received(body, headers).as_numpy("y"), expected)


@pytest.mark.parametrize("datatype", sorted(BINARY_ONLY))
def test_halves_are_carried_as_bytes_only(datatype: str) -> None:
    with refused("contents.bytes_only"):
        asked(x(datatype=datatype))
    request = asked(x())
    with refused("output.bytes_only"):
        write_infer(build_response(request, "1", {"y": EXAMPLES[datatype]}), request)


def test_bytes_and_json_may_be_mixed() -> None:
    tensors = {name: EXAMPLES[name] for name in ("FP32", "BYTES", "INT8", "BOOL", "BF16", "UINT64")}
    as_bytes = {"FP32", "BYTES", "BF16"}
    outputs = [InferRequestedOutput(name, binary_data=name in as_bytes) for name in tensors]
    body, headers = sent([given(name, array, name in as_bytes) for name, array in tensors.items()], outputs=outputs)
    request = read_infer(memoryview(body), headers, "m")
    assert same(request.inputs, tensors)
    result = received(*write_infer(build_response(request, "1", tensors), request))
    for name, tensor in tensors.items():
        assert np.array_equal(result.as_numpy(name).astype(tensor.dtype), tensor)
        assert ("data" in result.get_output(name)) == (name not in as_bytes)


def test_bytes_are_read_in_place() -> None:
    tensor = np.arange(1000, dtype=np.float32)
    body, headers = sent([given("x", tensor)])
    view = read_infer(body, headers, "m").inputs["x"]
    assert np.shares_memory(view, np.frombuffer(body, np.uint8))
    assert not view.flags.writeable


def test_tensors_without_elements_and_without_axes_are_tensors() -> None:
    tensors = {"none": np.zeros((0, 3), np.float32), "strings": np.empty((2, 0), np.object_)}
    for binary in (True, False):
        inputs = [given(name, tensor, binary) for name, tensor in tensors.items()]
        read = read_infer(*sent(inputs), "m").inputs
        assert {name: array.shape for name, array in read.items()} == {"none": (0, 3), "strings": (2, 0)}
    assert asked(x(shape=[], data=[7])).inputs["x"] == 7


def test_all_that_a_request_says_is_read() -> None:
    outputs = [InferRequestedOutput("y", binary_data=False), InferRequestedOutput("z", class_count=3)]
    body, headers = sent(
        [given("x", np.ones(2, np.float32))],
        outputs=outputs,
        request_id="r1",
        priority=2,
        timeout=5000,
        parameters={"trace": "on", "n": 2.5, "b": False},
    )
    request = read_infer(body, headers, "m", "7")
    assert (request.model, request.version, request.id) == ("m", "7", "r1")
    assert request.outputs == (RequestedOutput("y"), RequestedOutput("z", binary=True, classification=3))
    assert request.parameters == RequestParameters(2, 0.005, False)


def test_all_outputs_are_bytes_if_the_request_says_so_and_no_output_differs() -> None:
    request = asked(
        x(),
        parameters={"binary_data_output": True},
        outputs=[{"name": "a"}, {"name": "b", "parameters": {"binary_data": False}}],
    )
    assert [output.binary for output in request.outputs] == [True, False]
    assert asked(x(), parameters={"binary_data_output": True}).wants_bytes("any")
    assert not asked(x()).wants_bytes("any")


def test_an_answer_has_the_outputs_that_were_asked_for_in_that_order() -> None:
    outputs = {name: np.ones(1, np.float32) for name in "abc"}
    request = asked(x(), id="7", outputs=[{"name": "c"}, {"name": "a"}])
    body, headers = write_infer(build_response(request, "2", outputs, parameters={"stage": 1}), request)
    said = json.loads(body)
    assert [output["name"] for output in said.pop("outputs")] == ["c", "a"]
    assert said == {"model_name": "m", "model_version": "2", "id": "7", "parameters": {"stage": 1}}
    assert headers == {"content-type": "application/json"}


def test_classes_come_in_the_place_of_scores() -> None:
    scores = np.array([[1, 5, 10, 4], [2.5, 3.3, 0, 3.3]], np.float32)
    request = asked(x(), outputs=[{"name": "y", "parameters": {"classification": 2, "binary_data": True}}])
    result = received(*write_infer(build_response(request, "1", {"y": scores}, {"y": ["a", "b", "c"]}), request))
    assert result.as_numpy("y").tolist() == [[b"10.0:2:c", b"5.0:1:b"], [b"3.3:1:b", b"3.3:3"]]
    row = build_response(request, "1", {"y": np.array([1, 5, 10, 4], np.uint8)}).outputs["y"]
    assert row.tolist() == [b"10:2", b"5:1"]


def outputs_of(*datatypes: str) -> list[TensorSpec]:
    """Specs that are called as their datatypes, in lower case."""
    return [TensorSpec(datatype.lower(), DTYPES[datatype], (-1, 3)) for datatype in datatypes]


@pytest.mark.parametrize(
    ("output", "rule"),
    [
        ({"name": "y"}, "output.unknown"),
        ({"name": "bool", "parameters": {"classification": 1}}, "classification.no_order"),
        ({"name": "bytes", "parameters": {"classification": 1}}, "classification.no_order"),
        ({"name": "fp16"}, "output.bytes_only"),
        ({"name": "bf16"}, "output.bytes_only"),
    ],
)
def test_outputs_that_cannot_be_answered_are_refused_before_the_model_runs(
    output: dict[str, object], rule: str
) -> None:
    with refused(rule):
        check_outputs(asked(x(), outputs=[output]), outputs_of("BOOL", "BYTES", "FP16", "BF16", "FP32"))


def test_outputs_that_nobody_names_are_checked_too() -> None:
    with refused("output.bytes_only"):
        check_outputs(asked(x()), outputs_of("FP32", "FP16"))
    check_outputs(asked(x(), parameters={"binary_data_output": True}), outputs_of("FP32", "FP16"))
    check_outputs(asked(x(), outputs=[{"name": "fp32"}]), outputs_of("FP32", "FP16"))


def test_classes_are_strings_that_json_carries() -> None:
    request = asked(x(), outputs=[{"name": "fp16", "parameters": {"classification": 1}}])
    check_outputs(request, outputs_of("FP16"))
    body, _ = write_infer(build_response(request, "1", {"fp16": np.array([[1, 3]], np.float16)}), request)
    assert json.loads(body)["outputs"][0]["data"] == ["3.0:1"]


def test_an_output_too_large_is_not_classified() -> None:
    request = asked(x(), outputs=[{"name": "y", "parameters": {"classification": 1}}])
    with refused("classification.too_large"):
        build_response(request, "1", {"y": np.zeros((1_000_001, 1), np.int8)})
    assert build_response(request, "1", {"y": np.zeros((1, 1_000_000), np.int8)}).outputs["y"].tolist() == [[b"0:0"]]


@pytest.mark.parametrize("datatype", sorted(EXAMPLES.keys() - {"BOOL", "BYTES"}))
def test_whatever_has_an_order_is_classified(datatype: str) -> None:
    request = asked(x(), outputs=[{"name": "y", "parameters": {"classification": 99}}])
    (classes,) = build_response(request, "1", {"y": EXAMPLES[datatype]}).outputs["y"]
    assert [class_.split(b":")[1] for class_ in classes] == [b"2", b"1", b"0"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_bodies_may_be_compressed(encoding: str) -> None:
    tensor = np.zeros((10, 100), np.float32)
    body, headers = sent([given("x", tensor)])
    content = gzip.compress(body) if encoding == "gzip" else zlib.compress(body)
    request = read_infer(decompress(content, encoding, len(body)), headers, "m")
    assert same(request.inputs, {"x": tensor})
    body, headers = write_infer(
        build_response(request, "1", {"y": tensor}), request, f"br, {encoding};q=0.8, identity;q=0.5"
    )
    assert headers["content-encoding"] == encoding
    assert len(body) < 400
    assert np.array_equal(received(body, headers).as_numpy("y"), tensor)


@pytest.mark.parametrize("accepted", ["", "br", "gzip;q=0", "identity, gzip;q=0.9", "gzip;q=much", ";;,,", "*"])
def test_an_answer_is_compressed_only_for_who_prefers_it(accepted: str) -> None:
    request = asked(x())
    assert (
        "content-encoding" not in write_infer(build_response(request, "1", {"y": np.zeros(1000)}), request, accepted)[1]
    )


def test_small_answers_are_not_compressed() -> None:
    request = asked(x())
    assert "content-encoding" not in write_infer(build_response(request, "1", {"y": np.zeros(9)}), request, "gzip")[1]


def test_json_may_be_shorter_than_bodies() -> None:
    limits = Limits(body_bytes=5000, json_bytes=1000)
    tensor = np.ones(1000, np.float32)
    read_infer(*sent([given("x", tensor)]), "m", limits=limits)
    with refused("request_too_large"):
        read_infer(*sent([given("x", tensor, binary=False)]), "m", limits=limits)
    with refused("request_too_large"):
        read_infer(*sent([given("x", np.ones(2000, np.float32))]), "m", limits=limits)


@pytest.mark.parametrize("nested", [[[1, 2, 3], [4, 5, 6]], [1, 2, 3, 4, 5, 6]])
def test_elements_are_listed_flat_or_nested(nested: list[Any]) -> None:
    assert asked(x(shape=[2, 3], data=nested)).inputs["x"].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_a_request_outside_of_sequences_may_say_so() -> None:
    parameters = asked(x(), parameters={"sequence_id": 0, "sequence_start": False, "timeout": 0}).parameters
    assert parameters == RequestParameters()


def test_parameters_that_the_protocol_does_not_define_change_nothing() -> None:
    assert asked(x(), parameters={"sequence_length": 8, "trace": "on"}).parameters == RequestParameters()


def test_what_the_model_takes_is_read() -> None:
    spec = TensorSpec("x", np.dtype(np.int64), (-1,))
    assert read_infer(json.dumps({"inputs": [x()]}).encode(), {}, "m", inputs=[spec]).inputs["x"].tolist() == [1, 2]


@pytest.mark.parametrize(
    "output", [np.array([np.nan]), np.array([np.inf], np.float32), np.array([b"\xff"], np.object_)]
)
def test_what_json_cannot_say_is_answered_as_bytes_only(output: NDArray[Any]) -> None:
    request = asked(x())
    with refused("output.bytes_only"):
        write_infer(build_response(request, "1", {"y": output}), request)
    request = asked(x(), parameters={"binary_data_output": True})
    result = received(*write_infer(build_response(request, "1", {"y": output}), request)).as_numpy("y")
    assert result.tobytes() == output.tobytes() or result.tolist() == output.tolist()


def test_a_body_may_be_one_tensor_and_nothing_else() -> None:
    row = np.arange(6, dtype=np.float32)
    request = read_infer(row.tobytes(), {JSON_LENGTH: "0"}, "m", inputs=[SPEC])
    assert same(request.inputs, {"x": row.reshape(1, 2, 3)})
    assert request.wants_bytes("any")
    text = read_infer(b"a text", {JSON_LENGTH: "0"}, "m", inputs=[TensorSpec("t", np.dtype(np.object_), (-1,))])
    assert text.inputs["t"].tolist() == [b"a text"]
