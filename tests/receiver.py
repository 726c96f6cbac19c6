"""A real HTTP server that keeps what it gets."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class HttpReceiver:
    """Answers with the statuses it is given, the last one for ever; ``open`` is False: it never answers."""

    def __init__(self, *statuses: int) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.open = threading.Event()
        self.open.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.requests.append((dict(self.headers), body))
                status = statuses[min(len(receiver.requests), len(statuses)) - 1]
                receiver.open.wait()
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?room=private"
