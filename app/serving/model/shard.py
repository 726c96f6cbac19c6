"""One process's shard of a version whose matrices are split over several processes.

The tensor-parallel plan of the model's class in transformers says how to split them (Shoeybi et al. 2019,
arXiv:1909.08053).
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from app.engines.architecture import Device
from app.engines.base import EngineSettings, library_errors
from app.engines.torch import TorchEngine
from app.errors import RecipeError
from app.models.traits import is_hugging_face, traits_of
from app.published.weights import read_architecture
from app.repository.repository import Repository
from app.serving.config import VersionConfig
from app.storage import local_copy, open_storage
from app.tensors import Tensors

_TIMEOUT = timedelta(seconds=60)
"""Time that a shard waits for the others, when they meet and in each call."""


class ModelShard:
    """The process of one rank. All ranks get the same calls in the same order, and each returns the whole answer."""

    def __init__(self, version: VersionConfig, rank: int, world_size: int) -> None:
        assert version.tensor_parallel is not None
        self._version, self._rank, self._size = version, rank, world_size
        self._device: Device = "gpu" if version.tensor_parallel.gpus_per_process else "cpu"
        self._store: TCPStore | None = None

    def __repr__(self) -> str:
        """Return the name in Ray's dashboard and logs."""
        return f"shard {self._rank} of {self._size}, {self._version.name} version {self._version.version}"

    def listen(self, host: str) -> str:
        """Open the store where all ranks meet, on this machine's address. Only for rank 0. Return HOST:PORT."""
        # The other ranks need the port that this returns, so none of them can be there yet.
        self._store = TCPStore(host, 0, self._size, is_master=True, wait_for_workers=False)
        return f"{host}:{self._store.port}"

    def load(self, address: str) -> None:
        """Meet the other ranks, and load this rank's shard of the weights.

        Raises:
            StorageError: the version is missing or was changed.
            RecipeError, EngineError: so many processes cannot share the model, it does not fit, or a rank is missing.
        """
        version = self._version
        repository = Repository(open_storage(version.storage))
        # This comes before the ranks meet, because it takes time.
        manifest = repository.verify(version.name, version.version, version.seal)
        self._meet(address)
        # After the ranks have met, because transformers shards over their process group.
        with local_copy(repository.folder(version.name, version.version)) as files:
            model = _shard(files, self._size)
        settings = EngineSettings(manifest.engine_key.precision, version.threads, device=self._device)
        self._engine = TorchEngine(model, manifest.signature, settings)

    def infer(self, inputs: Tensors) -> Tensors:
        """Run one batch together with the other ranks. Raises RequestError or EngineError as engines do."""
        return self._engine.infer(inputs)

    def _meet(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        backend = "nccl" if self._device == "gpu" else "gloo"
        with library_errors("the shards do not meet"):
            store = self._store or TCPStore(host, int(port), self._size, is_master=False, timeout=_TIMEOUT)
            distributed.init_process_group(
                backend, store=store, rank=self._rank, world_size=self._size, timeout=_TIMEOUT
            )


def require_shardable(folder: Path, size: int) -> type[nn.Module]:
    """Return the class of a version's model, if ``size`` processes can share it. No weights are loaded.

    Args:
        folder: the version's files.

    Raises:
        RecipeError: its class has no plan, or ``size`` does not divide its heads.
    """
    whole = read_architecture(folder).blueprint.model
    title = type(whole).__name__
    if not is_hugging_face(whole) or not whole.supports_tp_plan:
        raise RecipeError(
            f"serve.tensor_parallel needs a model of transformers whose class has a tp_plan, and {title} has none: "
            "serve it without, or choose another, such as model_type=llama or qwen3"
        ).of("tensor_parallel.no_plan", "serve.tensor_parallel")
    heads = traits_of(whole).tensor_divisor
    if heads is None or heads % size:
        raise RecipeError(
            f"serve.tensor_parallel.size is {size}, and {title} has {heads} heads of keys and values: give a divisor"
        ).of("heads.uneven", "serve.tensor_parallel.size")
    return type(whole)


def _shard(folder: Path, size: int) -> nn.Module:
    """Return this process's shard of the model. Raises RecipeError or EngineError."""
    from transformers.distributed import DistributedConfig

    model: Any = require_shardable(folder, size)
    with library_errors(f"transformers cannot shard {model.__name__} across {size} processes"):
        config = DistributedConfig(tp_size=size)
        shard: nn.Module = model.from_pretrained(folder, distributed_config=config, dtype=torch.float32)
    return shard.eval()
