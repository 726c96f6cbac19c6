"""Requests that are wrong in a way of their own, as bytes, to a server that serves the model 'toy'."""

import json
import random
import zlib

from app.serving.protocol.rest import JSON_LENGTH
from tests.engine_contract import rows
from tests.fuzzing import LENGTHS
from tests.toy import body
from tests.wire import message

INFER = "/v2/models/toy/infer"
GOOD = json.dumps(body(rows(1))).encode()
"""The body of a request that is as it should be."""

_TRAVERSALS = [
    "..", "../..", "%2e%2e", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "..%5c..", "%00", "%ff", "%", "toy%2f", "a" * 9000
]  # fmt: skip


def infer(content: bytes, *lines: str) -> bytes:
    return message("POST", INFER, content, *lines)


def _gzip(content: bytes) -> bytes:
    return zlib.compress(content, 9, 31)


def _with_token(token: int) -> bytes:
    tensors = {name: array.copy() for name, array in rows(1).items()}
    tensors["input_ids"][0, 0] = token
    return json.dumps(body(tensors)).encode()


REQUESTS: dict[str, tuple[bytes, set[int]]] = {
    **{
        f"{JSON_LENGTH} {length[:10]!r}": (infer(GOOD, f"{JSON_LENGTH}: {length}"), {400})
        for length in [*LENGTHS, str(len(GOOD) + 1)]
    },
    "JSON 120 levels deep": (infer(b'{"inputs":' + b"[" * 120 + b"]" * 120 + b"}"), {400}),
    "JSON 250,000 levels deep": (infer(b"[" * 250_000 + b"]" * 250_000), {400}),
    "texts 250,000 levels deep": (message("POST", "/v1/models/toy/predict", b'{"inputs":' + b"[" * 250_000), {400}),
    "index 250,000 levels deep": (message("POST", "/v2/repository/index", b"[" * 250_000), {400}),
    "NaN": (infer(GOOD.replace(b'"data": [', b'"data": [NaN, ')), {400}),
    "Infinity": (infer(GOOD.replace(b'"data": [', b'"data": [-Infinity, ')), {400}),
    "not UTF-8": (infer(GOOD.replace(b"input_ids", b"input_\xff")), {400}),
    "no body": (infer(b""), {400}),
    "a token that there is not": (infer(_with_token(10**6)), {400}),
    "more rows than are taken": (infer(json.dumps(body(rows(1025, 1))).encode()), {400}),
    "a gzip bomb": (infer(_gzip(bytes(100 * 2**20)), "Content-Encoding: gzip"), {413}),
    "a deflate bomb": (infer(zlib.compress(bytes(100 * 2**20), 9), "Content-Encoding: deflate"), {413}),
    "gzip that ends too early": (infer(_gzip(GOOD)[:-9], "Content-Encoding: gzip"), {400}),
    "an encoding that there is not": (infer(GOOD, "Content-Encoding: br"), {400}),
    "9 MB of JSON": (infer(b" " * 9 * 2**20), {413}),
    **{f"model {name[:20]}": (message("POST", f"/v2/models/{name}/infer", GOOD), {404}) for name in _TRAVERSALS},
    "loading ../": (message("POST", "/v2/repository/models/..%2f..%2fetc%2fpasswd/load"), {404}),
    "version ../": (message("POST", "/v2/models/toy/versions/..%2f1/infer", GOOD), {404}),
    **{f"{method} infer": (message(method, INFER), {404, 405}) for method in ("GET", "PUT", "DELETE", "PATCH")},
    **{f"GET {path}": (message("GET", path), {404}) for path in ("//", "/v3", "/v2/models//ready", "/v2/models/..")},
}
"""What reaches the endpoint, and the status of its answer."""

HEADERS = [
    "X-Request-ID: \xff", "X-Session-ID: \xff", "Serve-Multiplexed-Model-ID: \xff", "Traceparent: \xff",
    "X-Request-Disconnect-Disabled: \xff", "X-Request-Timeout-Seconds: \xff", "X-Request-Timeout-Seconds: inf",
    "X-Request-Timeout-Seconds: nan", "X-Request-Timeout-Seconds: -1", "X-Request-Timeout-Seconds: 1e400",
    "User-Agent: \xff", "Accept-Encoding: \xff;q=\xff", "Accept-Encoding: gzip;q=nan", "Cookie: \xff=\xff",
    "Expect: 100-continue", "Upgrade: h2c", "Forwarded: for=\xff", "X-Forwarded-For: \xff", "Authorization: \xff",
]  # fmt: skip
"""Beside a body that is as it should be."""

_WEB_SOCKET = ("Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==")

NO_HTTP: dict[str, bytes] = {
    "negative length": infer(GOOD, "Content-Length: -1"),
    "two lengths": infer(GOOD, "Content-Length: 5", "Content-Length: 7"),
    "a length and chunks": infer(GOOD, "Content-Length: 5", "Transfer-Encoding: chunked"),
    "a length of letters": infer(GOOD, "Content-Length: five"),
    "a length too short": infer(GOOD, "Content-Length: 10"),
    "a length too long": infer(GOOD, f"Content-Length: {len(GOOD) + 1}"),
    "a length that nobody has": infer(GOOD, f"Content-Length: {10**30}"),
    "chunks that are none": infer(GOOD, "Transfer-Encoding: chunked"),
    "a chunk of negative size": infer(b"-5\r\nhello\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
    "chunks without an end": infer(b"5\r\nhello\r\n", "Transfer-Encoding: chunked"),
    "a method that there is not": message("BREW", INFER),
    "OPTIONS": message("OPTIONS", "*"),
    "CONNECT": message("CONNECT", "x:1"),
    "TRACE": message("TRACE", INFER),
    "a header of 64 KiB": infer(GOOD, f"X: {'x' * 2**16}"),
    "2,000 headers": infer(GOOD, *(f"X{index}: x" for index in range(2000))),
    "a name of 100,000 letters": message("POST", f"/v2/models/{'a' * 100_000}/infer", GOOD),
    "a line break in a header": infer(GOOD, "X: a\nb"),
    "a host that is none": infer(GOOD, "Host: \xff"),
    "a web socket": message("GET", INFER, b"", "Connection: Upgrade", *_WEB_SOCKET),
    "another version of HTTP": infer(GOOD).replace(b"HTTP/1.1", b"HTTP/9.9", 1),
    "HTTP/0.9": b"GET /v2\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "nothing at all": b"",
    "noise": random.Random(0).randbytes(4096),
    "half a request": infer(GOOD)[:60],
    "half a body": infer(GOOD)[:-50],
}
"""What is no request, or not a whole one."""
