"""Plain HTTP requests for tests, and their replies."""

import http.client
import json
import socket
import time
from collections.abc import Sequence

import tritonclient.http

from app.serving.protocol.rest import JSON_LENGTH
from app.tensors import OUTPUT, Tensors
from tests.engine_contract import rows
from tests.serving import Server
from tests.toy import asked, body

INFER = "/v2/models/toy/infer"
COLD = b"GET /v2/models/toy HTTP/1.1\r\nHost: x\r\n\r\n"


def post(content: bytes, *lines: str, path: str = INFER) -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(content)}", *lines, "", ""]
    return "\r\n".join(head).encode("latin-1") + content


def binary(tensors: Tensors, *lines: str, path: str = INFER, wants_bytes: bool = True, **options: object) -> bytes:
    wanted = [tritonclient.http.InferRequestedOutput(OUTPUT, binary_data=wants_bytes)]
    content, length = tritonclient.http.InferenceServerClient.generate_request_body(
        asked(tritonclient.http, tensors), outputs=wanted, **options
    )
    return post(content, f"{JSON_LENGTH}: {length}", *lines, path=path)


def listed(tensors: Tensors, *lines: str, path: str = INFER, **parameters: object) -> bytes:
    return post(json.dumps(body(tensors, **parameters)).encode(), *lines, path=path)


def _nested(tensors: Tensors) -> bytes:
    entries = [{**entry, "data": tensors[entry["name"]].tolist()} for entry in body(tensors)["inputs"]]
    return json.dumps({"inputs": entries}, separators=(",", ":")).encode()


PLAIN = {
    "bytes": binary(rows(1)),
    "other bytes with the same JSON": binary({name: tensor[:, ::-1] for name, tensor in rows(1).items()}),
    "bytes of three rows": binary(rows(3)),
    "more rows than a call": binary(rows(20)),
    "bytes in, JSON out": binary(rows(2), wants_bytes=False),
    "an id": binary(rows(2), request_id="a7"),
    "a version": binary(rows(2), path="/v2/models/toy/versions/1/infer"),
    "a priority": binary(rows(2), priority=1),
    "classes": post(
        json.dumps({**body(rows(2)), "outputs": [{"name": OUTPUT, "parameters": {"classification": 2}}]}).encode()
    ),
    "JSON": listed(rows(2)),
    "JSON with other numbers": listed({name: tensor[::-1] for name, tensor in rows(2).items()}),
    "JSON of another shape": listed(rows(3)),
    "JSON with an id": post(json.dumps({**body(rows(2)), "id": '"data": [1]'}).encode()),
    "nested JSON": post(_nested(rows(2))),
    "JSON in, bytes out": listed(rows(2), binary_data_output=True),
    "an answer to compress": listed(rows(200, 8), "Accept-Encoding: gzip, deflate"),
    "nothing to compress": binary(rows(1), "Accept-Encoding: gzip, deflate"),
    "a trace": binary(rows(1), "Traceparent: 00-1-2-01", "X-QueuedRequest-ID: 1"),
    "another trace": binary(rows(1), "Traceparent: 00-3-4-01", "X-QueuedRequest-ID: \xff"),
}


def converse(server: Server, parts: Sequence[bytes], replies: int, pause_s: float = 0.002) -> list[bytes]:
    """Send the parts, and return so many replies without their dates, fewer if the server closes before."""
    host, _, port = server.http.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            try:
                connection.sendall(part)
            except OSError:  # it has said all that it wants to
                break
            time.sleep(pause_s)
        return [reply for reply in (read_reply(connection) for _ in range(replies)) if reply]


def read_reply(connection: socket.socket) -> bytes:
    response = http.client.HTTPResponse(connection)
    stream = response.fp = connection.makefile("rb", buffering=0)
    try:
        lines = []
        while (line := stream.readline()) not in (b"\r\n", b""):
            lines.append(line)
    except ConnectionError:
        return b""
    length = sum(int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:"))
    content = b""
    while len(content) < length and (more := stream.read(length - len(content))):
        content += more
    return b"".join(line for line in lines if not line.startswith(b"date:")) + b"\r\n" + content
