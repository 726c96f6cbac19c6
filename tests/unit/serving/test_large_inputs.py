"""Natural inputs that take long to read: limited, and abandoned once nobody waits for them."""

import base64
import io
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from PIL.WebPImagePlugin import WebPImageFile
from upath import UPath

from app.config import ImageConfig
from app.data.images import ImageProcessor
from app.data.records import RecordProcessor
from app.data.text import TextProcessor
from app.engines.base import Signature
from app.serving.config import DeployedModel
from app.tensors import OUTPUT, Tensors, TensorSpec
from tests import bombs
from tests.engine_contract import PROCESSOR, TEXTS
from tests.helpers import wait_until
from tests.serving import Server, serving
from tests.toy import LABELS, endpoint_config, publish_version, version_config
from tests.unary import toy_server
from tests.wire import exchange
from tests.wording import refused

PICTURES = ImageProcessor(ImageConfig(size=8, channels=1))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with toy_server(UPath(tmp_path_factory.mktemp("texts"))) as started:
        yield started


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with a model for pictures of 8 x 8 pixels."""
    storage = UPath(tmp_path_factory.mktemp("pictures"))
    outputs = (TensorSpec(OUTPUT, np.dtype(np.float32), (-1, 3)),)
    publish_version(storage, "eight", mean_of_pixels(), Signature(PICTURES.inputs, outputs), PICTURES, LABELS)
    with serving() as started:
        deployed = DeployedModel(production=version_config(storage, 1, "eight"))
        started.run(started.endpoint.update(endpoint_config(deployed)))
        yield f"http://{started.http}/v1/models/toy/predict"


def mean_of_pixels() -> bytes:
    given = helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["rows", 1, 8, 8])
    answer = helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["rows", 3])
    weights = numpy_helper.from_array(np.full((64, 3), 1 / 64, np.float32), "weights")
    nodes = [
        helper.make_node("Flatten", ["pixel_values"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weights"], [OUTPUT]),
    ]
    graph = helper.make_graph(nodes, "g", [given], [answer], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return bytes(model.SerializeToString())


def picture(edge: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (edge, edge)).save(buffer, "WEBP", lossless=True)
    return buffer.getvalue()


def test_a_picture_far_larger_than_the_model_reads_is_refused_before_it_is_decoded(
    pictures: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, load = list[tuple[int, int]](), WebPImageFile.load

    def noted(picture: WebPImageFile) -> Any:
        decoded.append(picture.size)
        return load(picture)

    monkeypatch.setattr(WebPImageFile, "load", noted)
    small = httpx.post(pictures, content=picture(1000), headers={"content-type": "image/webp"})
    assert small.status_code == 200
    large = httpx.post(pictures, content=picture(8192), headers={"content-type": "image/webp"}, timeout=60)
    assert large.status_code == 400
    assert "8192 x 8192 pixels: expected 1048576 at most for a model of 8 x 8" in large.json()["error"]
    assert set(decoded) == {(1000, 1000)}


def test_pictures_of_one_request_are_bounded_together(pictures: str) -> None:
    inputs = [base64.b64encode(picture(1000)).decode()] * 100
    refused = httpx.post(pictures, json={"inputs": inputs}, timeout=60)
    assert refused.status_code == 413
    assert "100 inputs have too many pixels together" in refused.json()["error"]
    assert httpx.post(pictures, json={"inputs": inputs[:60]}, timeout=60).status_code == 200


def test_a_record_weighs_what_its_pictures_do() -> None:
    records = RecordProcessor({"text": "text", "photo": "image"}, {"text": PROCESSOR, "photo": PICTURES})

    def record(edge: int) -> dict[str, str]:
        return {"text": "good", "photo": base64.b64encode(picture(edge)).decode()}

    assert records.weigh(record(1024)) == PICTURES.weigh(picture(1024)) == 1 / 64
    assert records.weigh({"text": "good"}) == 0
    with refused("image.too_large"):
        records.weigh(record(2000))


def texts() -> Iterator[str]:
    """Yield long texts of words, of spaces, of neither, and mixed."""
    rng = random.Random(0)
    words = [*" ".join(TEXTS).split(), "!", "?!", "x" * 40, "好", "é", "ﬁ"]
    for spaces in (" ", "   ", "\n", "", " " * 100):
        for count in (10, 100, 1000):
            yield spaces.join(rng.choices(words, k=count))
    yield from (" " * 5000 + "good", "a" * 5000, "good " * 20 + " " * 5000 + "bad", "")


@pytest.mark.parametrize("text", texts(), ids=lambda text: f"{len(text)}")
def test_what_is_left_of_a_long_text_are_the_tokens_of_the_whole(text: str) -> None:
    whole = PROCESSOR._tokenizer.encode(text)
    ids = PROCESSOR.encode([text])["input_ids"][0]
    assert ids[: len(whole.ids)].tolist() == whole.ids
    assert not ids[len(whole.ids) :].any(), "padding"
    assert PROCESSOR.offsets(text) == whole.offsets


def test_a_long_text_takes_no_longer_than_what_the_model_reads_of_it(server: Server) -> None:
    began_s = time.process_time()  # which no other process lengthens
    assert (
        exchange(server.http, bombs.squeezed(bombs.PREDICT, json.dumps({"inputs": "!" * 7 * 2**20}).encode())).status
        == 200
    )
    assert time.process_time() - began_s < 3.0, "the whole text takes 9 s"


Encode = Callable[[TextProcessor, Sequence[str]], Tensors]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, list[str]]]:
    """An event that the encoder awaits before each text "slow", and the texts that it has started."""
    may_go_on, begun = threading.Event(), list[str]()
    real: Encode = TextProcessor.encode

    def encode(self: TextProcessor, inputs: Sequence[str]) -> Tensors:
        begun.extend(inputs)
        if inputs[0] == "slow":
            may_go_on.wait(20)
        return real(self, inputs)

    monkeypatch.setattr(TextProcessor, "encode", encode)
    yield may_go_on, begun
    may_go_on.set()


def test_a_request_whose_time_passes_while_others_are_read_is_told_so_then(
    server: Server, encoded: tuple[threading.Event, list[str]]
) -> None:
    may_go_on, begun = encoded
    url = f"http://{server.http}{bombs.PREDICT}"
    first = threading.Thread(target=lambda: httpx.post(url, json={"inputs": "slow"}, timeout=60))
    first.start()
    wait_until(lambda: "slow" in begun)
    began_s = time.monotonic()
    late = httpx.post(url, json={"inputs": "good", "timeout_s": 0.1}, timeout=60)
    assert late.status_code == 504
    assert "the request's time was over before it was read" in late.json()["error"]
    assert time.monotonic() - began_s < 5
    may_go_on.set()
    first.join()
    assert "good" not in begun, "it is not read any more"


@pytest.mark.parametrize("path", [bombs.PREDICT, bombs.EMBEDDINGS])
def test_inputs_of_a_client_that_has_gone_are_not_read(
    server: Server, encoded: tuple[threading.Event, list[str]], path: str
) -> None:
    may_go_on, begun = encoded
    inputs = ["slow", *["good"] * 1000]
    content = json.dumps({"inputs": inputs} if path == bombs.PREDICT else {"model": "toy", "input": inputs}).encode()
    host, _, port = server.http.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        wait_until(lambda: "slow" in begun)
    (served,) = server.endpoint.models
    wait_until(lambda: not served._encoding)
    may_go_on.set()
    assert httpx.post(f"http://{server.http}{bombs.PREDICT}", json={"inputs": "bad"}).status_code == 200
    assert begun == ["slow", "bad"]
