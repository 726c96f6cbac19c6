"""Refused bodies of inference over HTTP, and the error messages that clients receive."""

import gzip
import json
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest

from app.errors import RequestError, RequestTooLargeError
from app.serving.protocol.compression import decompress
from app.serving.protocol.infer import LIMITS, Limits
from app.serving.protocol.rest import JSON_LENGTH, read_infer
from app.tensors import TensorSpec
from tests.protocol import SPEC, asked, given, sent, x


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
        decompress(content, encoding, LIMITS.json_bytes)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_bomb_does_not_go_off(encoding: str) -> None:
    zeros = bytes(50 * 2**20)
    bomb = gzip.compress(zeros, 1) if encoding == "gzip" else zlib.compress(zeros, 1)
    tracemalloc.start()
    try:
        with pytest.raises(RequestTooLargeError, match="larger than 10000 bytes"):
            decompress(bomb, encoding, 10_000)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


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
