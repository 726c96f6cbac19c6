"""Who the endpoint answers: over HTTP and gRPC, with the token and without it, from here and from elsewhere."""

import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from upath import UPath

from app.config import ServeConfig
from app.serving import access as auth
from app.serving.access import Access, Caller, access_of, is_loopback, make_token, read_token
from app.serving.config import EndpointConfig
from app.serving.transport import asgi
from tests import calls as sent_calls
from tests.calls import Line, ask, exchange
from tests.engine_contract import exported
from tests.plain import PLAIN
from tests.serving import Server, serving
from tests.toy import config, publish
from tests.wire import drip
from tests.wording import refused

TOKEN = "a" * 30 + "-._~+/=="
GIVEN = {"authorization": f"Bearer {TOKEN}"}
WRONG = [None, "", "Bearer", TOKEN, f"Bearer {TOKEN}a", f"Basic {TOKEN}", "Bearer \xe9"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One that asks for the token."""
    with serving() as started:
        started.run(started.endpoint.update(EndpointConfig(access=Access.by_token(TOKEN))))
        yield started


@pytest.fixture(params=["grpc", "streams"])
def calls(server: Server, request: pytest.FixtureRequest) -> Iterator[GRPCInferenceServiceStub]:
    """A stub for each of the two servers that answer unary calls."""
    with grpc.insecure_channel(getattr(server, request.param)) as channel:
        yield GRPCInferenceServiceStub(channel)


@pytest.fixture
def streams(server: Server) -> Iterator[GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server.streams) as channel:
        yield GRPCInferenceServiceStub(channel)


@pytest.mark.parametrize("given", WRONG)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2"),
        ("POST", "/v2/repository/index"),
        ("GET", "/v1/models"),
        ("GET", "/v1/predict"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/models/m/predict"),
        ("POST", "/v2/models/m/infer"),
        ("GET", "/v2/health/live/"),
        ("GET", "/nothing"),
    ],
)
def test_without_the_token_http_is_told_what_to_send(server: Server, method: str, path: str, given: str | None) -> None:
    headers = {} if given is None else {"authorization": given.encode("latin-1")}
    answer = httpx.request(method, f"http://{server.http}{path}", headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    said = answer.json()["error"]
    assert "send 'Authorization: Bearer TOKEN'" in (said["message"] if isinstance(said, dict) else said)
    assert isinstance(said, dict) == (path in ("/v1/models", "/v1/embeddings")), "OpenAI's paths have OpenAI's object"
    assert TOKEN not in answer.text


@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/v2/repository/index"])
@pytest.mark.parametrize("framing", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_a_body_that_drips_without_the_token_does_not_keep_its_connection(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, framing: str
) -> None:
    monkeypatch.setattr(asgi, "_REST_TIMEOUT_S", 0.1)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n{'3e8' if 'chunked' in framing else ''}\r\n".encode()
    assert drip(server.http, head, pause_s=0.02, patience_s=3).startswith(b"HTTP/1.1 401 ")


def test_a_body_without_the_token_is_not_asked_for(server: Server) -> None:
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\nExpect: 100-continue\r\n\r\n"
    assert drip(server.http, head, pause_s=0.5, patience_s=3).startswith(b"HTTP/1.1 401 ")


def test_a_whole_body_without_the_token_keeps_its_connection(server: Server) -> None:
    with httpx.Client(base_url=f"http://{server.http}") as client:
        refused = [client.post("/v2/models/m/infer", content=bytes(size)) for size in (10, 2**22)]
    assert [answer.status_code for answer in refused] == [401, 401]
    assert not any("connection" in answer.headers for answer in refused)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_with_the_token_http_answers(server: Server, scheme: str) -> None:
    client = httpx.Client(base_url=f"http://{server.http}", headers={"Authorization": f"{scheme} {TOKEN}"})
    assert client.get("/v2").json()["name"] == "rayloom"
    assert client.post("/v2/models/m/infer").status_code == 404
    assert client.get("/v1/predict").json() == []
    assert client.get("/v1/models").json() == {"object": "list", "data": []}


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/", "/docs", "/openapi.json"])
def test_health_and_pages_without_data_are_open(server: Server, path: str) -> None:
    assert httpx.get(f"http://{server.http}{path}").status_code == 200


def test_the_scripts_of_the_description_are_open_and_nothing_beside_them(server: Server) -> None:
    def status(path: str) -> int:
        return httpx.get(f"http://{server.http}{path}").status_code

    assert status("/docs/assets/swagger-ui-bundle.js") == 200
    assert status("/docs/assets//v2/models") == 404
    assert {status(path) for path in ("/docs/assets", "/docs/assetsx", "/docs/oauth2-redirect", "/v1/models")} == {401}


def test_the_described_api_asks_for_the_token_where_the_endpoint_does(server: Server) -> None:
    def locked() -> dict[str, bool]:
        paths = httpx.get(f"http://{server.http}/openapi.json").json()["paths"]
        return {path: "security" in operation for path, methods in paths.items() for operation in methods.values()}

    described = httpx.get(f"http://{server.http}/openapi.json").json()
    assert described["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    assert len(locked()) > 10
    assert {path for path, is_locked in locked().items() if not is_locked} == {"/v2/health/live", "/v2/health/ready"}
    asking = server.endpoint.config
    server.run(server.endpoint.update(EndpointConfig()))
    try:
        assert not any(locked().values())
        assert "securitySchemes" not in httpx.get(f"http://{server.http}/openapi.json").json()["components"]
    finally:
        server.run(server.endpoint.update(asking))


@pytest.mark.parametrize("given", [None, *filter(str.isascii, filter(None, WRONG))])
def test_without_the_token_grpc_is_told_what_to_send(
    calls: GRPCInferenceServiceStub, streams: GRPCInferenceServiceStub, given: str | None
) -> None:
    metadata = [] if given is None else [("authorization", given)]
    for call in (
        lambda: calls.ServerMetadata(pb.ServerMetadataRequest(), metadata=metadata),
        lambda: calls.RepositoryIndex(pb.RepositoryIndexRequest(), metadata=metadata),
        lambda: calls.ModelInfer(pb.ModelInferRequest(model_name="m"), metadata=metadata),
        lambda: list(streams.ModelStreamInfer(iter([pb.ModelInferRequest(model_name="m")]), metadata=metadata)),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert "send 'Authorization: Bearer TOKEN'" in refused.value.details()
        assert TOKEN not in refused.value.details()


@pytest.mark.parametrize("values", [(TOKEN, TOKEN), (TOKEN, "x"), ("x", TOKEN)])
def test_of_two_tokens_none_counts(server: Server, values: tuple[str, str]) -> None:
    shown = [("authorization", f"Bearer {value}") for value in values]
    lines = "".join(f"{name}: {value}\r\n" for name, value in shown)
    for path in ("/v2", "/v2/models/m/infer", "/v1/models/m/predict"):
        sent = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n{lines}\r\n{{}}".encode()
        assert [answer.http for answer in exchange(server.http, sent)] == [401]
    for address in (server.grpc, server.streams):
        refused = ask(address, b"", "ServerMetadata", shown)
        assert refused.code == "UNAUTHENTICATED"
        assert "Authorization has several values" in refused.details


LOCAL = ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "127.1.2.3"]
ELSEWHERE = ["evil.example:8000", "10.0.0.7", "localhost.evil.example", "0.0.0.0:8000", "[::", "127.0.0.1@evil.example"]


@pytest.fixture(scope="module")
def local() -> Iterator[Server]:
    """A server that answers only this machine."""
    with serving() as started:
        started.run(started.endpoint.update(EndpointConfig(access=Access(only_local=True))))
        yield started


@pytest.mark.parametrize(
    ("lines", "is_answered"),
    [
        *(([f"Host: {host}"], True) for host in LOCAL),
        *(([f"Host: {host}"], False) for host in ELSEWHERE),
        (["Host: localhost", "Origin: http://localhost:3000"], True),
        (["Host: localhost", "Origin: https://evil.example"], False),
        (["Host: localhost", "Origin: null"], False),
    ],
)
def test_without_a_token_a_request_is_for_this_machine_and_from_no_other_sites_page(
    local: Server, lines: list[str], is_answered: bool
) -> None:
    """A page can reach an endpoint on loopback by a name that points there, and can send a POST to its address."""
    head = "".join(f"{line}\r\n" for line in lines)
    for path, found in (("/v2/repository/index", 200), ("/v2/models/m/infer", 404), ("/v1/models/m/predict", 404)):
        sent = f"POST {path} HTTP/1.1\r\n{head}Content-Length: 2\r\n\r\n{{}}".encode()
        (answer,) = exchange(local.http, sent)
        assert answer.http == (found if is_answered else 401), answer.content
    sent = sent_calls.call(b"", method="ServerMetadata").replace(b"host: x\r\n", head.encode())
    assert [answer.status for answer in exchange(local.http, sent)] == ["0" if is_answered else "16"]


def test_a_plain_request_of_another_sites_page_is_refused_though_the_same_was_answered(
    local: Server, tmp_path: Path
) -> None:
    publish(UPath(tmp_path), exported())
    toy = config(UPath(tmp_path)).model_copy(update={"access": Access(only_local=True)})
    local.run(local.endpoint.update(toy))
    plain = PLAIN["bytes"].replace(b"Host: x", b"Host: localhost")
    foreign = plain.replace(b"Host: localhost", b"Host: localhost\r\nOrigin: http://evil.example")
    sent = [plain, foreign, plain.replace(b"localhost", b"evil.example"), plain]
    with Line(local.http) as line:
        line.send(*sent, pause_s=0.1)
        assert [answer.http for answer in line.read(len(sent))] == [200, 401, 401, 200]
    assert local.fast_path.answered == 2


def test_with_the_token_tritons_grpc_client_is_answered(server: Server) -> None:
    client = tritonclient.grpc.InferenceServerClient(server.grpc)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.get_server_metadata(headers=GIVEN).name == "rayloom"
    assert not client.is_model_ready("m", headers=GIVEN)


def test_a_stream_with_the_token_is_answered(streams: GRPCInferenceServiceStub) -> None:
    asked = iter([pb.ModelInferRequest(model_name="m")])
    (answer,) = streams.ModelStreamInfer(asked, metadata=list(GIVEN.items()))
    assert "'m' is not deployed" in answer.error_message


def test_what_ray_is_told_holds_no_token() -> None:
    told = EndpointConfig(access=Access.by_token(TOKEN))
    assert TOKEN not in told.model_dump_json()
    EndpointConfig.model_validate_json(told.model_dump_json()).access.check(Caller(f"Bearer {TOKEN}"))


@pytest.mark.parametrize(
    ("peer", "is_local"),
    [
        ("ipv4:127.0.0.1:40000", True),
        ("ipv6:%5B::1%5D:40000", True),
        ("ipv6:[::ffff:127.0.0.1]:40000", True),
        ("unix:/tmp/socket", True),
        ("ipv4:10.0.0.7:40000", False),
        ("ipv6:%5Bfe80::1%5D:40000", False),
        ("", False),
    ],
)
def test_without_a_token_a_call_comes_from_this_machine(peer: str, is_local: bool) -> None:
    Access().check_peer(peer)
    local = Access(only_local=True)
    if is_local:
        local.check_peer(peer)
    else:
        with refused("unauthorized"):
            local.check_peer(peer)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False), ("example", False)],
)
def test_loopback_is_this_machine_only(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_a_token_is_asked_for_where_others_reach_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "home/endpoint_token"
    monkeypatch.setattr(auth, "ENDPOINT_TOKEN_FILE", made)
    assert access_of(ServeConfig(), Access()) == Access(only_local=True)
    assert not made.exists()
    elsewhere = access_of(ServeConfig(host="0.0.0.0"), Access())
    assert elsewhere == Access.by_token(read_token(made))
    assert access_of(ServeConfig(auth="token"), Access()) == elsewhere
    assert access_of(ServeConfig(), elsewhere) == elsewhere  # the recipe of another model does not open it
    assert access_of(ServeConfig(host="0.0.0.0", auth="none"), elsewhere) == Access()
    own = tmp_path / "own"
    own.write_text(f"{TOKEN}\n", encoding="utf-8")
    own.chmod(0o600)
    assert access_of(ServeConfig(token_file=str(own)), Access()) == Access.by_token(TOKEN)


def test_a_token_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "home" / "token"
    token = make_token(file)
    assert make_token(file) == token
    assert len(token) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    assert os.listdir(file.parent) == ["token"]


@pytest.mark.parametrize(
    ("content", "mode", "rule"),
    [
        (TOKEN.encode(), 0o640, "token.mode"),
        (b"short", 0o600, "token.missing"),
        (b"\xff" * 40, 0o600, "file.unreadable"),
        (None, 0o600, "file.unreadable"),
    ],
)
def test_a_file_that_keeps_no_token_is_refused(tmp_path: Path, content: bytes | None, mode: int, rule: str) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
        file.chmod(mode)
    with refused(rule) as error:
        read_token(file)
    assert TOKEN not in str(error.value)
