"""Rayloom's endpoint, driven as a person drives it: ``rayloom up``, ``rayloom submit deploy``, ``rayloom down``."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import Cluster, local_cluster
from benchmarks.serving.models import THREADS, ServedModel
from benchmarks.serving.wire import BinaryTensors, Scheme, Wire
from benchmarks.serving.workloads import EXACT, NARROWED, Tolerance

_ROOT = Path(__file__).parents[2]


def deploy(cluster: Cluster, model: ServedModel, *settings: str) -> Mapping[Scheme, str]:
    """Serve a model with one replica and one thread; return its address for each protocol.

    Args:
        settings: of the recipe's ``serve``, such as ``serve.queue_limit=64``.

    Raises:
        RuntimeError: the job fails.
    """
    fixed = (f"name={model.name}", f"storage={model.storage}", "serve.replicas=1", f"serve.threads={THREADS}")
    recipe = (_ROOT / model.recipe).relative_to(_ROOT)  # a job gets a copy of the checkout
    artifacts = cluster.submit("deploy", str(recipe), *fixed, *settings).result.artifacts
    return {"http": artifacts["http"], "grpc": f"grpc://{artifacts['grpc']}"}


@dataclass(frozen=True)
class Rayloom:
    """The endpoint with a model behind it, on a cluster of its own."""

    name: str
    model: ServedModel
    settings: tuple[str, ...] = ()
    """Keys of the recipe's ``serve``. The others have the values that compile measured."""

    encoding: Callable[[str], Wire] = BinaryTensors
    """The encoding of requests to a model."""

    @property
    def setting(self) -> str:
        """Variant and batching."""
        card = self.model.manifest
        serving = card.serving
        by_length = ", ".join(f"{rows} at length {length}" for length, rows in serving.max_batch_size_by_length.items())
        measured = (
            f"batch size at most {by_length or serving.max_batch_size}, "
            f"preferred {list(serving.preferred_batch_sizes)}, delay at most {serving.timeout_us} µs"
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
    def serve(self, _: Path) -> Iterator[str]:
        """Start a cluster and deploy."""
        with local_cluster() as cluster:
            yield deploy(cluster, self.model, *self.settings)[self.wire.scheme]
