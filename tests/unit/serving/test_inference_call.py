"""A request for inference is admitted, counted and refused alike, however it comes."""

import http.client
from collections.abc import Callable, Iterator

import grpc
import pytest
from upath import UPath

from app.serving.access import Access
from app.telemetry.catalog import REQUESTS
from tests.calls import CHUNKED, Line, chunks, head, prefixed
from tests.engine_contract import exported
from tests.helpers import wait_until
from tests.plain import INFER, PLAIN
from tests.serving import Server, serving
from tests.toy import config, publish
from tests.unary import GOOD, infer

TOKEN = "open sesame"
CONTENT = PLAIN["JSON"].partition(b"\r\n\r\n")[2]
SERVICE = "/inference.GRPCInferenceService"


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> UPath:
    folder = UPath(tmp_path_factory.mktemp("toy"))
    publish(folder, exported())
    return folder


@pytest.fixture
def server(storage: UPath) -> Iterator[Server]:
    with serving() as started:
        access = Access.by_token(TOKEN)
        started.run(started.endpoint.update(config(storage).model_copy(update={"access": access})))
        yield started


def post(server: Server, path: str, content: bytes, token: str, *lines: tuple[str, str]) -> None:
    client = http.client.HTTPConnection(server.http, timeout=60)
    client.request("POST", path, content, {"Authorization": f"Bearer {token}", **dict(lines)})
    client.getresponse().read()
    client.close()


def plain(server: Server, model: str, is_broken: bool, token: str) -> None:
    post(server, INFER.replace("toy", model), b"{" if is_broken else CONTENT, token)


def by_asgi(server: Server, model: str, is_broken: bool, token: str) -> None:
    line = "Content-Encoding", "identity"
    post(server, INFER.replace("toy", model), b"{" if is_broken else CONTENT, token, line)


def predict(server: Server, model: str, is_broken: bool, token: str) -> None:
    post(server, f"/v1/models/{model}/predict", b"{" if is_broken else b'{"inputs": "fine"}', token)


def _message(model: str, is_broken: bool) -> bytes:
    return b"\xff" * 20 if is_broken else infer(2, model=model)


def _unary(address: str, model: str, is_broken: bool, token: str) -> None:
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(f"{SERVICE}/ModelInfer").future(
            _message(model, is_broken), metadata=[("authorization", f"Bearer {token}")]
        )
        call.exception(timeout=60)


def unary(server: Server, model: str, is_broken: bool, token: str) -> None:
    _unary(server.grpc, model, is_broken, token)


def by_grpc_server(server: Server, model: str, is_broken: bool, token: str) -> None:
    _unary(server.streams, model, is_broken, token)


def stream(server: Server, model: str, is_broken: bool, token: str) -> None:
    with grpc.insecure_channel(server.streams) as channel:
        answers = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(
            iter([_message(model, is_broken)]), metadata=[("authorization", f"Bearer {token}")]
        )
        try:
            list(answers)
        except grpc.RpcError:
            assert answers.code() is grpc.StatusCode.UNAUTHENTICATED


PATHS = [
    (plain, "http"), (by_asgi, "http"), (predict, "natural"), (unary, "grpc"), (by_grpc_server, "grpc"),
    (stream, "grpc"),
]  # fmt: skip
CASES = {
    "ok": ("toy", False, TOKEN, ("toy", "1")),
    "unauthorized": ("toy", False, "another", ("", "")),
    "not_served": ("zz", False, TOKEN, ("", "")),
    "invalid": ("toy", True, TOKEN, None),
    "overload": ("toy", False, TOKEN, ("", "")),
}


def counted(server: Server) -> dict[tuple[str, ...], float]:
    return {sample.labels: sample.value for sample in server.endpoint.traffic.samples() if sample.metric is REQUESTS}


@pytest.mark.parametrize("outcome", CASES)
@pytest.mark.parametrize(("send", "protocol"), PATHS, ids=[send.__name__ for send, _ in PATHS])
def test_each_path_counts_an_outcome_once(
    server: Server, send: Callable[[Server, str, bool, str], None], protocol: str, outcome: str
) -> None:
    admission = server.fast_path.admission
    if outcome == "overload":
        admission._room_bytes = 10
    model, is_broken, token, labels = CASES[outcome]
    send(server, model, is_broken, token)
    ((*found, by, ended), times) = next(iter(counted(server).items()))
    assert (by, ended, times, len(counted(server))) == (protocol, outcome, 1, 1)
    assert labels is None or tuple(found) == labels
    traffic = server.endpoint.traffic
    assert [traffic.take_new(), traffic.take_new()] == [bool(found[0]), 0], "only those for a model, once"
    wait_until(lambda: not admission.ongoing and not admission._bytes)


HALF = {
    "http": b"POST /v2/models/toy/infer HTTP/1.1\r\nHost: x\r\nX: 1\r\nX: 2\r\nAuthorization: Bearer %s\r\n"
    b"Content-Length: 500\r\n\r\n{" % TOKEN.encode(),
    "grpc": head(CHUNKED, f"authorization: Bearer {TOKEN}") + chunks(prefixed(GOOD)[:-1], end=False),
}


@pytest.mark.parametrize("protocol", HALF)
def test_a_client_that_goes_away_before_its_body_ends_has_given_up(server: Server, protocol: str) -> None:
    with Line(server.http) as line:
        line.send(HALF[protocol])
        wait_until(lambda: len(server.fast_path.admission.awaited) == 1)
    wait_until(lambda: counted(server) == {("", "", protocol, "cancelled"): 1})


def test_a_call_whose_time_is_over_before_its_message_ends_is_late(server: Server) -> None:
    with Line(server.http) as line:
        line.send(head(CHUNKED, f"authorization: Bearer {TOKEN}", "grpc-timeout: 50m"), prefixed(GOOD)[:0])
        assert line.read(1)[0].status == "4"
    assert counted(server) == {("", "", "grpc", "deadline"): 1}
