"""The engine of a version that is split: an actor for each part, in a placement group of their own."""

from collections.abc import Sequence
from threading import Lock
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from app.config import TensorParallelConfig
from app.errors import EngineError
from app.repository.manifest import Manifest
from app.serving.config import VersionConfig
from app.serving.model.loaded import OpenEngine
from app.serving.model.published import open_published
from app.tensors import Tensors, check_tensors


def opener_of(wanted: VersionConfig) -> OpenEngine:
    """What opens a version: in this process, unless others are to share its matrices."""
    split = wanted.tensor_parallel
    if split is None:
        return open_published
    return lambda manifest, _, __: SplitEngine(wanted, split, manifest)


class SplitEngine:
    """All parts of a version. They end, and give back what they reserve, with the process that opened them at last."""

    name = "torch"

    def __init__(self, wanted: VersionConfig, split: TensorParallelConfig, manifest: Manifest) -> None:
        """Wait until Ray has the resources, and load every part.

        Raises:
            StorageError: the version is not there or was changed.
            EngineError: the model cannot be split so, or a part's process has ended.
        """
        self.version, self.signature = manifest.engine_key.engine_version, manifest.signature
        self._order, self._closed = Lock(), False
        self._group = placement_group([_reserved(split)] * split.size)
        try:
            self._shards = [self._start(wanted, split, rank) for rank in range(split.size)]
            (address,) = _answers([self._shards[0].__ray_call__.remote(lambda it: it.listen(get_node_ip_address()))])
            _answers([each.load.remote(address) for each in self._shards])
        except BaseException:
            self.close()
            raise

    def infer(self, inputs: Tensors) -> Tensors:
        """Run one batch, which every part sees. Raises RequestError or EngineError."""
        check_tensors(inputs, self.signature.inputs)
        with self._order:  # parts that were asked in different orders would wait for each other
            if self._closed:
                raise EngineError("the engine is closed: open it again")
            given = ray.put(dict(inputs))
            running = [each.infer.remote(given) for each in self._shards]
        return dict(_answers(running)[0])

    def close(self) -> None:
        """End the processes, and give back what they reserve."""
        with self._order:
            self._closed = True
            remove_placement_group(self._group)

    def _start(self, wanted: VersionConfig, split: TensorParallelConfig, rank: int) -> Any:
        from app.serving.model.shard import Shard  # imports torch, which other replicas need not wait for

        actor = ray.remote(Shard).options(
            num_cpus=split.cpus_per_process,
            num_gpus=split.gpus_per_process,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, rank),
            # Ray hides no GPU from an actor that reserves none.
            runtime_env={} if split.gpus_per_process else {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}},
        )
        return actor.remote(wanted, rank, split.size)


def _reserved(split: TensorParallelConfig) -> dict[str, float]:
    """By a process; Ray takes no zeros."""
    return {"CPU": split.cpus_per_process} | ({"GPU": split.gpus_per_process} if split.gpus_per_process else {})


def _answers(running: Sequence[Any]) -> list[Any]:
    """What the parts answer, or the error of one as it was raised there. Raises EngineError if one has ended."""
    try:
        return list(ray.get(list(running)))
    except RayTaskError as error:
        raise error.cause from None
    except RayActorError as error:
        raise EngineError(f"the process of a part has ended: {error}") from error
