"""The configuration of an endpoint: its models, their versions and replicas, and the access to them."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from app.artifacts import WEIGHTS_FILE
from app.config import Percent, ServeConfig, TensorParallelConfig
from app.engines.registry import runs_module
from app.errors import RecipeError
from app.repository.manifest import Manifest, ServingDefaults
from app.serving.access import Access
from app.serving.batching.scheduler import BatchingPolicy, RowsByLength
from app.serving.cascade.rule import CascadeRule


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True)


class VersionConfig(_Config):
    """A published version in memory, and the batching of its requests. Equal configurations share an engine."""

    storage: str
    name: str
    version: PositiveInt
    seal: str
    """Its manifest's seal, because another version may get the number."""

    threads: PositiveInt
    """Threads of its engine."""

    policy: BatchingPolicy
    tensor_parallel: TensorParallelConfig | None = None
    """The sharding of its matrices; None if they are not sharded."""

    @property
    def title(self) -> str:
        """NAME/VERSION, for messages."""
        return f"{self.name}/{self.version}"

    @property
    def shard_files(self) -> Sequence[str]:
        """Files of the version that only its shards read, and its replica does not."""
        return (WEIGHTS_FILE,) if self.tensor_parallel else ()

    @classmethod
    def of(cls, storage: str, manifest: Manifest, config: ServeConfig) -> Self:
        """Return the configuration of a version, as measured by compile and overridden by the recipe.

        Raises:
            RecipeError: the version cannot be served as the recipe says.
        """
        batching, serving, key = config.batching, manifest.served(config), manifest.engine_key
        # Shards are created from a PyTorch module. A compiled file cannot be split.
        if config.tensor_parallel and not runs_module(key.engine):
            raise RecipeError(
                f"serve.tensor_parallel shards what PyTorch runs, and {manifest.name}/{manifest.version} is of "
                f"{key.engine}: run jobs.compile with compile.engines=[torch], or leave it out"
            )
        policy = BatchingPolicy(
            max_batch_size=serving.max_batch_size,
            by_length=_by_length(manifest, serving),
            preferred_batch_sizes=serving.preferred_batch_sizes,
            max_queue_delay_s=serving.timeout_us / 1e6,
            priority_levels=batching.priority_levels,
            # Without a default, the least urgent level, so that a priority is always a gain.
            default_priority=batching.default_priority or batching.priority_levels,
            queue_limit=config.queue_limit,
            default_timeout_s=config.request_timeout_s,
        )
        return cls(
            storage=storage,
            name=manifest.name,
            version=manifest.version,
            seal=manifest.seal,
            threads=serving.threads,
            policy=policy,
            tensor_parallel=config.tensor_parallel,
        )


def _by_length(manifest: Manifest, serving: ServingDefaults) -> RowsByLength | None:
    if not serving.max_batch_size_by_length or (axis := manifest.signature.length_axis) is None:
        return None
    return RowsByLength(*axis, tuple(sorted(serving.max_batch_size_by_length.items())))


class CandidateConfig(_Config):
    """A version on trial beside production, with its share of the requests that name no version."""

    version: VersionConfig
    percent: Percent


class Cascade(_Config):
    """Versions that run before the one in production. Each gets the rows that no earlier stage was sure of."""

    before: tuple[VersionConfig, ...]
    rule: CascadeRule

    def summary(self, production: VersionConfig) -> str:
        """Return a summary of the expected results, in lines for people."""
        return self.rule.summary([version.title for version in (*self.before, production)])


class Scaling(_Config):
    """A model's requirements on the replicas. Each replica holds all models."""

    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt = 1
    cpus: Annotated[float, Field(ge=0.0)] = 0.0
    """CPUs that a replica reserves for the model."""

    gpus: Annotated[float, Field(ge=0.0)] = 0.0
    """Share of the replica's only GPU that it reserves for the model."""

    resources: dict[str, float] = {}
    """Custom resources of Ray that a replica reserves. They select the kind of node."""

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
            gpus=serve.gpus_per_replica,
            resources=serve.resources,
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
            resources=_summed([model.resources for model in models]),
            latency_target_s=min((model.latency_target_s for model in scaled if model.latency_target_s), default=None),
            upscale_delay_s=min((model.upscale_delay_s for model in scaled), default=0.0),
            downscale_delay_s=max((model.downscale_delay_s for model in scaled), default=0.0),
        )


def _summed(resources: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the total amount of each resource."""
    kinds = dict.fromkeys(kind for amounts in resources for kind in amounts)
    return {kind: sum(amounts.get(kind, 0.0) for amounts in resources) for kind in kinds}


class DeployedModel(_Config):
    """The versions that answer under one name."""

    production: VersionConfig
    canary: CandidateConfig | None = None
    """A version that answers some requests in place of production."""

    shadow: CandidateConfig | None = None
    """A version that gets copies of some requests. Its answers are discarded."""

    cascade: Cascade | None = None
    """A cascade in place of production, except for requests that name a version."""

    scaling: Scaling = Scaling()

    @property
    def versions(self) -> tuple[VersionConfig, ...]:
        """All versions in memory, production first."""
        candidates = (candidate.version for candidate in (self.canary, self.shadow) if candidate)
        return (self.production, *candidates, *(self.cascade.before if self.cascade else ()))

    def lost_in(self, successor: Self) -> list[str]:
        """Return what is beside production here, and in the entry that replaces it no longer."""
        roles = ("canary", "shadow", "cascade")
        return [role for role in roles if getattr(self, role) and not getattr(successor, role)]


class Demand(_Config):
    """The resources that replicas need, whichever versions they hold."""

    scaling: Scaling
    sharded: tuple[TensorParallelConfig, ...] = ()
    """The shards beside each replica, for every sharded version."""

    @property
    def reserved(self) -> dict[str, float]:
        """Ray resources reserved by a replica and the processes of its sharded models."""
        reserved = {"CPU": self.scaling.cpus, "GPU": self.scaling.gpus, **self.scaling.resources}
        # Each shard is an actor beside the replica, so its resources come on top.
        for config in self.sharded:
            for kind, amount in config.reserved.items():
                reserved[kind] += config.size * amount
        return reserved


_SPARE_REQUESTS = 64
"""Room for requests that wait for no model: metadata, health, and those that a full queue refuses."""


class EndpointConfig(_Config):
    """The models of an endpoint by name, and the access to them."""

    models: dict[str, DeployedModel] = {}
    access: Access = Access()

    @property
    def scaling(self) -> Scaling:
        """The combined requirements of all models."""
        return Scaling.combined([model.scaling for model in self.models.values()])

    @property
    def versions(self) -> list[VersionConfig]:
        """All distinct versions in a replica's memory."""
        return list(dict.fromkeys(version for model in self.models.values() for version in model.versions))

    @property
    def demand(self) -> Demand:
        """The resources that the replicas need."""
        sharded = tuple(filter(None, (version.tensor_parallel for version in self.versions)))
        return Demand(scaling=self.scaling, sharded=sharded)

    def demand_with(self, name: str, serve: ServeConfig) -> Demand:
        """Return the resources that replicas need if they also serve a recipe's model, which has no version yet."""
        others = EndpointConfig(models={key: model for key, model in self.models.items() if key != name})
        scalings = [model.scaling for model in others.models.values()]
        return Demand(
            scaling=Scaling.combined([*scalings, Scaling.of(serve, measured=1)]),
            sharded=(*others.demand.sharded, *filter(None, [serve.tensor_parallel])),
        )

    @cached_property
    def max_requests(self) -> int:
        """The limit on concurrent requests in a replica: being read, waiting for an engine, and running.

        Each model's own queue refuses requests before. This limit only protects them.
        """
        policies = (version.policy for version in self.versions)
        # Each queue counts twice, because as many requests may wait to be encoded.
        return _SPARE_REQUESTS + sum(2 * policy.queue_limit + policy.max_batch_size for policy in policies)
