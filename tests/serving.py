"""An endpoint behind real servers on loopback, in a thread of this process, and versions for it to serve."""

import asyncio
import random
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc
import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.errors import RayloomError
from app.serving.config import EndpointConfig
from app.serving.endpoint import Endpoint
from app.serving.transport.fast_http import FastHttpProtocol, FastPath
from app.serving.transport.grpc import GrpcMethods, add_to_server
from app.serving.transport.http import HttpApi
from app.serving.transport.inference_call import ROOM_BYTES, Admission
from tests.haproxy import Front, in_front

Result = TypeVar("Result")


@dataclass(frozen=True)
class Server:
    """Where an endpoint answers."""

    endpoint: Endpoint
    methods: GrpcMethods
    """That answer over gRPC."""
    http: str
    """``host:port``, as for gRPC."""
    front: str
    """Address of HAProxy, which sends all clients' requests to the HTTP server over the same connections."""
    grpc: str
    """Address of HAProxy, which sends unary calls to the HTTP server, and streams to the gRPC server."""
    streams: str
    """Address of the gRPC server, which answers all calls."""
    loop: asyncio.AbstractEventLoop
    fast_path: FastPath
    listener: uvicorn.Server
    """The HTTP server."""

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """On the endpoint's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(300)


@contextmanager
def serving(chance: random.Random | None = None, fast: bool = True, room_bytes: int = ROOM_BYTES) -> Iterator[Server]:
    """Start servers for an endpoint without models. Unless ``fast``, requests go through ASGI or the gRPC server."""
    loop, endpoint = asyncio.new_event_loop(), Endpoint(chance)
    admission = Admission(endpoint, room_bytes)
    methods = GrpcMethods(admission)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    # asyncio turns off Nagle's delay of 40 ms only for sockets created with an explicit protocol.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    fast_path, api = FastPath(admission, methods), HttpApi(admission)
    app = api.in_front_of(api)
    protocol = partial(FastHttpProtocol, fast_path) if fast else HttpToolsProtocol
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, log_config=None, lifespan="off"))  # type: ignore[arg-type]

    async def start() -> tuple[asyncio.Task[None], grpc.aio.Server, int]:
        rpc = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 * 2**20)])
        add_to_server(methods, rpc)
        port = rpc.add_insecure_port("127.0.0.1:0")
        await rpc.start()
        return asyncio.create_task(server.serve([listener])), rpc, port

    http, rpc, port = asyncio.run_coroutine_threadsafe(start(), loop).result(300)
    try:
        web, streams = f"127.0.0.1:{listener.getsockname()[1]}", f"127.0.0.1:{port}"
        with ExitStack() as stack:
            front = stack.enter_context(in_front(web, streams)) if fast else Front(web, streams)
            yield Server(endpoint, methods, web, front.http, front.grpc, streams, loop, fast_path, server)
    finally:

        async def stop() -> None:
            server.should_exit = True
            await http
            await rpc.stop(None)

        asyncio.run_coroutine_threadsafe(stop(), loop).result(300)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()  # with its threads, which would last as long as this process


def refused(server: Server, wanted: EndpointConfig, kind: type[RayloomError], words: str) -> str:
    """Try to serve it, and say what came of that."""
    began_s = time.monotonic()
    with pytest.raises(kind, match=words):
        server.run(server.endpoint.update(wanted))
    seconds = time.monotonic() - began_s
    assert seconds <= 5
    return f"refused after {seconds:.1f} s"
