"""A training on the cluster, seen from the head and from the storage."""

from pathlib import Path

from tests.cluster.conftest import RayCluster
from tests.cluster.machines import Machine
from tests.helpers import result_line, wait_until
from tests.launch import INTERRUPTED, Trained

SLOWER = [override.replace("pause_s=0.05", "pause_s=0.3") for override in INTERRUPTED]
FIRST_EPOCH = "epoch 1/4  loss"
"""The line at the end of the first epoch."""


class Training:
    """A job that trains as ``INTERRUPTED``, on two machines unless the overrides say otherwise."""

    def __init__(self, cluster: RayCluster, name: str, folder: Path, *overrides: str) -> None:
        self._cluster, self._folder = cluster, folder
        keys = {override.partition("=")[0] for override in overrides}
        kept = [override for override in SLOWER if override.partition("=")[0] not in keys]
        command = ["ray", "job", "submit", "--working-dir", ".", "--", "python", "-m", "jobs.train"]
        self._job = cluster.head.popen(
            *command, "recipes/digits.yaml", f"name={name}", *kept, *(overrides or ["train.resources={worker: 1}"]),
            environment=cluster.environment, log=folder / "log",
        )  # fmt: skip

    @property
    def output(self) -> str:
        return (self._folder / "log").read_text(encoding="utf-8")

    def says(self, words: str, timeout_s: float = 300) -> None:
        """Wait until its output has the words."""
        wait_until(lambda: words in self.output or self._job.poll() is not None, timeout_s)
        assert words in self.output, self.output

    def machine(self) -> Machine:
        """One of the machines that train."""
        workers = self._cluster.listed("actors", "state=ALIVE", "class_name=RayTrainWorker")
        nodes = {node: address for address, node in self._cluster.nodes().items()}
        address = nodes[workers[0]["node_id"]]
        return next(machine for machine in self._cluster.workers if machine.address == address)

    def ends(self) -> int:
        """Wait for its end, and return its exit status."""
        return self._job.wait(600)

    def trained(self) -> Trained:
        """Wait for its end, and return what it left."""
        assert self.ends() == 0, self.output
        result = result_line(self.output)
        run = self._cluster.copy(result["result"].rpartition("/")[0], self._folder / "run")
        return Trained.of({**result, "artifacts": {"weights": str(run / "weights")}})
