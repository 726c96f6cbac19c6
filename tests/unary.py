"""Unary calls that tests send."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as pb
from upath import UPath

from tests.calls import CHUNKED, call, chunks, exchange, head, prefixed, sized
from tests.engine_contract import exported, rows
from tests.helpers import wait_until
from tests.serving import Server, serving
from tests.toy import config, publish


def infer(count: int, model: str = "toy", **fields: Any) -> bytes:
    sent = pb.ModelInferRequest(model_name=model, **fields)
    for name, tensor in rows(count).items():
        sent.inputs.add(name=name, datatype="INT64", shape=tensor.shape)
        sent.raw_input_contents.append(tensor.tobytes())
    return bytes(sent.SerializeToString())


def logits(message: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(pb.ModelInferResponse.FromString(message).raw_output_contents[0], np.float32)


GOOD = infer(2)


def require_idle(server: Server) -> None:
    """Wait until nothing is left of earlier calls, and require an answer."""
    admission = server.fast_path.admission
    wait_until(lambda: not admission.ongoing and not admission._bytes)
    assert exchange(server.http, call(GOOD))[0].status == "0"


@contextmanager
def toy_server(storage: UPath) -> Iterator[Server]:
    """Serve a version of the model 'toy', which is published here."""
    publish(storage, exported())
    with serving() as started:
        started.run(started.endpoint.update(config(storage)))
        yield started


BODIES = {
    "a length": sized(prefixed(GOOD)),
    "a chunk": head(CHUNKED) + chunks(prefixed(GOOD)),
    "chunks of 1 byte": head(CHUNKED) + chunks(prefixed(GOOD), size=1),
    "an end with trailers": head(CHUNKED) + chunks(prefixed(GOOD))[:-2] + b"x: y\r\n\r\n",
    "gzip": head(CHUNKED, "grpc-encoding: gzip") + chunks(prefixed(gzip.compress(GOOD), is_compressed=True)),
    "deflate": sized(prefixed(zlib.compress(GOOD), is_compressed=True), "grpc-encoding: deflate"),
    "another content type of gRPC": call(GOOD, content_type="application/grpc+proto"),
    "a content type with a parameter": call(GOOD, content_type="application/grpc;charset=utf-8"),
    "names in capitals": call(GOOD).replace(b"content-type", b"Content-Type"),
}
