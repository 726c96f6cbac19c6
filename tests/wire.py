"""HTTP as bytes on a socket, right or wrong."""

import http.client
import select
import socket
import time
from dataclasses import dataclass

_PATIENCE_S = 20.0


@dataclass(frozen=True)
class Reply:
    """What a server said; status 0 and nothing else if it closed the connection without a word of HTTP."""

    status: int
    body: bytes = b""


def message(method: str, path: str, content: bytes = b"", *lines: str) -> bytes:
    """A request that ends its connection, with header lines as they are; its length is right unless one says it."""
    names = {line.partition(":")[0].lower() for line in lines}
    if not names & {"content-length", "transfer-encoding"}:
        lines = (*lines, f"Content-Length: {len(content)}")
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *lines, "", ""]
    return "\r\n".join(head).encode("latin-1") + content


def drip(address: str, head: bytes, pause_s: float, patience_s: float) -> bytes:
    """Send the head of a request, then one byte at a time until the server closes. Return the server's reply.

    Raises:
        TimeoutError: the server does not close the connection.
    """
    host, _, port = address.rpartition(":")
    said, deadline_s = b"", time.monotonic() + patience_s
    with socket.create_connection((host, int(port)), patience_s) as connection:
        connection.sendall(head)
        while time.monotonic() < deadline_s:
            try:
                if select.select([connection], [], [], pause_s)[0]:
                    part = connection.recv(2**16)
                    if not part:
                        return said
                    said += part
                else:
                    connection.sendall(b" ")
            except ConnectionError:
                return said
    raise TimeoutError(f"the server said {said!r} and does not close the connection")


def exchange(
    address: str, *parts: bytes, pause_s: float = 0.0, whole: bool = True, patience_s: float = _PATIENCE_S
) -> Reply:
    """Send the parts, until the server answers, and return its answer; not ``whole``: then send no more."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), patience_s) as connection:
        try:
            for part in parts:
                if select.select([connection], [], [], 0)[0]:
                    break
                connection.sendall(part)
                time.sleep(pause_s)
            if not whole:
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it has said all it wants to
        response = http.client.HTTPResponse(connection)
        try:
            response.begin()
            return Reply(response.status, response.read())
        except (http.client.HTTPException, ConnectionError):
            return Reply(0)
