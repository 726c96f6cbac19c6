"""Rayloom's endpoint, driven as a person drives it: ``rayloom up``, ``rayloom submit deploy``, ``rayloom down``."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving.models import THREADS, ServedModel
from benchmarks.serving.processes import ServerError
from benchmarks.serving.wire import BinaryTensors, Wire
from benchmarks.serving.workloads import EXACT, NARROWED, Tolerance

_ROOT = Path(__file__).parents[2]
_BIN = Path(sys.executable).parent


class Cluster:
    """A local cluster of its own, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        """Until the end of the block. Raises ServerError."""
        self._run("up")
        try:
            yield
        finally:
            self._run("down")

    def deploy(self, model: ServedModel, *settings: str) -> str:
        """Serve a model with one replica and one thread; its address.

        Args:
            settings: of the recipe's ``serve``, such as ``serve.queue_limit=64``.

        Raises:
            ServerError: the job fails.
        """
        fixed = (f"name={model.name}", f"storage={model.storage}", "serve.replicas=1", f"serve.threads={THREADS}")
        recipe = (_ROOT / model.recipe).relative_to(_ROOT)  # a job gets a copy of the checkout
        said = self._run("submit", "deploy", str(recipe), *fixed, *settings)
        result = next(line for line in said.splitlines() if line.startswith("RESULT "))
        return str(json.loads(result.removeprefix("RESULT "))["artifacts"]["http"])

    def _run(self, *arguments: str) -> str:
        """What the command ``rayloom`` printed."""
        environment = {**os.environ, "RAYLOOM_HOME": str(self._folder / "home"), "OMP_NUM_THREADS": "1"}
        command = [str(_BIN / "rayloom"), *arguments]
        done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ServerError(f"rayloom {' '.join(arguments)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout


@dataclass(frozen=True)
class Rayloom:
    """The endpoint with a model behind it, on a cluster of its own."""

    name: str
    model: ServedModel
    settings: tuple[str, ...] = ()
    """Of the recipe's ``serve``; what is not said is as compile measured it."""

    encoding: Callable[[str], Wire] = BinaryTensors
    """How the model of a name is asked."""

    @property
    def setting(self) -> str:
        """Variant and batching."""
        card = self.model.manifest
        serving = card.serving
        measured = (
            f"batches of {serving.max_batch_size} at most, {list(serving.preferred_batch_sizes)} preferred, waits "
            f"{serving.timeout_us} µs at most"
        )
        variant = f"{card.engine_key.engine} {card.engine_key.precision}, cosine to PyTorch {card.cosine:.4f}"
        return f"{variant}; {', '.join(self.settings) or measured}"

    @property
    def wire(self) -> Wire:
        """The Open Inference Protocol."""
        return self.encoding(self.model.name)

    @property
    def tolerance(self) -> Tolerance:
        """Narrow for the same file in float32, wider for a variant."""
        return EXACT if self.model.manifest.engine_key.precision == "fp32" else NARROWED

    @contextlib.contextmanager
    def serve(self, folder: Path) -> Iterator[str]:
        """Start a cluster and deploy."""
        cluster = Cluster(folder)
        with cluster.up():
            yield cluster.deploy(self.model, *self.settings)
