"""Machines that are namespaces of this one: each has its own network, processes, ``/tmp`` and ``/dev/shm``.

They are joined by a bridge in a namespace without processes of Ray. Nothing is named, so the kernel removes all of it
once the processes have ended, also after a SIGKILL of the tests.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.helpers import BIN, ROOT, wait_until

_CLONE_NEWNET = 0x40000000
_NETWORK = "10.99.0"
HUB_ADDRESS = f"{_NETWORK}.254"
"""The address of the tests themselves, and of the servers that they start in ``Network.entered``."""
_INIT = """
import os, time
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.05)
"""
"""The first process of a machine. It reaps the processes whose parents have ended."""
# The checkout may be in the /tmp that is covered.
_START = """
mount --make-rprivate /
mount --bind "{checkout}" /mnt
mount --bind "{disk}" /tmp
mount -t tmpfs -o size=1g shm /dev/shm
mkdir -p "{checkout}"
mount --bind /mnt "{checkout}"
umount /mnt
echo "127.0.0.1 localhost" > /tmp/hosts
for number in $(seq 99); do echo "{network}.$number machine$number" >> /tmp/hosts; done
mount --bind /tmp/hosts /etc/hosts
hostname "{name}"
ip link set lo up
exec "{python}" -S -c "$INIT"
"""


def is_possible() -> bool:
    """Return whether this user may make namespaces."""
    return os.geteuid() == 0 and not subprocess.run(["unshare", "--net", "true"], check=False).returncode


class _Namespace:
    """A process that holds namespaces. It ends with this process."""

    def __init__(self, *kinds: str, script: str) -> None:
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *kinds, "--fork", "--kill-child", "sh", "-ec", script]
        self._holder = psutil.Popen(command, env={**os.environ, "INIT": _INIT}, stderr=subprocess.DEVNULL)
        wait_until(lambda: bool(self._holder.children()))
        (child,) = self._holder.children()
        self.pid = child.pid
        wait_until(lambda: child.name().startswith("python"))

    def enter(self, *command: str) -> list[str]:
        """Return a command that runs another one in here."""
        return ["nsenter", f"--target={self.pid}", "--all", "--", *command]

    def ip(self, *arguments: str) -> None:
        """Change the network."""
        subprocess.run(self.enter("ip", *arguments), check=True)

    def kill(self) -> None:
        """Kill all processes at once, as a loss of power does."""
        with suppress(psutil.NoSuchProcess):
            psutil.Process(self.pid).kill()
        self._holder.wait()


class Machine:
    """A computer without a shared disk."""

    def __init__(self, hub: _Namespace, number: int, disk: Path, delay_s: float) -> None:
        self.address, self.disk = f"{_NETWORK}.{number}", disk
        self._port, self._hub, self._is_lost = f"port{number}", hub, False
        disk.mkdir()
        script = _START.format(
            checkout=ROOT, disk=disk, network=_NETWORK, name=f"machine{number}", python=sys.executable
        )
        self._namespace = _Namespace("--net", "--pid", "--uts", "--mount", "--mount-proc", script=script)
        if delay_s:
            self._link_with_delay(delay_s)
        else:
            hub.ip("link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", str(self._namespace.pid))
        hub.ip("link", "set", self._port, "master", "bridge", "up")
        self._namespace.ip("address", "add", f"{self.address}/24", "dev", "eth0")
        self._namespace.ip("link", "set", "eth0", "up")
        # Nobody is there. Ray asks the kernel which address it would use.
        self._namespace.ip("route", "add", "default", "via", f"{_NETWORK}.253")

    def _link_with_delay(self, delay_s: float) -> None:
        ends = (str(self._hub.pid), self._port, str(self._namespace.pid), "eth0")
        link = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "tests.cluster.delayed_link", str(delay_s), *ends],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert link.stdout is not None
        assert link.stdout.readline() == b"ready\n"

    def popen(self, *command: str, environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command of this environment, in the checkout."""
        with log.open("wb") as output:
            return subprocess.Popen(
                self._namespace.enter(*_in_checkout(command)),
                env={**os.environ, **environment, "PATH": f"{BIN}:{os.environ['PATH']}"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def run(
        self, *command: str, environment: Mapping[str, str], timeout_s: float = 600
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of this environment, in the checkout. Its output is captured."""
        return subprocess.run(
            self._namespace.enter(*_in_checkout(command)),
            env={**os.environ, **environment, "PATH": f"{BIN}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def lose(self) -> None:
        """Take the machine away: its processes end at once, and nobody closes their connections."""
        if not self._is_lost:
            self.unplug()
            self._namespace.kill()
            self._is_lost = True

    def unplug(self) -> None:
        """Cut its network."""
        self._hub.ip("link", "set", self._port, "down")

    def plug(self) -> None:
        """Restore its network."""
        self._hub.ip("link", "set", self._port, "up")

    def limit(self, rate: str) -> None:
        """Limit its network in both directions, as ``tc`` writes it: 20mbit."""
        self._shape("replace", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")

    def unlimit(self) -> None:
        """Restore its bandwidth."""
        self._shape("del")

    def _shape(self, verb: str, *discipline: str) -> None:
        for namespace, device in ((self._namespace, "eth0"), (self._hub, self._port)):
            subprocess.run(namespace.enter("tc", "qdisc", verb, "dev", device, "root", *discipline), check=True)


class Network:
    """Machines that reach each other over a bridge, and nothing else."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hub = _Namespace("--net", script=f'ip link set lo up; exec "{sys.executable}" -S -c "$INIT"')
        self._hub.ip("link", "add", "bridge", "type", "bridge")
        self._hub.ip("address", "add", f"{HUB_ADDRESS}/24", "dev", "bridge")
        self._hub.ip("link", "set", "bridge", "up")
        self.machines: list[Machine] = []

    def add(self, delay_s: float = 0) -> Machine:
        """Add a machine. What it sends and receives arrives after a delay."""
        number = len(self.machines) + 1
        self.machines.append(Machine(self._hub, number, self._folder / f"disk{number}", delay_s))
        return self.machines[-1]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let this thread open its sockets in the network, at ``HUB_ADDRESS``."""
        with open("/proc/thread-self/ns/net", "rb") as before, open(f"/proc/{self._hub.pid}/ns/net", "rb") as inside:
            enter_network(inside.fileno())
            try:
                yield
            finally:
                enter_network(before.fileno())

    def close(self) -> None:
        """End all machines."""
        for machine in self.machines:
            machine.lose()
        self._hub.kill()


def _in_checkout(command: Sequence[str]) -> list[str]:
    return ["sh", "-c", f'cd "{ROOT}" && exec "$@"', "sh", *command]


def enter_network(descriptor: int) -> None:
    """Let this thread open its sockets in the network namespace of an open file of ``/proc/PID/ns/net``."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
