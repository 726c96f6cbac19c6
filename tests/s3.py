"""An S3 server, on loopback unless told otherwise."""

import logging
import threading
import time
from collections.abc import Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server


class S3Server:
    """Moto's server, in a thread of this process."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self.delay_s = 0.0
        """Seconds that each answer takes longer."""
        logging.getLogger("werkzeug").setLevel(logging.WARNING)  # it tells of every request
        self._app = DomainDispatcherApplication(create_backend_app)
        self._one_at_a_time = threading.Lock()
        self._server = make_server(host, 0, self._answer, threaded=True, request_handler=MotoRequestHandler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """As S3 does, check a write's condition and write in one step; moto alone takes two."""
        time.sleep(self.delay_s)
        with self._one_at_a_time:
            return list(self._app(environ, start_response))

    @property
    def environment(self) -> dict[str, str]:
        """What reaches it, of this process and others."""
        return {
            "AWS_ENDPOINT_URL": f"http://{self._host}:{self._server.server_port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
