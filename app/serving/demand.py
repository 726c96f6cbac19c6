"""What an endpoint's models need: the number of replicas, and the resources and memory of each."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from app.config import Placement, ServeConfig, TensorParallelConfig


class FrozenConfig(BaseModel):
    """A part of the endpoint's configuration, which Serve passes to replicas as JSON."""

    model_config = ConfigDict(frozen=True)


class Scaling(FrozenConfig):
    """A model's requirements on the replicas of its pool. Each replica holds all models of the pool."""

    min_replicas: NonNegativeInt = 1
    """0: the last replica ends when nobody asks, and the next request starts one."""

    max_replicas: PositiveInt = 1
    cpus: Annotated[float, Field(ge=0.0)] = 0.0
    """CPUs that a replica reserves for the model."""

    gpus: Annotated[float, Field(ge=0.0)] = 0.0
    """Share of the replica's only GPU that it reserves for the model, or the GPUs that share the model."""

    max_gpus: PositiveInt = 1
    """Number of GPUs that a replica may have: one, or those that share a language model."""

    resources: dict[str, float] = {}
    """Custom resources of Ray that a replica reserves. They select the kind of node."""

    labels: dict[str, str] = {}
    """Selectors of the nodes' labels."""

    fallback_labels: dict[str, str] = {}
    """Selectors of the nodes to take where none with ``labels`` has room."""

    above_training: bool = False
    """Whether replicas have priority over training."""

    latency_target_s: float | None = None
    """Target for the 95th percentile of latency. None: only the number of requests decides."""

    upscale_delay_s: float = 0.0
    downscale_delay_s: float = 0.0

    @classmethod
    def of(cls, serve: ServeConfig, measured: int) -> Self:
        """Return what a recipe asks for. ``measured`` is the number of replicas if the recipe does not set it."""
        min_replicas, max_replicas = serve.replica_range or (measured, measured)
        target_ms = serve.scaling.latency_target_ms
        return cls(
            min_replicas=min_replicas,
            max_replicas=max_replicas,
            cpus=serve.cpus_per_replica,
            gpus=serve.gpus_per_replica * serve.generation.tensor_parallel,
            max_gpus=serve.generation.tensor_parallel,
            resources=serve.resources,
            labels=serve.labels,
            fallback_labels=serve.fallback_labels,
            above_training=serve.above_training,
            latency_target_s=target_ms / 1e3 if target_ms else None,
            upscale_delay_s=serve.scaling.upscale_delay_s,
            downscale_delay_s=serve.scaling.downscale_delay_s,
        )

    @classmethod
    def combined(cls, models: Sequence[Self]) -> Self:
        """Return requirements that satisfy all models: the largest number of replicas, with the resources of all.

        Delays come from the models that scale: the shortest delay for more replicas, the longest for fewer.
        """
        # A model with a fixed number of replicas has delays, too, but they mean nothing.
        scaled = [model for model in models if model.min_replicas < model.max_replicas]
        return cls(
            min_replicas=max((model.min_replicas for model in models), default=1),
            max_replicas=max((model.max_replicas for model in models), default=1),
            cpus=sum(model.cpus for model in models),
            gpus=sum(model.gpus for model in models),
            max_gpus=max((model.max_gpus for model in models), default=1),
            resources=_summed([model.resources for model in models]),
            # The models of a pool have the same.
            labels=models[0].labels if models else {},
            fallback_labels=models[0].fallback_labels if models else {},
            above_training=any(model.above_training for model in models),
            latency_target_s=min((model.latency_target_s for model in scaled if model.latency_target_s), default=None),
            upscale_delay_s=min((model.upscale_delay_s for model in scaled), default=0.0),
            downscale_delay_s=max((model.downscale_delay_s for model in scaled), default=0.0),
        )


def _summed(resources: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the total amount of each resource."""
    kinds = dict.fromkeys(kind for amounts in resources for kind in amounts)
    return {kind: sum(amounts.get(kind, 0.0) for amounts in resources) for kind in kinds}


class Demand(FrozenConfig):
    """The resources that replicas need, whichever versions they hold."""

    scaling: Scaling
    sharded: tuple[TensorParallelConfig, ...] = ()
    """The shards beside each replica, for every sharded version."""

    memory_bytes: NonNegativeInt = 0
    """Memory that a replica's language models need: their weights, and the keys and values of their answers."""

    @property
    def placement(self) -> Placement:
        """The nodes that may hold a replica, and what it reserves without the processes of its sharded models."""
        scaling = self.scaling
        resources = {"CPU": scaling.cpus, "GPU": scaling.gpus, **scaling.resources}
        return Placement(resources, scaling.labels, scaling.fallback_labels)

    @property
    def reserved(self) -> dict[str, float]:
        """Ray resources reserved by a replica and the processes of its sharded models."""
        return _summed(self.bundles)

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Ray resources of a replica, then of each process of its sharded models, which is an actor beside it."""
        replica = dict(self.placement.resources)
        return [replica, *(config.reserved for config in self.sharded for _ in range(config.size))]
