"""Whatever clients send over a socket: it is answered or refused, and the next one is answered rightly.

Once against the endpoint behind servers of our own, and once in a replica of Ray Serve, behind HAProxy.
"""

import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2 as pb

from app.ports import open_ports
from app.serving.protocol.rest import JSON_LENGTH
from app.serving.transport import asgi
from app.tensors import OUTPUT
from tests.engine_contract import rows
from tests.fuzzing import LENGTHS, NASTY, damage, put_something
from tests.helpers import CLUSTER, wait_until
from tests.hostile import GOOD, HEADERS, INFER, NO_HTTP, REQUESTS
from tests.launch import Cluster
from tests.tables import Faults
from tests.targets import Target, alone, calls, in_serve
from tests.toy import asked, body, expected, is_right
from tests.wire import Reply, exchange, message

TRIES = 200
CLIENTS, MANY = 8, 1024
NOT_SPOKEN = {501, 505}
REFUSED = {400, 404, 413, 503, 504}
GRPC_REFUSED = {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED"}


IN_SERVE = pytest.param("in serve", marks=pytest.mark.xdist_group(CLUSTER))


@pytest.fixture(scope="module", params=["alone", IN_SERVE])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("wire")
    with alone(folder) if request.param == "alone" else in_serve(request.getfixturevalue("cluster")) as target:
        yield target


@pytest.fixture(autouse=True)
def _unharmed(target: Target) -> Iterator[None]:
    """After every test, the replica is the same, answers rightly, and has nothing to complain of."""
    before, complaints = target.replicas(), target.log().count("Traceback")
    yield
    assert is_right(json.loads(exchange(target.http, message("POST", INFER, GOOD)).body), expected(rows(1)))
    assert target.replicas() == before
    assert target.log().count("Traceback") == complaints


def is_told(reply: Reply) -> bool:
    """Whether an error is told as the protocol wants it."""
    return reply.status == 200 or list(json.loads(reply.body)) == ["error"]


def test_every_bad_request_is_told_what_is_wrong(target: Target) -> None:
    seen = {name: exchange(target.http, sent) for name, (sent, _) in REQUESTS.items()}
    wrong = {name: reply for name, reply in seen.items() if reply.status not in REQUESTS[name][1] or not is_told(reply)}
    assert not wrong


def test_headers_are_taken_or_refused(target: Target) -> None:
    seen = {line: exchange(target.http, message("POST", INFER, GOOD, line)) for line in HEADERS}
    assert not {line: reply for line, reply in seen.items() if reply.status not in (200, 400)}


def test_what_is_no_http_breaks_nothing(target: Target) -> None:
    seen = {name: exchange(target.http, sent, whole=False) for name, sent in NO_HTTP.items()}
    assert not {name: reply for name, reply in seen.items() if reply.status >= 500 and reply.status not in NOT_SPOKEN}
    assert not {name: reply for name, reply in seen.items() if b"Traceback" in reply.body}


@pytest.mark.parametrize("sent", [0, 100])
def test_100_mb_are_refused_however_much_of_it_was_sent(target: Target, sent: int) -> None:
    head = message("POST", INFER, b"", f"Content-Length: {100 * 2**20}")
    reply = exchange(target.http, head, *[bytes(2**20)] * sent)
    assert reply.status == 413
    assert is_told(reply)


def test_a_slow_sender_is_answered(target: Target) -> None:
    sent = message("POST", INFER, GOOD)
    size = len(sent) // 20
    reply = exchange(target.http, *(sent[at : at + size] for at in range(0, len(sent), size)), pause_s=0.02)
    assert reply.status == 200


@pytest.mark.parametrize("target", ["alone"], indirect=True)
def test_a_sender_that_is_too_slow_is_not_waited_for(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "_RECEIVE_TIMEOUT_S", 0.1)
    reply = exchange(target.http, message("POST", INFER, GOOD, f"Content-Length: {len(GOOD) + 1}"))
    assert reply.status == 408
    assert is_told(reply)


def test_changed_requests_are_answered_or_refused_over_http(target: Target) -> None:
    rng = random.Random(1)
    statuses = []
    with httpx.Client(base_url=f"http://{target.http}") as client:
        for _ in range(TRIES):
            content, headers = changed(rng)
            reply = client.post(INFER, content=content, headers=headers)
            statuses.append(reply.status_code)
            assert reply.status_code in {200, *REFUSED}, (content[:2000], headers, reply.text)
            assert is_told(Reply(reply.status_code, reply.content))
    assert TRIES / 20 < statuses.count(200) < TRIES * 19 / 20


def changed(rng: random.Random) -> tuple[bytes, dict[str, str]]:
    """A request of which something is not as it should be, and its headers."""
    tensors = rows(rng.randint(1, 3), rng.choice([1, 8, 32]))
    given, data = body(tensors), b""
    if rng.random() < 0.5:
        for item in given["inputs"]:
            del item["data"]
            item["parameters"] = {"binary_data_size": tensors[item["name"]].nbytes}
            data += tensors[item["name"]].tobytes()
    if rng.random() < 0.3:
        given["outputs"] = [{"name": OUTPUT, "parameters": {"classification": rng.choice([1, 2**40])}}]
    head = put_something(given, rng)
    content = damage(head + data, rng) if rng.random() < 0.3 else head + data
    headers = {JSON_LENGTH: str(len(head))} if data or rng.random() < 0.1 else {}
    if rng.random() < 0.1:
        headers[JSON_LENGTH] = rng.choice(
            [length for length in LENGTHS if length.isascii() and length == length.strip()]
        )
    if rng.random() < 0.1:
        headers["content-encoding"] = rng.choice(["gzip", "deflate", "br", ",", ""])
    return content, headers


def test_natural_inputs_are_answered_or_refused(target: Target) -> None:
    texts: list[Any] = [*NASTY, "\0", "a" * 100_000, ["a"] * 1025, ["a", 1], "\u202e", {"inputs": "a"}]
    with httpx.Client(base_url=f"http://{target.http}") as client:
        for text in texts:
            content = json.dumps({"inputs": text}).encode(errors="surrogatepass")
            reply = client.post("/v1/models/toy/predict", content=content)
            assert reply.status_code in {200, *REFUSED}, (text, reply.text)
            assert is_told(Reply(reply.status_code, reply.content))


def begin_over_http(target: Target) -> Callable[[], None]:
    """Send what takes the replica seconds, and return what goes away from it."""
    inputs = asked(tritonclient.http, rows(MANY, 32))
    content, length = tritonclient.http.InferenceServerClient.generate_request_body(inputs)
    host, _, port = target.http.rpartition(":")
    clients = [socket.create_connection((host, int(port))) for _ in range(CLIENTS)]
    for client in clients:
        client.sendall(message("POST", INFER, content, f"{JSON_LENGTH}: {length}"))

    def leave() -> None:
        for client in clients:
            client.close()

    return leave


def begin_over_grpc(target: Target) -> Callable[[], None]:
    """The same."""
    client, inputs = tritonclient.grpc.InferenceServerClient(target.grpc), asked(tritonclient.grpc, rows(MANY, 32))
    running = [client.async_infer("toy", inputs, lambda result, error: None) for _ in range(CLIENTS)]

    def leave() -> None:
        for call in running:
            call.cancel()

    return leave


@pytest.mark.parametrize("target", [IN_SERVE], indirect=True)
def test_haproxy_is_on_loopback_only(target: Target, cluster: dict[str, str]) -> None:
    found = open_ports(Cluster(cluster).processes("/haproxy"))
    assert len(found) == 4, "HTTP, gRPC, metrics, statistics"
    assert all(item.is_loopback for item in found)


@pytest.mark.parametrize("target", [IN_SERVE], indirect=True)
def test_serve_sees_all_but_inference(target: Target) -> None:
    url, header = f"http://{target.http}", "x-request-id"
    assert header in httpx.get(f"{url}/v2").raise_for_status().headers, "Serve adds it"
    assert header not in httpx.post(f"{url}{INFER}", content=GOOD).raise_for_status().headers


@pytest.mark.parametrize("target", [IN_SERVE], indirect=True)
def test_serve_sees_streams_of_grpc_but_no_unary_calls(target: Target) -> None:
    """Serve adds an id to the trailers of calls that it sees. HAProxy sends unary calls to the HTTP listeners."""
    sent = infer_message().SerializeToString()
    with grpc.insecure_channel(target.grpc) as channel:
        unary = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer").future(sent)
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(iter([sent]))
        assert (unary.code().name, [bool(answer) for answer in stream]) == ("OK", [True])
        assert "request_id" in dict(stream.trailing_metadata())
        assert "request_id" not in dict(unary.trailing_metadata())


@pytest.mark.faults
@pytest.mark.parametrize("target", [IN_SERVE], indirect=True)
@pytest.mark.parametrize("how", ["disconnect over HTTP", "cancel over gRPC"])
def test_who_goes_away_is_not_run_and_frees_the_queue(target: Target, how: str, faults: Faults) -> None:
    with faults("S9", f"{CLIENTS} clients with {MANY} rows each {how}", "queue 0 in 1 s; most are not run") as fault:
        before = calls(target)
        leave = begin_over_http(target) if "HTTP" in how else begin_over_grpc(target)
        wait_until(lambda: calls(target) >= before + MANY / 2)
        leave()
        left_s, run = time.monotonic(), calls(target) - before
        assert exchange(target.http, message("POST", INFER, GOOD)).status == 200
        seconds, waiting = time.monotonic() - left_s, CLIENTS * MANY - run
        run_since = calls(target) - before - run
        fault.saw(f"queue 0 after {seconds:.2f} s, {run_since} of {waiting} waiting rows were run")
        assert seconds <= 1
        assert run_since < waiting / 4


def infer_message() -> pb.ModelInferRequest:
    sent = pb.ModelInferRequest(model_name="toy", id="1")
    for name, tensor in rows(2).items():
        sent.inputs.add(name=name, datatype="INT64", shape=tensor.shape)
        sent.raw_input_contents.append(tensor.tobytes())
    return sent


def changed_message(rng: random.Random) -> bytes:
    """A request of which something is not as it should be."""
    sent = infer_message()
    entry = rng.choice(sent.inputs)
    match rng.randrange(8):
        case 0:
            del sent.raw_input_contents[rng.randrange(2) :]
        case 1:
            sent.raw_input_contents[0] = sent.raw_input_contents[0][: rng.randrange(256)]
        case 2:
            entry.shape[:] = rng.choice([[], [-1], [2**62, 4], [0, 2**62], [1] * 100, [16, 2], [2, 15]])
        case 3:
            entry.datatype = rng.choice(["", "x", "BYTES", "FP32", "BF16"])
        case 4:
            entry.contents.int64_contents.extend([0, 1])
        case 5:
            sent.parameters["priority"].int64_param = -1
        case 6:
            return damage(sent.SerializeToString(), rng)
        case _:
            pass
    return bytes(sent.SerializeToString())


def code(call: Callable[..., Any], sent: bytes) -> str:
    answer = call.future(sent)
    assert "Traceback" not in str(answer.details())
    return str(answer.code().name)


def test_changed_requests_are_answered_or_refused_over_grpc(target: Target) -> None:
    rng = random.Random(2)
    with grpc.insecure_channel(target.grpc) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        codes = [code(infer, changed_message(rng)) for _ in range(TRIES)]
        assert set(codes) <= {"OK", *GRPC_REFUSED}
        assert TRIES / 20 < codes.count("OK") < TRIES * 19 / 20
        assert code(infer, b"\xff" * 20) == "INVALID_ARGUMENT"
        assert code(channel.unary_unary("/inference.GRPCInferenceService/ModelConfig"), b"\xff") == "INVALID_ARGUMENT"
        assert code(channel.unary_unary("/inference.GRPCInferenceService/Nothing"), b"") == "UNIMPLEMENTED"
        assert code(channel.unary_unary("/another.Service/ModelInfer"), b"") == "UNIMPLEMENTED"
    with grpc.insecure_channel(target.streams) as channel:
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        good = infer_message().SerializeToString()
        told = [pb.ModelStreamInferResponse.FromString(item) for item in stream(iter([good, b"\xff", good]))]
    assert [bool(item.error_message) for item in told] == [False, True, False]
    logits = np.frombuffer(told[2].infer_response.raw_output_contents[0], np.float32)
    assert np.allclose(logits, expected(rows(2)).ravel(), atol=1e-4)
