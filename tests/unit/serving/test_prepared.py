"""Requests that are JSON alone: read around their tensors once, and answered as if each were read whole."""

import json
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.errors import RequestError
from app.serving.model.served import ServedModel
from app.serving.protocol.infer import build_response
from app.serving.protocol.rest import read_infer, write_infer
from app.serving.transport import prepared
from app.serving.transport.prepared import PreparedRequests
from app.tensors import OUTPUT, Tensors, TensorSpec
from tests.fuzzing import damage, put_something

DTYPES = {"FP32": np.float32, "FP64": np.float64, "INT64": np.int64, "UINT8": np.uint8, "BOOL": np.bool_}
NUMBERS = [[0, 2, 1], [3, 5, 7]]
COMPACT, SPACED = (",", ":"), (", ", ": ")

Answer = tuple[bytes, bytes] | None
"""The header lines and the body; None if the request is refused."""


class Model(ServedModel):
    """A model whose answer shows what it was given."""

    def __init__(self, datatype: str, inputs: int = 1) -> None:
        dtype = np.dtype(DTYPES[datatype])
        self.inputs = tuple(
            TensorSpec(name, dtype, (-1, 3), values_below=200 if datatype == "INT64" else None)
            for name in ("x", "y")[:inputs]
        )
        outputs = [TensorSpec(OUTPUT, dtype, (-1, 3)), TensorSpec("last", dtype, (-1, 3))]
        signature = SimpleNamespace(outputs=outputs)
        self.version = "1"
        self.model = SimpleNamespace(labels_by_output={"logits": ["a"]}, engine=SimpleNamespace(signature=signature))  # type: ignore[assignment]

    def run(self, tensors: Tensors) -> Tensors:
        """Return the first input and the last."""
        *_, last = tensors.values()
        return {OUTPUT: tensors["x"], "last": last}


def read_whole(model: Model, body: bytes, accept_encoding: str = "") -> Answer:
    """Read a request and write its answer as ASGI's way does."""
    try:
        request = read_infer(body, {}, "m", None, model.inputs)
        model.check_request(request)
        given = build_response(request, "1", model.run(request.inputs), {OUTPUT: ["a"]})
        content, headers = write_infer(given, request, accept_encoding)
    except RequestError:
        return None
    lines = {**headers, "content-length": len(content)}
    return "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode(), content


def read_prepared(model: Model, requests: PreparedRequests, body: bytes, accept_encoding: str = "") -> Answer:
    """Read it with what is known of others."""
    try:
        known, tensors = requests.read(model, "m", body, {})
        return known.write(model.run(tensors), accept_encoding)
    except (RequestError, json.JSONDecodeError):
        return None


def request(datatype: str, data: object = NUMBERS, inputs: int = 1, **more: object) -> dict[str, Any]:
    """The JSON of a request of two rows."""
    head = {"shape": [2, 3], "datatype": datatype, "data": data}
    return {"inputs": [{"name": name, **head} for name in ("x", "y")[:inputs]], **more}


def with_data(body: dict[str, Any], *texts: str, separators: tuple[str, str] = COMPACT) -> bytes:
    """The bytes of a request with these texts as the data of its inputs."""
    for number, entry in enumerate(body["inputs"]):
        entry["data"] = f"<{number}>"
    written = json.dumps(body, separators=separators)
    for number, text in enumerate(texts):
        written = written.replace(f'"<{number}>"', text)
    return written.encode()


GOOD_DATA = ["[[0,2,1],[3,5,7]]", "[9,8,7,6,5,4]", "[ [1, 0, 0],\n [0, 0, 1] ]", "[0,0,0,0,0,0]"]
OTHER_DATA = [
    "[[0.5,-0.0,1e-3],[1E2,3.0,1e38]]", "[true,false,true,false,true,true]", "[[1,2,3],[true,5,6]]",
    "[0,1,0,1,0,false]", "[1e39,0,0,0,0,0]", "[0,0,0,0,0,-1e400]", "[NaN,0,0,0,0,0]", "[0,Infinity,0,0,0,0]",
    "[18446744073709551616,0,0,0,0,0]", "[9223372036854775808,0,0,0,0,0]", "[-1,0,0,0,0,0]", "[256,0,0,0,0,0]",
    "[199,200,1,1,1,1]", "[null,0,0,0,0,0]", '["1",0,0,0,0,0]', '["a]",0]', "[{},0,0,0,0,0]", "[]", "[[]]", "[[],[]]",
    "[[1,2,3],[4,5]]", "[[1,2,3],4,5,6]", "[1,2,3,[4,5,6]]", "[[1,2],[3,4],[5,6]]", "[[[1,2,3],[4,5,6]]]",
    "[[[1],[2],[3]],[[4],[5],[6]]]", "[1,2,3,4,5]", "[1,2,3,4,5,6,7]", "[1,2,3,4,5,6,]", "[1 2,3,4,5,6]",
    "[01,2,3,4,5,6]", "[1,2,3,4,5,6]]", "[[1,2,3,4,5,6]", "[1]2,[3]", "[1,2,3],[4,5,6]", "1", "null",
    '"[1,2,3,4,5,6]"', '[1,2,3,4,5,6],"data":[6,5,4,3,2,1]', "", "[1,2,3,4,5,6", "[é]", "[1,2,3,4,5,6}",
]  # fmt: skip
"""Good for some datatypes, and what is good for none."""


@pytest.mark.parametrize("separators", [COMPACT, SPACED])
@pytest.mark.parametrize("datatype", DTYPES)
def test_other_data_is_read_as_if_the_request_were_read_whole(datatype: str, separators: tuple[str, str]) -> None:
    for inputs in (1, 2):
        model, requests = Model(datatype, inputs), PreparedRequests()
        first = "[true,true,false,false,true,true]" if datatype == "BOOL" else GOOD_DATA[0]
        for text in [first, *GOOD_DATA, *OTHER_DATA, first]:
            for texts in ([first, text], [text, first]):
                body = with_data(request(datatype, inputs=inputs), *texts, separators=separators)
                assert read_prepared(model, requests, body) == read_whole(model, body), body
        assert read_whole(model, body)
        assert len(requests._prepared) < len(OTHER_DATA)


AROUND = {
    "nothing": request("FP32"),
    "an id": request("FP32", id="a"),
    "an id that looks like data": request("FP32", id='"data":[1,2,3,4,5,6]'),
    "an output": request("FP32", outputs=[{"name": "last"}]),
    "outputs in another order": request("FP32", outputs=[{"name": "last"}, {"name": OUTPUT}]),
    "bytes": request("FP32", parameters={"binary_data_output": True}),
    "bytes and JSON": request(
        "FP32", outputs=[{"name": "last", "parameters": {"binary_data": True}}, {"name": OUTPUT}]
    ),
    "classes": request("FP32", outputs=[{"name": OUTPUT, "parameters": {"classification": 2}}]),
    "a parameter that is called data": request("FP32", parameters={"data": 1}),
    "a priority": request("FP32", parameters={"priority": 1}),
    "another shape": {"inputs": [{"name": "x", "shape": [1, 6], "datatype": "FP32", "data": []}]},
    "another datatype": request("INT32"),
    "another name": {"inputs": [{"name": "z", "shape": [2, 3], "datatype": "FP32", "data": []}]},
    "data first": {"inputs": [{"data": [], "datatype": "FP32", "shape": [2, 3], "name": "x"}], "id": "]}"},
    "outputs first": {"outputs": [{"name": OUTPUT}], **request("FP32")},
    "too much": request("FP32", note="x" * 5000),
}
RAW = [
    b'{"inputs":[{"name":"x","shape":[2,3],"datatype":"FP32","data":[1,1,1,1,1,1],"data":%s}]}',
    b'{"inputs":[{"name":"x","shape":[2,3],"datatype":"FP32","data":%s,"data":[1,1,1,1,1,1]}]}',
    b'{"inputs":[{"data":%s}],"inputs":[{"name":"x","shape":[2,3],"datatype":"FP32","data":[1,1,1,1,1,1]}]}',
    b'{"x\\"data":%s,"inputs":[{"name":"x","shape":[2,3],"datatype":"FP32","data":[1,1,1,1,1,1]}]}',
    b'{"x":{"data":%s},"inputs":[{"name":"x","shape":[2,3],"datatype":"FP32","data":[1,1,1,1,1,1]}]}',
    b'{"id":"\\"data\\":%s","inputs":[{"name":"x","shape":[2,3],"datatype":"FP32","data":[1,1,1,1,1,1]}]}',
    b'{"inputs":[{"name":"x","shape":[2,3],"datatype":"FP32","d\\u0061ta":%s,"more":{"data":[1]}}]}',
    b'{"inputs":[{"name":"x","shape":[2,3],"datatype":"FP32","data" : %s}]}',
    b'\n{"inputs" : [ {"name":"x","shape":[2,3],"datatype":"FP32","data":\n%s\n} ] }\n',
    b'{"inputs":[{"name":"x","shape":%s,"datatype":"FP32","data":[1,1,1,1,1,1]}]}',
    b'{"inputs":[{"name":"x","shape":[2,3],"datatype":"FP32","data":0}],"y":%s}',
    b'{"inputs":[{"name":"x","shape":[2,3],"datatype":"FP32","data":0}]} %s',
    b'{"inputs":[{"name":"x","shape":[2,3],"datatype":"FP32","data" :%s}],"x":{"data":1}} ',
    b'%s',
]  # fmt: skip


def test_what_is_around_data_is_told_apart() -> None:
    """However the data is found: what looks like it is not taken for it."""
    model, requests = Model("FP32"), PreparedRequests()
    rng = random.Random(0)
    texts = [*GOOD_DATA, "[2,3]", "[2,3.0]", "[true,0,0,0,0,0]", '"data":[1]']
    bodies = [
        with_data(body, text, separators=by) for body in AROUND.values() for text in texts for by in (COMPACT, SPACED)
    ]
    bodies += [raw % text.encode() for raw in RAW for text in texts]
    for body in rng.sample(bodies * 3, len(bodies) * 3):
        assert read_prepared(model, requests, body) == read_whole(model, body), body


@pytest.mark.parametrize("datatype", ["FP32", "INT64"])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_sent(datatype: str, seed: int) -> None:
    model, requests, rng = Model(datatype, 2), PreparedRequests(), random.Random(seed)
    num_good = 0
    for body in _damaged(datatype, rng):
        expected = read_whole(model, body)
        num_good += expected is not None
        assert read_prepared(model, requests, body) == expected, body
    assert 100 < num_good < 1400


def _damaged(datatype: str, rng: random.Random) -> Iterator[bytes]:
    for _ in range(1500):
        flat = [rng.randrange(200) for _ in range(6)]
        data = flat if rng.random() < 0.5 else [flat[:3], flat[3:]]
        body = request(datatype, data, 2, **rng.choice([{}, {"id": "a"}, {"parameters": {"binary_data_output": True}}]))
        written = put_something(body, rng) if rng.random() < 0.7 else json.dumps(body, separators=COMPACT).encode()
        yield damage(written, rng) if rng.random() < 0.3 else written


def test_json_around_data_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: list[bytes] = []

    def note(body: bytes, *given: Any) -> Any:
        whole.append(body)
        return read_infer(body, *given)

    monkeypatch.setattr(prepared, "read_infer", note)
    model, requests = Model("FP32"), PreparedRequests()
    bodies = [with_data(request("FP32"), text, separators=by) for by in (COMPACT, SPACED) for text in GOOD_DATA]
    assert all(read_prepared(model, requests, body) for body in bodies)
    assert whole == [bodies[0], bodies[len(GOOD_DATA)]]


def test_a_large_answer_is_compressed_and_a_small_one_is_not() -> None:
    model, requests = Model("FP32"), PreparedRequests()
    for accept_encoding, rows in [("", 200), ("gzip", 200), ("gzip", 2), ("", 2), ("gzip", 2), ("gzip", 200)]:
        head = {"name": "x", "shape": [rows, 3], "datatype": "FP32", "data": [[0.1, 0.2, 0.3]] * rows}
        body = json.dumps({"inputs": [head]}).encode()
        said = read_prepared(model, requests, body, accept_encoding)
        assert said == read_whole(model, body, accept_encoding)
        assert said
        assert (b"gzip" in said[0]) == (rows == 200 and accept_encoding == "gzip")
