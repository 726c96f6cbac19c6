"""The engine of a sharded version: one actor per shard, in a placement group of its own."""

from pathlib import Path
from threading import Lock
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from app.config import TensorParallelConfig
from app.engines.base import Engine
from app.errors import EngineError, RayloomError
from app.published.engine import open_published
from app.repository.manifest import Manifest
from app.serving.config import VersionConfig
from app.tensors import Tensors, check_tensors

_CALL_TIMEOUT_S = 90.0
"""Longer than the shards wait for each other."""


class _LostError(EngineError):
    """A shard does not answer any more."""


def open_version(version: VersionConfig, manifest: Manifest, folder: Path, threads: int) -> Engine:
    """Open the engine of a version, in this process or sharded. Raises EngineError or StorageError."""
    if version.tensor_parallel is None:
        return open_published(manifest, folder, threads)
    return TensorParallelEngine(version, version.tensor_parallel, manifest)


class TensorParallelEngine:
    """The shards of a version. Closing it, or the end of its process, ends them and frees their resources."""

    name = "torch"

    def __init__(self, version: VersionConfig, config: TensorParallelConfig, manifest: Manifest) -> None:
        """Wait until Ray has the resources, and load every shard.

        Raises:
            StorageError: the version is missing or was changed.
            EngineError: the model cannot be sharded this way, or a shard's process has ended.
        """
        self.version, self.signature = manifest.engine_key.engine_version, manifest.signature
        self._order, self._refusal = Lock(), ""
        self._group = placement_group([config.reserved] * config.size)
        try:
            self._shards = [_start(version, config, self._group, rank) for rank in range(config.size)]
            # An open store, because a port that is free now may be taken once all shards have started.
            address = _answer(self._shards[0].__ray_call__.remote(lambda it: it.listen(get_node_ip_address())))
            for loading in [shard.load.remote(address) for shard in self._shards]:
                _answer(loading)
        except BaseException:
            self.close()
            raise

    def infer(self, inputs: Tensors) -> Tensors:
        """Run one batch on all shards.

        Raises:
            RequestError: an input does not fit the model.
            EngineError: the batch failed in all shards or in some. In the second case the shards are out of step, and
                the engine refuses all further batches.
        """
        check_tensors(inputs, self.signature.inputs)
        return self.run(inputs)

    def run(self, inputs: Tensors) -> Tensors:
        """Run one batch whose inputs were checked before. Raises EngineError as ``infer`` does."""
        with self._order:  # shards with different orders of calls would wait for each other
            if self._refusal:
                raise EngineError(self._refusal).of("model_shard.out_of_step")
            given = _put(inputs)
            running = [shard.infer.remote(given) for shard in self._shards]
        # Wait for all of them, because only all answers tell whether the shards are still in step.
        ray.wait(running, num_returns=len(running), timeout=_CALL_TIMEOUT_S)
        answers, errors = [], list[RayloomError]()
        for call in running:
            try:
                answers.append(_answer(call, timeout_s=0))
            except RayloomError as error:
                errors.append(error)
        if errors and (answers or any(isinstance(error, _LostError) for error in errors)):
            self._refusal = f"a shard failed, and is out of step with the others: {errors[0]}"
        if errors:
            raise errors[0]
        return dict(answers[0])

    def close(self) -> None:
        """End the processes, and free their resources."""
        with self._order:
            self._refusal = "the engine is closed: open it again"
            remove_placement_group(self._group)


def _start(version: VersionConfig, config: TensorParallelConfig, group: Any, rank: int) -> Any:
    """Start the actor of a shard."""
    from app.serving.model.shard import ModelShard  # imports torch, which takes seconds

    actor = ray.remote(ModelShard).options(
        num_cpus=config.cpus_per_process,
        num_gpus=config.gpus_per_process,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
        # Ray does not hide the GPUs from an actor that reserves none.
        runtime_env={} if config.gpus_per_process else {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}},
    )
    return actor.remote(version, rank, config.size)


def _put(inputs: Tensors) -> Any:
    """Put the inputs where all shards find them. Raises EngineError."""
    try:
        return ray.put(dict(inputs))
    except RayError as error:
        raise EngineError(f"the inputs do not reach the shards: {error}").of("model_shard.no_inputs") from error


def _answer(running: Any, timeout_s: float | None = None) -> Any:
    """Return a shard's answer, or raise its error. Raises EngineError if the shard does not answer."""
    try:
        return ray.get(running, timeout=timeout_s)
    except RayTaskError as error:
        if isinstance(error.cause, RayloomError):
            raise error.cause from None
        raise EngineError(f"a shard failed: {error.cause!r}").of("model_shard.fails") from error
    except RayError as error:
        raise _LostError(f"the process of a shard has ended, or does not answer: {error}") from error
