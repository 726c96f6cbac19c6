"""One client for servers over HTTP and over gRPC."""

from urllib.parse import urlsplit

import grpc
import httpx


def connect(url: str, timeout_s: float = 30.0) -> httpx.Client:
    """Return a client of the server at ``url``: ``http://…`` or ``grpc://…``."""
    address = urlsplit(url)
    mounts = {"grpc://": GrpcTransport(address.netloc)} if address.scheme == "grpc" else None
    # No proxy is between the two, and with NO_PROXY httpx would not look for the transport of gRPC.
    return httpx.Client(base_url=url, timeout=timeout_s, mounts=mounts, trust_env=False)


class GrpcTransport(httpx.BaseTransport):
    """Unary gRPC calls: content is a message, and a call that fails has status 500 and gRPC's status as its text."""

    def __init__(self, address: str) -> None:
        """Call the server at ``address``, a host and a port."""
        self._channel = grpc.insecure_channel(address)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Call the method that the path names."""
        call = self._channel.unary_unary(request.url.path)
        try:
            return httpx.Response(200, content=call(request.read(), timeout=request.extensions["timeout"]["read"]))
        except grpc.RpcError as error:
            return httpx.Response(500, text=f"{error.code().name}: {error.details()}")

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()
