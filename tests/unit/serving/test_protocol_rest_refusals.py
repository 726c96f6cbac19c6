"""Refused bodies of inference over HTTP, and the error messages that clients receive."""

import gzip
import json
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest

from app.errors import RequestError
from app.serving.protocol.compression import decompress
from app.serving.protocol.infer import LIMITS, Limits
from app.serving.protocol.rest import JSON_LENGTH, read_infer
from app.tensors import TensorSpec
from tests.protocol import SPEC, asked, given, sent, x
from tests.wording import refused


@pytest.mark.parametrize(
    ("content", "encoding", "rule"),
    [
        (b"{}", "gzip", "body.encoding"),
        (gzip.compress(b"{}", mtime=0)[:-3], "gzip", "body.cut_short"),
        (gzip.compress(b"{}", mtime=0) + b"x", "gzip", "body.cut_short"),
        (zlib.compress(b"{}"), "br", "body.encoding"),
    ],
)
def test_what_cannot_be_decompressed_is_refused(content: bytes, encoding: str, rule: str) -> None:
    with refused(rule):
        decompress(content, encoding, LIMITS.json_bytes)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_bomb_does_not_go_off(encoding: str) -> None:
    zeros = bytes(50 * 2**20)
    bomb = gzip.compress(zeros, 1) if encoding == "gzip" else zlib.compress(zeros, 1)
    tracemalloc.start()
    try:
        with refused("request_too_large"):
            decompress(bomb, encoding, 10_000)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("tensor", "rule"),
    [
        ({"datatype": "INT65"}, "datatype.unknown"),
        ({"datatype": ["INT64"]}, "datatype.unknown"),
        ({"shape": [3]}, "data.count"),
        ({"shape": [-1, -2]}, "shape.invalid"),
        ({"shape": [True, 2]}, "shape.invalid"),
        ({"shape": [2**62, 2**62], "data": [1]}, "data.count"),
        ({"shape": [0, 2**62], "data": []}, "shape.invalid"),
        ({"shape": [1] * 65, "data": [1]}, "shape.invalid"),
        ({"shape": "2"}, "shape.invalid"),
        ({"data": [1.5, 2]}, "data.type"),
        ({"data": [1, "a"]}, "data.type"),
        ({"data": [1, None], "datatype": "FP32"}, "data.type"),
        ({"data": [1, True]}, "data.type"),
        ({"data": [0.0, False], "datatype": "FP32"}, "data.type"),
        ({"data": [[1.0, True]], "datatype": "FP64", "shape": [1, 2]}, "data.type"),
        ({"data": ["1", 2], "datatype": "FP32"}, "data.type"),
        ({"data": [1, 300], "datatype": "INT8"}, "data.type"),
        ({"data": [1, -1], "datatype": "UINT16"}, "data.type"),
        ({"data": [1, 1e39], "datatype": "FP32"}, "data.type"),
        ({"data": [*range(7), "a", 8, None, "b"], "shape": [11]}, "data.type"),
        ({"data": [0, 0.5, 2, 1e39, 0, -1e39], "shape": [6], "datatype": "FP32"}, "data.type"),
        ({"data": [True, 1], "datatype": "BOOL"}, "data.type"),
        ({"data": ["a", 1], "datatype": "BYTES"}, "data.type"),
        ({"data": [[1], [2, 3]], "shape": [2, 2]}, "data.nesting"),
        ({"data": [[1, 2], 3, 4], "shape": [2, 2]}, "data.nesting"),
        ({"data": [[1, 2]]}, "data.nesting"),
        ({"data": "ab"}, "data.type"),
        ({"data": None}, "data.type"),
        ({"parameters": {"binary_data_size": 16}}, "contents.twice"),
        ({"parameters": {"shared_memory_region": "r"}}, "parameter.unsupported"),
        ({"parameters": [1]}, "parameters.type"),
        ({"name": 3}, "tensor.type"),
    ],
)
def test_wrong_tensors_are_refused_by_name(tensor: dict[str, object], rule: str) -> None:
    with refused(rule):
        asked(x(**tensor))


@pytest.mark.parametrize(
    ("datatype", "shape", "content", "rule"),
    [
        ("FP32", [2], bytes(7), "bytes.count"),
        ("FP32", [2**62], bytes(8), "bytes.count"),
        ("FP32", [0, 2**62], b"", "shape.invalid"),
        ("BOOL", [2], b"\1\2", "data.type"),
        ("BYTES", [2], b"\1\0\0\0a", "bytes.count"),
        ("BYTES", [1], b"\2\0\0\0a", "bytes.count"),
        ("BYTES", [1], b"\xff\xff\xff\xff", "bytes.count"),
        ("BYTES", [1], b"\1\0\0\0ab", "bytes.count"),
        ("BYTES", [2**62], b"\0\0\0\0", "request_too_large"),
        ("FP32", [2**62] * 64, bytes(8), "bytes.count"),
        ("BYTES", [0], b"\0\0\0\0", "bytes.count"),
    ],
)
def test_wrong_bytes_are_refused_by_name(datatype: str, shape: list[int], content: bytes, rule: str) -> None:
    tensor = {"name": "x", "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(content)}}
    head = json.dumps({"inputs": [tensor]}).encode()
    with refused(rule):
        read_infer(head + content, {JSON_LENGTH: str(len(head))}, "m")


@pytest.mark.parametrize(
    ("change", "length", "rule"),
    [
        (lambda body: body[:-1], None, "bytes.count"),
        (lambda body: body + b"x", None, "bytes.count"),
        (lambda body: body, "-1", "header.length"),
        pytest.param(lambda body: body, "1" * 5000, "header.length", id="many digits"),
        (lambda body: body, "²", "header.length"),
        (lambda body: body, "3", "json.invalid"),
    ],
)
def test_bodies_that_are_cut_are_refused(change: Any, length: str | None, rule: str) -> None:
    body, headers = sent([given("x", np.ones(2, np.float32))])
    with refused(rule):
        read_infer(change(body), {JSON_LENGTH: length or headers[JSON_LENGTH]}, "m")


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"id": 7}, "id.type"),
        ({"parameters": 7}, "parameters.type"),
        ({"parameters": {"timeout": -1}}, "parameter.type"),
        ({"parameters": {"timeout": 1.5}}, "parameter.type"),
        ({"parameters": {"priority": True}}, "parameter.type"),
        ({"parameters": {"binary_data_output": 1}}, "parameter.type"),
        ({"parameters": {"sequence_id": 42}}, "parameter.unsupported"),
        ({"parameters": {"sequence_start": True}}, "parameter.unsupported"),
        ({"parameters": {"mine": [1]}}, "parameter.type"),
        ({"outputs": {}}, "outputs.type"),
        ({"outputs": ["y"]}, "outputs.type"),
        ({"outputs": [{}]}, "name.type"),
        ({"outputs": [{"name": "y"}, {"name": "y"}]}, "names.twice"),
        ({"outputs": [{"name": "y", "parameters": {"classification": "2"}}]}, "parameter.type"),
        ({"outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, "parameter.type"),
        ({"outputs": [{"name": "y", "parameters": {"shared_memory_region": "r"}}]}, "parameter.unsupported"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields: dict[str, object], rule: str) -> None:
    with refused(rule):
        asked(x(), **fields)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity"])
def test_who_sends_in_json_what_is_not_finite_is_told_to_send_bytes(number: bytes) -> None:
    body = b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [%s]}]}' % number
    with refused("json.invalid"):
        read_infer(body, {}, "m")
    with refused("json.invalid") as error:
        read_infer(b"{", {}, "m")
    assert "finite" not in str(error.value)


# In each, the data would be refused in other words if it were read.
@pytest.mark.parametrize(
    ("tensor", "rule"),
    [
        ({"name": "z", "data": ["no number"]}, "input.unknown"),
        ({"name": "z", "datatype": "INT65"}, "input.unknown"),
        ({"datatype": "FP64", "data": ["no number"]}, "tensor.type"),
        ({"datatype": "BYTES", "data": [1]}, "tensor.type"),
        ({"name": "y", "datatype": "BYTES", "shape": [11], "data": [1]}, "request_too_large"),
        ({"datatype": "FP64", "data": None, "parameters": {"binary_data_size": -1}}, "tensor.type"),
    ],
)
def test_what_the_model_does_not_take_is_refused_before_its_data_is_read(tensor: dict[str, object], rule: str) -> None:
    specs = [TensorSpec("x", np.dtype(np.float32), (-1,)), TensorSpec("y", np.dtype(np.object_), (-1,))]
    body = json.dumps({"inputs": [x(**tensor)]}).encode()
    with refused(rule):
        read_infer(body, {}, "m", inputs=specs, limits=Limits(strings=10))


def test_a_name_given_twice_is_refused() -> None:
    with refused("names.twice"):
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
    ("inputs", "rule"),
    [
        ([], "body.bytes_alone"),
        ([SPEC, SPEC], "body.bytes_alone"),
        ([SPEC], "bytes.count"),
        ([TensorSpec("x", np.dtype(np.float32), (-1, -1, -1))], "body.bytes_alone"),
    ],
)
def test_a_tensor_alone_that_does_not_fit_is_refused(inputs: list[TensorSpec], rule: str) -> None:
    with refused(rule):
        read_infer(bytes(20), {JSON_LENGTH: "0"}, "m", inputs=inputs)
