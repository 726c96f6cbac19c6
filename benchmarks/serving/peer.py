"""A server that Rayloom is compared with, with a model behind it."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.ports import LOOPBACK, unused
from benchmarks.serving.client import connect
from benchmarks.serving.environments import PEERS, interpreter
from benchmarks.serving.models import ServedModel
from benchmarks.serving.processes import running
from benchmarks.serving.servers import Batching, Server
from benchmarks.serving.wire import Wire
from benchmarks.serving.workloads import EXACT, Tolerance


@dataclass(frozen=True)
class Peer:
    """A server with a model behind it."""

    server: Server
    model: ServedModel
    batching: Batching
    environments: Path
    """Folder of the peers' virtual environments."""

    @property
    def joins(self) -> bool:
        """Whether it joins requests."""
        return self.batching.max_size > 1

    @property
    def name(self) -> str:
        """The server's, and whether it joins requests."""
        return self.server.name + (", batching" if self.joins else "")

    @property
    def setting(self) -> str:
        """Its batching, and what else was set."""
        return f"{self.batching}; {self.server.note}"

    @property
    def wire(self) -> Wire:
        """The server's."""
        return self.server.wire

    @property
    def tolerance(self) -> Tolerance:
        """It computes in float32."""
        return EXACT

    @contextlib.contextmanager
    def serve(self, folder: Path) -> Iterator[str]:
        """Start a copy of its files, since some servers write beside them."""
        python, (port,) = interpreter(self.server, self.environments), unused(1)
        copied = shutil.copytree(PEERS / self.server.folder, folder / "server")
        url = f"{self.wire.scheme}://{LOOPBACK}:{port}"
        environment = {
            "PORT": str(port),
            "PROTOCOL": self.wire.scheme,
            "MODEL_FILE": str(self.model.onnx),
            "WEIGHTS": str(self.model.weights),
            "MAX_BATCH_SIZE": str(self.batching.max_size),
            "MAX_WAIT_US": str(self.batching.wait_us or 0),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": "",  # its environment is its own
            "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)]),
            **self.server.environment(folder),
        }
        with running([str(python), "server.py"], environment, copied, lambda: self._answers(url)):
            yield url

    def _answers(self, url: str) -> bool:
        request = self.wire.request(self.model.blank_row)
        with connect(url, timeout_s=5.0) as client:
            return client.post(request.path, content=request.body, headers=dict(request.headers)).is_success
