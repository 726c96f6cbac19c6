"""HAProxy as every node starts it, and what it makes of a machine that is lost under requests."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
from ray.serve._private.common import RequestProtocol

from app.serving.ingress.haproxy_script import SILENCE_S
from app.serving.pools import APPLICATION
from tests.cluster.machines import Machine, Network, is_possible
from tests.ingress import Ingress, backend
from tests.load import Ask, load_of
from tests.tables import Faults

FIRST_PORT, REPLICAS = 30000, 2
REPLICA = """
import sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Replica(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 65536  # an answer that has begun cannot be had from another

    def do_GET(self):
        self.answer(b"")

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        time.sleep(float(self.path.strip("/")))
        self.answer(b'{"model_version": "1"}')

    def answer(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given):
        pass

ThreadingHTTPServer.request_queue_size = 128
ThreadingHTTPServer(("0.0.0.0", int(sys.argv[1])), Replica).serve_forever()
"""
"""A server that answers after as many seconds as its path says."""


@pytest.fixture
def network() -> Iterator[Network]:
    if not is_possible():
        pytest.skip("this user may not make network namespaces")
    folder = Path(tempfile.mkdtemp(prefix="rlm-", dir="/tmp"))
    started = Network(folder)
    try:
        yield started
    finally:
        started.close()
        shutil.rmtree(folder, ignore_errors=True)


def start_replicas(machine: Machine) -> None:
    """Start the machine's replicas. They end with it."""
    for port in range(FIRST_PORT, FIRST_PORT + REPLICAS):
        machine.popen("python", "-c", REPLICA, str(port), environment={}, log=machine.disk / f"{port}.log")


def test_another_machine_answers_what_a_lost_one_was_asked(network: Network, tmp_path: Path, faults: Faults) -> None:
    """Neither is an answer awaited forever that was under way, nor one on a connection that was kept open."""
    machines = [network.add(), network.add()]
    for machine in machines:
        start_replicas(machine)
    hosts = [machine.address for machine in machines]
    replicas = backend(RequestProtocol.HTTP, APPLICATION, REPLICAS, FIRST_PORT, hosts)
    with (
        faults("N2", "power of 1 of 2 machines lost behind HAProxy, at 40 requests/s", "none fails") as fault,
        network.entered(),
        Ingress(tmp_path).running(replace(replicas, timeout_server_s=600)) as url,
    ):
        asks = cycle([Ask(f"{url}/{seconds}", b"{}") for seconds in (0, 1)])
        with load_of(lambda: next(asks), 40) as sent:
            time.sleep(2)
            machines[1].lose()
            time.sleep(SILENCE_S)
        slowest_s = max(answer.seconds for answer in sent.answers)
        fault.saw(f"{sent.summary}, the slowest took {slowest_s:.1f} s")
        assert not sent.failed
        assert SILENCE_S < slowest_s < SILENCE_S + 5
