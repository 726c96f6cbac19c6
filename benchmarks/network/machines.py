"""Run ranks in network namespaces that stand for machines, with a limited rate between them."""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.network.cases import Rate
from benchmarks.network.rank import INTERFACE
from tests.cluster.machines import Machine, Network

MACHINES = 2
_PORT = 29500
_TIMEOUT_S = 1200


@dataclass(frozen=True)
class Measured:
    """One case at one rate."""

    case: str
    step_s: float
    sent_bytes: int
    """Bytes that a machine sends in a step, with all headers."""
    loss: float | None


@contextmanager
def two_machines() -> Iterator[list[Machine]]:
    """Yield two machines that reach only each other."""
    with tempfile.TemporaryDirectory(prefix="bench-network-") as folder:
        network = Network(Path(folder))
        try:
            yield [network.add() for _ in range(MACHINES)]
        finally:
            network.close()


def measure(
    machines: Sequence[Machine], rate: Rate, cases: Sequence[str], steps: int, per_machine: int = 1
) -> list[Measured]:
    """Train the cases on the machines, one after the other. Raises RuntimeError if a rank fails."""
    if rate.tc:
        for machine in machines:
            machine.limit(rate.tc)
    try:
        return _run(machines, [str(steps), *cases], per_machine)
    finally:
        if rate.tc:
            for machine in machines:
                machine.unlimit()


def _run(machines: Sequence[Machine], arguments: Sequence[str], per_machine: int) -> list[Measured]:
    size = len(machines) * per_machine
    with tempfile.TemporaryDirectory(prefix="bench-network-") as folder:
        logs = [Path(folder) / f"{rank}.log" for rank in range(size)]
        processes = [
            machines[rank // per_machine].popen(
                *("python", "-m", "benchmarks.network.rank", *arguments),
                environment=_environment(machines[0], rank, per_machine, size),
                log=log,
            )
            for rank, log in enumerate(logs)
        ]
        try:
            codes = [process.wait(_TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise RuntimeError("\n".join(log.read_text(encoding="utf-8")[-3000:] for log in logs))
        lines = logs[0].read_text(encoding="utf-8").splitlines()
    return [Measured(*json.loads(line.removeprefix("MEASURED "))) for line in lines if line.startswith("MEASURED ")]


def _environment(first: Machine, rank: int, per_machine: int, size: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % per_machine),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": first.address,
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HOME": os.environ.get("HOME", "/root"),
    }
