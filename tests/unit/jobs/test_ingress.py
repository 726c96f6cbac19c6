"""The addresses of the endpoint."""

from pathlib import Path

import pytest

from app.config import ServeConfig
from app.ports import unused
from jobs._ingress import require_address


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="needs IPv6")
def test_an_endpoint_may_listen_on_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY", raising=False)
    monkeypatch.setattr("jobs._ingress.start_options", lambda: None)
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True}])
    http, grpc = unused(2)
    address = require_address(ServeConfig(host="::", port=http, grpc_port=grpc))
    assert (address.http, address.grpc) == (f"http://[::]:{http}", f"[::]:{grpc}")
