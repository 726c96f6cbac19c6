"""The Open Inference Protocol's tensors as JSON."""

import json

import numpy as np
import pytest

from app.config import DataConfig
from app.data.text import TextProcessor
from app.errors import RequestError
from app.serving.protocol import DTYPES, InferRequest, RequestedOutput, decode_tensors, encode_tensors, parse_body
from app.tensors import check_tensors

PROCESSOR = TextProcessor.fit(["some text"] * 2, DataConfig(source="-", buckets=[8]))


def request(**tensor: object) -> InferRequest:
    given = {"name": "x", "shape": [2], "datatype": "INT64", "data": [1, 2], **tensor}
    return parse_body(InferRequest, json.dumps({"inputs": [given]}).encode())


@pytest.mark.parametrize("datatype", DTYPES)
def test_every_datatype_goes_there_and_back(datatype: str) -> None:
    data = [True, False] if datatype == "BOOL" else [0, 1]
    tensors = decode_tensors(request(datatype=datatype, data=data))
    assert tensors["x"].dtype == DTYPES[datatype]
    (answer,) = encode_tensors(tensors, [])
    assert (answer.datatype, answer.shape, answer.data) == (datatype, [2], data)


def test_data_may_be_nested() -> None:
    flat = decode_tensors(request(shape=[2, 2], data=[1, 2, 3, 4]))
    nested = decode_tensors(request(shape=[2, 2], data=[[1, 2], [3, 4]]))
    assert np.array_equal(flat["x"], nested["x"])


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ({"datatype": "INT65"}, ["'x'", "'INT65'", "INT64"]),
        ({"shape": [3]}, ["'x'", "2 elements", "[3]"]),
        ({"shape": [-1, -2]}, ["'x'", "[-1, -2]"]),
        ({"shape": [2**62, 2**62], "data": [1]}, ["'x'", "1 elements"]),
        ({"data": [1.5, 2]}, ["'x'", "not INT64"]),
        ({"data": ["a", "b"]}, ["'x'", "not INT64"]),
        ({"data": [[1], [2, 3]]}, ["'x'", "different lengths"]),
        ({"datatype": "INT8", "data": [1, 300]}, ["'x'", "range of INT8"]),
        ({"data": "ab"}, ["inputs.0.data", "array"]),
        ({"shape": "2"}, ["inputs.0.shape"]),
    ],
)
def test_wrong_tensors_are_refused_by_name(tensor: dict[str, object], words: list[str]) -> None:
    with pytest.raises(RequestError) as refused:
        decode_tensors(request(**tensor))
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"inputs": []}', b"\xff", b'{"inputs": [1]}'])
def test_bodies_that_are_no_request_are_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="InferRequest"):
        parse_body(InferRequest, body)


def test_a_name_given_twice_is_refused() -> None:
    tensor = {"name": "x", "shape": [1], "datatype": "INT64", "data": [1]}
    with pytest.raises(RequestError, match="repeat a name"):
        decode_tensors(parse_body(InferRequest, json.dumps({"inputs": [tensor, tensor]}).encode()))


def test_an_unknown_output_is_refused() -> None:
    with pytest.raises(RequestError, match="output 'y' is not known: expected x"):
        encode_tensors({"x": np.zeros(1, np.float32)}, [RequestedOutput(name="y")])


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (np.full((1, 8), 10**6), "values from 1000000 to 1000000"),
        (np.full((1, 8), -1), "values from -1 to -1"),
        (np.ones((1, 9), np.int64), "has shape [1, 9]"),
        (np.ones((0, 8), np.int64), "has shape [0, 8]"),
    ],
)
def test_tokens_that_the_model_does_not_know_are_refused(ids: np.ndarray, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_tensors({"input_ids": ids, "attention_mask": np.ones_like(ids)}, PROCESSOR.inputs)
    assert words in str(refused.value)
