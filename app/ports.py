"""Find free ports, and list the ports that a cluster has opened."""

import contextlib
import itertools
import random
import socket
from collections.abc import Collection
from dataclasses import dataclass

import psutil

from app.errors import ClusterError

LOOPBACK = "127.0.0.1"
# Between Ray's ports for workers and Serve's for replicas, and below the ephemeral ports of Linux and macOS. So no
# other process of Ray takes a port between our choice and its use.
_RANGE = range(20_000, 30_000)
# The same holds above Serve's ports for HTTP.
_BLOCKS = [range(first, first + 100) for first in range(31_000, 32_700, 100)]


def host_port(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with an IPv6 host in brackets, as in URLs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family_of(host: str) -> socket.AddressFamily:
    """Return the address family of a socket that listens on ``host``."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_free(port: int) -> bool:
    """Return True if nothing listens on ``port``, on any interface."""
    with socket.socket() as probe:
        # Servers set this option, too. Without it, a port whose last connections have just closed is refused.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def choose(given: int | None, preferred: int, option: str, besides: Collection[int] = ()) -> int:
    """Return ``given``, else ``preferred`` if it is free, else any free port. Never return one of ``besides``.

    Raises:
        ClusterError: the given port is taken.
    """
    if given is not None:
        if given in besides or not is_free(given):
            raise ClusterError(
                f"port {given} is in use: give {option} another one, or leave it out to take a free one"
            ).of("port.taken", option)
        return given
    return preferred if preferred not in besides and is_free(preferred) else unused(1, besides)[0]


def unused(count: int, besides: Collection[int] = ()) -> list[int]:
    """Return ``count`` different free ports, none of them in ``besides``.

    Raises:
        ClusterError: there are too few.
    """
    free = (port for port in random.sample(_RANGE, len(_RANGE)) if port not in besides and is_free(port))
    found = list(itertools.islice(free, count))
    if len(found) < count:
        raise ClusterError(
            f"{count} free ports are needed from {_RANGE.start} to {_RANGE.stop - 1}, {len(found)} are free"
        ).of("ports.too_few")
    return found


def unused_block() -> range:
    """Return a hundred free ports in a row. Raise ClusterError if there are none."""
    for block in random.sample(_BLOCKS, len(_BLOCKS)):
        if all(map(is_free, block)):
            return block
    raise ClusterError(
        f"100 free ports are needed, from {_BLOCKS[0][0]} to {_BLOCKS[-1][-1]}: stop what listens there"
    ).of("ports.too_few")


@dataclass(frozen=True)
class OpenPort:
    """A port that a process listens on."""

    address: str
    port: int
    process: str

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return self.address in (LOOPBACK, "::1", f"::ffff:{LOOPBACK}")


def open_ports(processes: list[psutil.Process]) -> list[OpenPort]:
    """Return every port on which one of the processes listens."""
    # A set, because a forked process shows its parent's listeners, too.
    found: set[OpenPort] = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):  # the process has ended meanwhile
            found |= {
                OpenPort(connection.laddr.ip, connection.laddr.port, _title(process))
                for connection in process.net_connections(kind="tcp")
                if connection.status == psutil.CONN_LISTEN
            }
    return sorted(found, key=lambda port: (port.port, port.address))


def _title(process: psutil.Process) -> str:
    """Return the process's name for people: Ray's own title, or the program or module that it runs."""
    words = process.cmdline() or [process.name()]
    if not words[0].rpartition("/")[2].startswith("python"):
        return words[0].rpartition("/")[2]
    rest = [word for word in words[1:] if not word.startswith("-")]
    return rest[0].rpartition("/")[2] if rest else words[0]
