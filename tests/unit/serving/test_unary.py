"""Unary calls over the fast path: answers, as the gRPC server gives them."""

import gzip
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2 as pb
from upath import UPath

from app.serving.protocol.grpc import read_infer
from app.serving.protocol.infer import InferRequest
from app.serving.transport import fast_http, prepared
from app.serving.transport.fast_grpc import GrpcConnection
from app.serving.transport.prepared import PreparedMessages
from app.telemetry.catalog import RECEIVED_BYTES
from app.tensors import OUTPUT
from tests.calls import SERVICE, Line, ask, call, exchange, prefixed, sized
from tests.engine_contract import rows
from tests.serving import Server, serving
from tests.toy import answering, asked, config, expected, publish
from tests.unary import BODIES, GOOD, infer, logits, require_idle, toy_server


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> UPath:
    return UPath(tmp_path_factory.mktemp("unary"))


@pytest.fixture(scope="module")
def server(storage: UPath) -> Iterator[Server]:
    with toy_server(storage) as started:
        yield started


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the first bytes of requests to be joined, however busy this machine is."""
    monkeypatch.setattr(fast_http, "_GATHER_S", 60)


@pytest.fixture(autouse=True)
def _nothing_stays(server: Server) -> Iterator[None]:
    yield
    require_idle(server)


def listed() -> bytes:
    sent = pb.ModelInferRequest(model_name="toy")
    for name, tensor in rows(2).items():
        entry = sent.inputs.add(name=name, datatype="INT64", shape=tensor.shape)
        entry.contents.int64_contents.extend(tensor.ravel().tolist())
    return bytes(sent.SerializeToString())


CALLS: dict[str, dict[str, Any]] = {
    "one row": {"content": infer(1)},
    "an id": {"content": infer(3, id="a7")},
    "a version": {"content": infer(1, model_version="1")},
    "more rows than a call": {"content": infer(20)},
    "a message of many frames": {"content": infer(3000)},
    "listed elements": {"content": listed()},
    "gzip": {"content": GOOD, "compression": grpc.Compression.Gzip},
    "deflate": {"content": GOOD, "compression": grpc.Compression.Deflate},
    "a trace": {"content": GOOD, "metadata": [("traceparent", "00-1-2-01"), ("x-bin", b"\xff\0"), ("x", "1")]},
    "time enough": {"content": GOOD, "timeout_s": 100},
    "ServerLive": {"content": b"", "method": "ServerLive"},
    "ServerMetadata": {"content": b"", "method": "ServerMetadata"},
    "ModelReady": {"content": pb.ModelReadyRequest(name="toy").SerializeToString(), "method": "ModelReady"},
    "ModelMetadata": {"content": pb.ModelMetadataRequest(name="toy").SerializeToString(), "method": "ModelMetadata"},
    "ModelConfig": {"content": pb.ModelConfigRequest(name="toy").SerializeToString(), "method": "ModelConfig"},
    "RepositoryIndex": {"content": b"", "method": "RepositoryIndex"},
    "no such model": {"content": infer(1, model="é%\n")},
    "no such version": {"content": infer(1, model_version="9")},
    "another datatype": {"content": GOOD.replace(b"INT64", b"INT32")},
    "no request": {"content": b""},
    "not a message": {"content": b"\xff" * 20},
    "not a message of another method": {"content": b"\xff", "method": "ModelConfig"},
    "not spoken": {"content": b"", "method": "SystemSharedMemoryStatus"},
    "no such method": {"content": GOOD, "method": "Nothing"},
    "another service": {"content": GOOD, "method": "/a.B/ModelInfer"},
    "a message too large": {"content": bytes(65 * 2**20)},
}

_WORDED_BY_GRPC = {"no such method", "a message too large"}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gets_the_answer_of_the_grpc_server(server: Server, name: str) -> None:
    before = server.fast_path.grpc.answered
    here, there = (ask(address, **CALLS[name]) for address in (server.grpc, server.streams))
    assert here.code == there.code
    if name not in _WORDED_BY_GRPC:
        assert here == there
    assert server.fast_path.grpc.answered - before == (name != "another service")


@pytest.mark.parametrize("size", [1, 7, 10**6])
@pytest.mark.parametrize("name", BODIES)
def test_a_call_may_come_in_any_pieces(server: Server, name: str, size: int) -> None:
    sent = BODIES[name]
    parts = [sent[at : at + size] for at in range(0, len(sent), size)]
    (answer,) = exchange(server.http, *parts)
    assert (answer.http, answer.status, answer.lines["content-type"]) == (200, "0", "application/grpc")
    assert answer.content == prefixed(ask(server.streams, GOOD).content)


def test_calls_follow_each_other_on_a_connection(server: Server) -> None:
    with Line(server.http) as line:
        for count in range(1, 5):
            line.send(call(infer(count), f"grpc-timeout: {count}00S"))
            answer = line.read(count)[-1]
            assert np.allclose(logits(answer.content[5:]), expected(rows(count)).ravel(), atol=1e-4)


def test_a_real_client_sends_and_receives_large_messages(server: Server) -> None:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(server.grpc, options=options) as channel:
        model_infer = channel.unary_unary(f"{SERVICE}ModelInfer")
        codes = [model_infer.future(bytes([255]) * (size * 2**20)).code().name for size in (1, 40, 65)]
    assert codes == ["INVALID_ARGUMENT", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"]
    client = tritonclient.grpc.InferenceServerClient(server.grpc)
    result = client.infer("toy", asked(tritonclient.grpc, rows(1024, 32)), compression_algorithm="gzip")
    assert np.allclose(result.as_numpy(OUTPUT), expected(rows(1024, 32)), atol=1e-4)


def test_a_message_is_read_once_whatever_its_tensors_and_id(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []

    def note(message: Any, *others: Any) -> InferRequest:
        read.append(message)
        return read_infer(message, *others)

    monkeypatch.setattr(prepared, "read_message", note)
    sent = []
    for number in range(8):
        message = pb.ModelInferRequest.FromString(infer(7, id="" if number < 4 else str(number)))
        tensors = [tensor[:, :: -1 if number % 2 else 1].tobytes() for tensor in rows(7).values()]
        message.raw_input_contents[:] = tensors
        sent.append(message.SerializeToString())
    for content in sent:
        assert ask(server.grpc, content) == ask(server.streams, content)
    assert len(read) == 1
    message.raw_input_contents[:] = [tensors[0] + tensors[1][:8], tensors[1][8:]]
    moved = exchange(server.http, call(message.SerializeToString()))
    assert moved[0].status == "3", "the same total size, but one tensor has too many bytes"


def test_a_new_version_answers_at_once(storage: UPath) -> None:
    publish(storage, answering(1))
    with serving() as server:
        for version in (1, 2, 1):
            server.run(server.endpoint.update(config(storage, version)))
            answer = ask(server.grpc, GOOD).content
            assert pb.ModelInferResponse.FromString(answer).model_version == str(version)
        assert server.fast_path.grpc.inferred == 3


def test_haproxy_sends_a_call_again_if_its_replica_has_gone(server: Server) -> None:
    """The replica closes an idle connection while HAProxy sends a call over it."""
    open_ones = server.listener.server_state.connections
    with grpc.insecure_channel(server.grpc) as channel:
        model_infer = channel.unary_unary(f"{SERVICE}ModelInfer")
        for _ in range(20):
            assert model_infer(GOOD)
            for connection in [connection for connection in open_ones if isinstance(connection, GrpcConnection)]:
                server.loop.call_soon_threadsafe(connection.shutdown)


def test_a_large_message_is_not_taken_apart(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "_MAX_WHOLE_BYTES", len(infer(2, id="a")))
    for count, kept_id, num_known in ((3, "a", 0), (2, "", 1)):
        content, calls = infer(count, id="a"), PreparedMessages()
        message = pb.ModelInferRequest.FromString(content)
        known, tensors = calls.read(server.endpoint.find("toy"), message, len(content))
        assert known.prepared.rows == count
        assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
            name: tensor.tolist() for name, tensor in rows(count).items()
        }
        assert (message.id, len(calls._known)) == (kept_id, num_known)
        assert exchange(server.http, call(content))[0].status == "0"


def test_received_bytes_are_counted_as_they_were_sent(server: Server) -> None:
    def received() -> float:
        samples = server.endpoint.traffic.samples()
        return sum(sample.value for sample in samples if (sample.metric, sample.labels[2]) == (RECEIVED_BYTES, "grpc"))

    # The second has an id, so its response is no template; the third is not plain, because it is large.
    sent = received()
    for message in (GOOD, infer(2, id="a"), infer(2, id="a" * 100_000)):
        packed = gzip.compress(message)
        (answer,) = exchange(server.http, sized(prefixed(message)))
        (packed_answer,) = exchange(server.http, sized(prefixed(packed, is_compressed=True), "grpc-encoding: gzip"))
        assert (answer.status, packed_answer.status) == ("0", "0")
        sent += len(message) + len(packed)
        assert received() == sent
