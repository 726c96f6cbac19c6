"""A server on loopback that notes what it is asked, as a web server or as a proxy."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Asked:
    """A running server."""

    port: int
    status: int
    lines: list[str] = field(default_factory=list)
    """The first line of each request."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def listening(status: int) -> Iterator[Asked]:
    """Run a server that answers everything with ``status``."""

    class Handler(BaseHTTPRequestHandler):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("do_"):
                return self.answer
            raise AttributeError(name)

        def answer(self) -> None:
            asked.lines.append(self.requestline)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        asked = Asked(server.server_port, status)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield asked
        server.shutdown()
