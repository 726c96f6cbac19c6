"""Ports are chosen so that no two parts of a cluster meet on one."""

import socket

import pytest

from app import ports
from app.errors import ClusterError
from tests.wording import refused


def test_unused_ports_differ_and_are_none_of_those_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        start = taken.getsockname()[1]
        near = range(start, start + 8)
        monkeypatch.setattr(ports, "_RANGE", near)
        free = {port for port in near if ports.is_free(port)}
        besides = max(free)
        found = ports.unused(len(free) - 1, besides=(besides,))
        assert sorted(found) == sorted(free - {besides})
        assert start not in found
        with pytest.raises(ClusterError, match="8 free ports are needed"):
            ports.unused(8)


def test_one_port_is_not_given_to_two_parts() -> None:
    (port,) = ports.unused(1)
    assert ports.choose(None, port, "--serve-port") == port
    assert ports.choose(None, port, "--serve-port", besides=(port,)) != port
    with refused("port.taken", "--serve-port"):
        ports.choose(8001, 8000, "--serve-port", besides=(8001,))
