"""Inference over HTTP, against the bodies that Triton's client writes and reads."""

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput, InferResult

from app.errors import RequestError, RequestTooLargeError
from app.serving.protocol.infer import (
    InferRequest,
    Limits,
    RequestedOutput,
    RequestParameters,
    build_response,
    check_outputs,
)
from app.serving.protocol.rest import JSON_LENGTH, read_infer, write_infer
from app.serving.protocol.tensors import BINARY_ONLY, DATATYPES, DTYPES
from app.tensors import Tensors, TensorSpec
from tests.protocol import EXAMPLES, in_client

SPEC = TensorSpec("x", np.dtype(np.float32), (-1, 2, -1))


def given(name: str, tensor: NDArray[Any], binary: bool = True) -> InferInput:
    asked = InferInput(name, list(tensor.shape), DATATYPES[tensor.dtype])
    return asked.set_data_from_numpy(in_client(tensor), binary_data=binary)


def sent(inputs: list[InferInput], **fields: Any) -> tuple[bytes, dict[str, str]]:
    body, length = InferenceServerClient.generate_request_body(inputs, **fields)
    return body, {} if length is None else {JSON_LENGTH: str(length)}


def received(body: bytes, headers: Mapping[str, str]) -> InferResult:
    length = headers.get(JSON_LENGTH)
    return InferenceServerClient.parse_response_body(
        body, header_length=length and int(length), content_encoding=headers.get("content-encoding")
    )


def asked(*tensors: dict[str, object], **fields: object) -> InferRequest:
    return read_infer(json.dumps({"inputs": tensors, **fields}).encode(), {}, "m")


def x(**changed: object) -> dict[str, object]:
    return {"name": "x", "shape": [2], "datatype": "INT64", "data": [1, 2], **changed}


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
    with pytest.raises(RequestError, match=f"'x' lists elements of {datatype}"):
        asked(x(datatype=datatype))
    request = asked(x())
    with pytest.raises(RequestError, match=f"'y' is {datatype}.*binary_data"):
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
    ("output", "words"),
    [
        ({"name": "y"}, "output 'y' is not known: expected bool, bytes, fp16, bf16, fp32"),
        ({"name": "bool", "parameters": {"classification": 1}}, "'bool' is BOOL, which has no order"),
        ({"name": "bytes", "parameters": {"classification": 1}}, "'bytes' is BYTES, which has no order"),
        ({"name": "fp16"}, "'fp16' is FP16, which JSON does not carry: ask for it with .*'binary_data'"),
        ({"name": "bf16"}, "'bf16' is BF16, which JSON does not carry: ask for it with .*'binary_data'"),
    ],
)
def test_outputs_that_cannot_be_answered_are_refused_before_the_model_runs(
    output: dict[str, object], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        check_outputs(asked(x(), outputs=[output]), outputs_of("BOOL", "BYTES", "FP16", "BF16", "FP32"))


def test_outputs_that_nobody_names_are_checked_too() -> None:
    with pytest.raises(RequestError, match="'fp16' is FP16, which JSON does not carry"):
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
    with pytest.raises(RequestError, match="'y' has 1000001 elements: expected 1000000 at most to classify it"):
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
    request = read_infer(content, {**headers, "content-encoding": encoding}, "m")
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


@pytest.mark.parametrize(
    ("content", "encoding", "words"),
    [
        (b"{}", "gzip", "not gzip"),
        (gzip.compress(b"{}", mtime=0)[:-3], "gzip", "ends too early"),
        (gzip.compress(b"{}", mtime=0) + b"x", "gzip", "continues after its end"),
        (zlib.compress(b"{}"), "br", "'br': expected gzip or deflate"),
    ],
)
def test_what_cannot_be_decompressed_is_refused(content: bytes, encoding: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_infer(content, {"content-encoding": encoding}, "m")


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_bomb_does_not_go_off(encoding: str) -> None:
    zeros = bytes(50 * 2**20)
    bomb = gzip.compress(zeros, 1) if encoding == "gzip" else zlib.compress(zeros, 1)
    tracemalloc.start()
    try:
        with pytest.raises(RequestTooLargeError, match="larger than 10000 bytes"):
            read_infer(bomb, {"content-encoding": encoding}, "m", limits=Limits(body_bytes=10_000))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_json_may_be_shorter_than_bodies() -> None:
    limits = Limits(body_bytes=5000, json_bytes=1000)
    tensor = np.ones(1000, np.float32)
    read_infer(*sent([given("x", tensor)]), "m", limits=limits)
    with pytest.raises(RequestTooLargeError, match="bytes of JSON: expected 1000 at most"):
        read_infer(*sent([given("x", tensor, binary=False)]), "m", limits=limits)
    with pytest.raises(RequestTooLargeError, match="larger than 5000"):
        read_infer(*sent([given("x", np.ones(2000, np.float32))]), "m", limits=limits)


@pytest.mark.parametrize("nested", [[[1, 2, 3], [4, 5, 6]], [1, 2, 3, 4, 5, 6]])
def test_elements_are_listed_flat_or_nested(nested: list[Any]) -> None:
    assert asked(x(shape=[2, 3], data=nested)).inputs["x"].tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ({"datatype": "INT65"}, ["'x'", "'INT65'", "INT64"]),
        ({"datatype": ["INT64"]}, ["'x'", "['INT64']", "INT64"]),
        ({"shape": [3]}, ["'x'", "2 elements", "[3]"]),
        ({"shape": [-1, -2]}, ["'x'", "[-1, -2]", "from 0 on"]),
        ({"shape": [True, 2]}, ["'x'", "from 0 on"]),
        ({"shape": [2**62, 2**62], "data": [1]}, ["'x'", "1 elements"]),
        ({"shape": [0, 2**62], "data": []}, ["'x'", "too large"]),
        ({"shape": [1] * 65, "data": [1]}, ["'x'", "64 sizes at most"]),
        ({"shape": "2"}, ["'x'", "'2'", "list"]),
        ({"data": [1.5, 2]}, ["'x'", "1.5 at 0", "whole number", "INT64"]),
        ({"data": [1, "a"]}, ["'x'", "'a' at 1", "INT64"]),
        ({"data": [1, None], "datatype": "FP32"}, ["'x'", "None at 1", "FP32"]),
        ({"data": [1, True]}, ["'x'", "True at 1", "whole number", "INT64"]),
        ({"data": [0.0, False], "datatype": "FP32"}, ["'x'", "False at 1", "a number", "FP32"]),
        ({"data": [[1.0, True]], "datatype": "FP64", "shape": [1, 2]}, ["'x'", "True at 1", "a number", "FP64"]),
        ({"data": ["1", 2], "datatype": "FP32"}, ["'x'", "'1' at 0", "a number", "FP32"]),
        ({"data": [1, 300], "datatype": "INT8"}, ["'x'", "300 at 1", "-128 to 127"]),
        ({"data": [1, -1], "datatype": "UINT16"}, ["'x'", "-1 at 1", "0 to 65535"]),
        ({"data": [1, 1e39], "datatype": "FP32"}, ["'x'", "1e+39 at 1", "FP32"]),
        ({"data": [*range(7), "a", 8, None, "b"], "shape": [11]}, ["'x'", "'a' at 7", "INT64"]),
        ({"data": [0, 0.5, 2, 1e39, 0, -1e39], "shape": [6], "datatype": "FP32"}, ["'x'", "1e+39 at 3", "FP32"]),
        ({"data": [True, 1], "datatype": "BOOL"}, ["'x'", "1 at 1", "true or false"]),
        ({"data": ["a", 1], "datatype": "BYTES"}, ["'x'", "1 at 1", "a string"]),
        ({"data": [[1], [2, 3]], "shape": [2, 2]}, ["'x'", "not nested as its shape [2, 2]"]),
        ({"data": [[1, 2], 3, 4], "shape": [2, 2]}, ["'x'", "not nested as its shape [2, 2]"]),
        ({"data": [[1, 2]]}, ["'x'", "not nested as its shape [2]"]),
        ({"data": "ab"}, ["'x'", "'ab'", "expected a list"]),
        ({"data": None}, ["'x'", "None", "expected a list"]),
        ({"parameters": {"binary_data_size": 16}}, ["'x'", "both data and", "binary_data_size"]),
        ({"parameters": {"shared_memory_region": "r"}}, ["'x'", "shared memory is not supported"]),
        ({"parameters": [1]}, ["'x'", "[1]", "an object"]),
        ({"name": 3}, ["3", "a name"]),
    ],
)
def test_wrong_tensors_are_refused_by_name(tensor: dict[str, object], words: list[str]) -> None:
    with pytest.raises(RequestError) as refused:
        asked(x(**tensor))
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(
    ("datatype", "shape", "content", "words"),
    [
        ("FP32", [2], bytes(7), "has 7 bytes: expected 8"),
        ("FP32", [2**62], bytes(8), "has 8 bytes: expected 18446744073709551616"),
        ("FP32", [0, 2**62], b"", "too large"),
        ("BOOL", [2], b"\1\2", "the byte 2: expected 0 or 1"),
        ("BYTES", [2], b"\1\0\0\0a", "expected 2 elements"),
        ("BYTES", [1], b"\2\0\0\0a", "expected 1 elements"),
        ("BYTES", [1], b"\xff\xff\xff\xff", "expected 1 elements"),
        ("BYTES", [1], b"\1\0\0\0ab", "expected 1 elements"),
        ("BYTES", [2**62], b"\0\0\0\0", "has 4611686018427387904 elements of BYTES: expected 1000000 at most"),
        ("FP32", [2**62] * 64, bytes(8), "has 8 bytes: expected [0-9]+\\.\\.\\.[0-9]+, for FP32"),
        ("BYTES", [0], b"\0\0\0\0", "expected 0 elements"),
    ],
)
def test_wrong_bytes_are_refused_by_name(datatype: str, shape: list[int], content: bytes, words: str) -> None:
    tensor = {"name": "x", "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(content)}}
    head = json.dumps({"inputs": [tensor]}).encode()
    with pytest.raises(RequestError, match=f"'x'.*{words}"):
        read_infer(head + content, {JSON_LENGTH: str(len(head))}, "m")


@pytest.mark.parametrize(
    ("change", "length", "words"),
    [
        (lambda body: body[:-1], None, "has the parameter 'binary_data_size' 8, but the body has 7 bytes left"),
        (lambda body: body + b"x", None, "1 bytes behind its tensors"),
        (lambda body: body, "-1", "'-1': expected 0 to"),
        (lambda body: body, "1" * 5000, "expected 0 to"),
        (lambda body: body, "²", "expected 0 to"),
        (lambda body: body, "3", "Invalid JSON"),
    ],
)
def test_bodies_that_are_cut_are_refused(change: Any, length: str | None, words: str) -> None:
    body, headers = sent([given("x", np.ones(2, np.float32))])
    with pytest.raises(RequestError, match=words):
        read_infer(change(body), {JSON_LENGTH: length or headers[JSON_LENGTH]}, "m")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"id": 7}, "id 7: expected a string"),
        ({"parameters": 7}, "parameters 7: expected an object"),
        ({"parameters": {"timeout": -1}}, "'timeout' -1"),
        ({"parameters": {"timeout": 1.5}}, "'timeout' 1.5"),
        ({"parameters": {"priority": True}}, "'priority' True"),
        ({"parameters": {"binary_data_output": 1}}, "'binary_data_output' 1"),
        ({"parameters": {"sequence_id": 42}}, "'sequence_id' 42: models here keep no state"),
        ({"parameters": {"sequence_start": True}}, "'sequence_start' True: models here keep no state"),
        ({"parameters": {"mine": [1]}}, "'mine' \\[1\\]"),
        ({"outputs": {}}, "outputs is {}: expected a list"),
        ({"outputs": ["y"]}, "outputs has 'y'"),
        ({"outputs": [{}]}, "an output has the name None"),
        ({"outputs": [{"name": "y"}, {"name": "y"}]}, "repeat a name"),
        ({"outputs": [{"name": "y", "parameters": {"classification": "2"}}]}, "output 'y'.*'classification' '2'"),
        ({"outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, "output 'y'.*'binary_data' 1"),
        ({"outputs": [{"name": "y", "parameters": {"shared_memory_region": "r"}}]}, "output 'y'.*shared memory"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        asked(x(), **fields)


def test_a_request_outside_of_sequences_may_say_so() -> None:
    parameters = asked(x(), parameters={"sequence_id": 0, "sequence_start": False, "timeout": 0}).parameters
    assert parameters == RequestParameters()


def test_parameters_that_the_protocol_does_not_define_change_nothing() -> None:
    assert asked(x(), parameters={"sequence_length": 8, "trace": "on"}).parameters == RequestParameters()


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity"])
def test_who_sends_in_json_what_is_not_finite_is_told_to_send_bytes(number: bytes) -> None:
    body = b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [%s]}]}' % number
    with pytest.raises(RequestError, match=r"Invalid JSON: .*: send what is not finite as bytes"):
        read_infer(body, {}, "m")
    with pytest.raises(RequestError, match="Invalid JSON") as refused:
        read_infer(b"{", {}, "m")
    assert "finite" not in str(refused.value)


# In each, the data would be refused in other words if it were read.
@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ({"name": "z", "data": ["no number"]}, "input 'z' is not known: expected x, y"),
        ({"name": "z", "datatype": "INT65"}, "input 'z' is not known: expected x, y"),
        ({"datatype": "FP64", "data": ["no number"]}, "input 'x' is float64: expected float32"),
        ({"datatype": "BYTES", "data": [1]}, "input 'x' is string: expected float32"),
        ({"name": "y", "datatype": "BYTES", "shape": [11], "data": [1]}, "'y' has 11 elements of BYTES: expected 10"),
        (
            {"datatype": "FP64", "data": None, "parameters": {"binary_data_size": -1}},
            "'x' is float64: expected float32",
        ),
    ],
)
def test_what_the_model_does_not_take_is_refused_before_its_data_is_read(tensor: dict[str, object], words: str) -> None:
    specs = [TensorSpec("x", np.dtype(np.float32), (-1,)), TensorSpec("y", np.dtype(np.object_), (-1,))]
    body = json.dumps({"inputs": [x(**tensor)]}).encode()
    with pytest.raises(RequestError, match=words):
        read_infer(body, {}, "m", inputs=specs, limits=Limits(strings=10))


def test_what_the_model_takes_is_read() -> None:
    spec = TensorSpec("x", np.dtype(np.int64), (-1,))
    assert read_infer(json.dumps({"inputs": [x()]}).encode(), {}, "m", inputs=[spec]).inputs["x"].tolist() == [1, 2]


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(RequestError, match="repeat the name 'x'"):
        asked(x(), x())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"{}",
        b'{"inputs": []}',
        b'{"inputs": {}}',
        b'{"inputs": [1]}',
        b"[" * 250_000,
        b'{"inputs": ' + b"[" * 250_000 + b"]" * 250_000 + b"}",
        b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [NaN]}]}',
        b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [-Infinity]}]}',
        b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP64", "data": [1e999]}]}',
        b'{"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": ["\\ud800"]}]}',
    ],
    ids=lambda body: repr(body[:40]),
)
def test_bodies_that_are_no_request_are_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match=r"Invalid JSON|expected"):
        read_infer(body, {}, "m")


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (np.array([np.nan]), "'y' has numbers that are not finite"),
        (np.array([np.inf], np.float32), "'y' has numbers that are not finite"),
        (np.array([b"\xff"], np.object_), "'y' has bytes that are not UTF-8"),
    ],
)
def test_what_json_cannot_say_is_answered_as_bytes_only(output: NDArray[Any], words: str) -> None:
    request = asked(x())
    with pytest.raises(RequestError, match=f"{words}.*binary_data"):
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


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([], "this one has none"),
        ([SPEC, SPEC], "this one has x, x"),
        ([SPEC], "has 20 bytes: expected 16"),
        ([TensorSpec("x", np.dtype(np.float32), (-1, -1, -1))], "2 sizes beside its batch that vary"),
    ],
)
def test_a_tensor_alone_that_does_not_fit_is_refused(inputs: list[TensorSpec], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_infer(bytes(20), {JSON_LENGTH: "0"}, "m", inputs=inputs)
