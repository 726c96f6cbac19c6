"""What an endpoint serves, and how."""

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
from app.serving.batching.policy import BatchingPolicy, RowsByLength
from app.serving.cascade.rule import CascadeRule


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True)


class VersionConfig(_Config):
    """A published version in memory, and how requests to it are joined. Those that are equal share an engine."""

    storage: str
    name: str
    version: PositiveInt
    threads: PositiveInt
    """Of its engine."""

    policy: BatchingPolicy
    tensor_parallel: TensorParallelConfig | None = None
    """How its matrices are sharded; None: they are not."""

    @property
    def title(self) -> str:
        """As people write it: NAME/VERSION."""
        return f"{self.name}/{self.version}"

    @property
    def shard_files(self) -> Sequence[str]:
        """Files of the version that its shards read, each for itself, and its replica does not."""
        return (WEIGHTS_FILE,) if self.tensor_parallel else ()

    @classmethod
    def of(cls, storage: str, manifest: Manifest, config: ServeConfig) -> Self:
        """A version, served as compile measured and the recipe says. Raises RecipeError if it cannot be."""
        batching, serving, key = config.batching, manifest.served(config), manifest.engine_key
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
            default_priority=batching.default_priority or batching.priority_levels,
            queue_limit=config.queue_limit,
            default_timeout_s=config.request_timeout_s,
        )
        return cls(
            storage=storage,
            name=manifest.name,
            version=manifest.version,
            threads=serving.threads,
            policy=policy,
            tensor_parallel=config.tensor_parallel,
        )


def _by_length(manifest: Manifest, serving: ServingDefaults) -> RowsByLength | None:
    if not serving.max_batch_size_by_length or (axis := manifest.signature.length_axis) is None:
        return None
    return RowsByLength(*axis, tuple(sorted(serving.max_batch_size_by_length.items())))


class CandidateConfig(_Config):
    """A version beside the one in production, and how many of the requests that name no version it gets."""

    version: VersionConfig
    percent: Percent


class Cascade(_Config):
    """Versions that are asked before the one in production, each for the rows that none before it was sure of."""

    before: tuple[VersionConfig, ...]
    rule: CascadeRule

    def summary(self, production: VersionConfig) -> str:
        """What to expect, in lines for people."""
        return self.rule.summary([each.title for each in (*self.before, production)])


class Scaling(_Config):
    """What a model asks of the replicas, each of which holds every model."""

    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt = 1
    cpus: Annotated[float, Field(ge=0.0)] = 0.0
    """That a replica reserves for it."""

    gpus: Annotated[float, Field(ge=0.0)] = 0.0
    """The same, as a share of the one GPU that a replica's engines use."""

    resources: dict[str, float] = {}
    """Custom resources of Ray that a replica reserves. They select the kind of node."""

    latency_target_s: float | None = None
    """Of 95 in 100 of its requests. None: only how many requests there are decides."""

    upscale_delay_s: float = 0.0
    downscale_delay_s: float = 0.0

    @classmethod
    def together(cls, wishes: Sequence[Self]) -> Self:
        """What every model is content with: the most replicas that one asks for, each with the CPUs and GPUs of all.

        Of delays those of models that scale: the shortest until there are more, the longest until there are fewer.
        """
        scaling = [each for each in wishes if each.min_replicas < each.max_replicas]
        return cls(
            min_replicas=max((each.min_replicas for each in wishes), default=1),
            max_replicas=max((each.max_replicas for each in wishes), default=1),
            cpus=sum(each.cpus for each in wishes),
            gpus=sum(each.gpus for each in wishes),
            resources=_summed([wish.resources for wish in wishes]),
            latency_target_s=min((each.latency_target_s for each in scaling if each.latency_target_s), default=None),
            upscale_delay_s=min((each.upscale_delay_s for each in scaling), default=0.0),
            downscale_delay_s=max((each.downscale_delay_s for each in scaling), default=0.0),
        )


def _summed(resources: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the total amount of each resource."""
    kinds = dict.fromkeys(kind for amounts in resources for kind in amounts)
    return {kind: sum(amounts.get(kind, 0.0) for amounts in resources) for kind in kinds}


class DeployedModel(_Config):
    """The versions that answer under one name."""

    production: VersionConfig
    canary: CandidateConfig | None = None
    """Answers some requests in place of production."""

    shadow: CandidateConfig | None = None
    """Gets copies of some requests, and answers none of them."""

    cascade: Cascade | None = None
    """Answers in place of production, except where a request names its version."""

    scaling: Scaling = Scaling()

    @property
    def versions(self) -> tuple[VersionConfig, ...]:
        """All that are held in memory, production first."""
        tried = (share.version for share in (self.canary, self.shadow) if share)
        return (self.production, *tried, *(self.cascade.before if self.cascade else ()))


_SPARE_REQUESTS = 64
"""Beyond what waits for the models: metadata, health, and what comes while a queue is full, to be told so."""


class EndpointConfig(_Config):
    """Every model of an endpoint, by the name that it is asked by, and who may ask."""

    models: dict[str, DeployedModel] = {}
    access: Access = Access()

    @property
    def scaling(self) -> Scaling:
        """Of the replicas, for all models together."""
        return Scaling.together([model.scaling for model in self.models.values()])

    @property
    def versions(self) -> list[VersionConfig]:
        """All that a replica holds in memory, each once."""
        return list(dict.fromkeys(version for model in self.models.values() for version in model.versions))

    @property
    def reserved(self) -> dict[str, float]:
        """By a replica in Ray, and by the processes of its sharded models."""
        reserved = {"CPU": self.scaling.cpus, "GPU": self.scaling.gpus, **self.scaling.resources}
        for config in filter(None, (version.tensor_parallel for version in self.versions)):
            for kind, amount in config.reserved.items():
                reserved[kind] += config.size * amount
        return reserved

    @cached_property
    def max_requests(self) -> int:
        """That a replica takes at a time: requests wait to be read, wait for the engine, and run.

        Each model's queue refuses with an answer of its own; this only guards them.
        """
        policies = (version.policy for version in self.versions)
        return _SPARE_REQUESTS + sum(2 * each.queue_limit + each.max_batch_size for each in policies)
