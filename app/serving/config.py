"""The configuration of an endpoint: its models, their versions and replicas, and the access to them."""

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.metadata import version as version_of
from typing import Any, Generic, Self, TypeVar

from pydantic import Field, NonNegativeInt, PositiveInt

from app.artifacts import WEIGHTS_FILE
from app.config import Percent, Role, ServeConfig, TensorParallelConfig
from app.engines.generation.base import GenerationSettings
from app.engines.registry import runs_module
from app.errors import RecipeError
from app.pages.words import duration, number
from app.repository.aliases import Alias
from app.repository.manifest import Manifest, ServingDefaults
from app.serving.access import Access
from app.serving.batching.scheduler import BatchingPolicy, RowsByLength
from app.serving.cascade.rule import CascadeRule
from app.serving.demand import Demand, FrozenConfig, Scaling
from app.serving.generation.policy import GenerationPolicy


class LoadedConfig(FrozenConfig, ABC):
    """A published version in memory. Equal configurations share an engine."""

    storage: str
    name: str
    version: PositiveInt
    seal: str
    """Its manifest's seal, because another version may get the number."""

    threads: PositiveInt
    """Threads of its engine."""

    @property
    def title(self) -> str:
        """NAME/VERSION, for messages."""
        return f"{self.name}/{self.version}"

    @property
    @abstractmethod
    def bounds(self) -> dict[str, str]:
        """The limits that it keeps, in words for a page."""


class VersionConfig(LoadedConfig):
    """A version that answers batches, and the batching of its requests."""

    policy: BatchingPolicy
    size_bytes: NonNegativeInt = 0
    """Size of the version's files."""
    tensor_parallel: TensorParallelConfig | None = None
    """The sharding of its matrices; None if they are not sharded."""

    @property
    def bounds(self) -> dict[str, str]:
        """The limits that it keeps, in words for a page."""
        return {
            "batches of at most": number(self.policy.max_batch_size),
            "longest wait for a batch": duration(self.policy.max_queue_delay_s),
            "queue": f"{self.policy.queue_limit:,} requests",
        }

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
            ).of("tensor_parallel.engine", "serve.tensor_parallel")
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
            size_bytes=manifest.size_bytes,
            tensor_parallel=config.tensor_parallel,
        )


def _by_length(manifest: Manifest, serving: ServingDefaults) -> RowsByLength | None:
    if not serving.max_batch_size_by_length or (axis := manifest.signature.length_axis) is None:
        return None
    return RowsByLength(*axis, tuple(sorted(serving.max_batch_size_by_length.items())))


class GeneratorConfig(LoadedConfig):
    """A version that generates tokens, and the bounds of its queue, its cache and its answers."""

    policy: GenerationPolicy
    cache_bytes: PositiveInt
    """Memory for the keys and values of all answers."""

    weights_bytes: NonNegativeInt
    """Size of the version's files, which its engine has in memory."""

    prefix_cache: bool = True
    on_gpu: bool = False
    tensor_parallel: PositiveInt = 1
    """Number of GPUs that share its matrices."""

    @property
    def bounds(self) -> dict[str, str]:
        """The limits that it keeps, in words for a page."""
        return {
            "answers at a time": number(self.policy.max_streams),
            "queue": f"{self.policy.queue_tokens:,} tokens, {self.policy.queue_limit:,} answers",
            "cache": f"{self.cache_bytes // 2**20:,} MiB",
        }

    @property
    def memory_bytes(self) -> int:
        """The memory that its engine needs beside the GPU's."""
        return self.weights_bytes + (0 if self.on_gpu else self.cache_bytes)

    @classmethod
    def of(cls, storage: str, manifest: Manifest, config: ServeConfig) -> Self:
        """Return the configuration of a language model, as the recipe says.

        Raises:
            RecipeError: the cache cannot hold the longest answer, or the replica lacks the GPU that the version needs.
        """
        generation, properties = config.generation, manifest.generation
        assert properties is not None  # the caller chooses by it
        on_gpu = manifest.engine_key.device == "gpu"
        _require_gpus(manifest, config)
        cache_bytes = generation.cache_mb * 2**20
        if cache_bytes < properties.longest_bytes:
            raise RecipeError(
                f"serve.generation.cache_mb is {generation.cache_mb}, and a prompt and its answer of "
                f"{properties.context_length} tokens, the length of {manifest.name}/{manifest.version}, need "
                f"{math.ceil(properties.longest_bytes / 2**20)}: give as many or more"
            ).of("generation.cache", "serve.generation.cache_mb")
        policy = GenerationPolicy(
            max_streams=generation.max_streams,
            queue_tokens=generation.queue_tokens,
            queue_limit=config.queue_limit,
            max_tokens=generation.max_tokens,
            priority_levels=generation.priority_levels,
            # Without a default, the least urgent level, so that a priority is always a gain.
            default_priority=generation.default_priority or generation.priority_levels,
            default_timeout_s=config.request_timeout_s,
        )
        return cls(
            storage=storage,
            name=manifest.name,
            version=manifest.version,
            seal=manifest.seal,
            threads=manifest.served(config).threads,
            policy=policy,
            cache_bytes=cache_bytes,
            weights_bytes=manifest.size_bytes,
            prefix_cache=generation.prefix_cache,
            on_gpu=on_gpu,
            tensor_parallel=generation.tensor_parallel,
        )

    def settings(self, manifest: Manifest) -> GenerationSettings:
        """Return the settings of its engine."""
        return GenerationSettings(
            precision=manifest.engine_key.precision,
            threads=self.threads,
            cache_bytes=self.cache_bytes,
            max_streams=self.policy.max_streams,
            prefix_cache=self.prefix_cache,
            speculation=manifest.generation.speculation if manifest.generation else None,
            device=manifest.engine_key.device,
            tensor_parallel=self.tensor_parallel,
        )


def _require_gpus(manifest: Manifest, config: ServeConfig) -> None:
    """Raise RecipeError unless a language model has the GPUs that it computes on, each for itself."""
    title, key = f"{manifest.name}/{manifest.version}", manifest.engine_key
    if key.device == "gpu" and config.gpus_per_replica < 1:
        raise RecipeError(
            f"serve.gpus_per_replica is {config.gpus_per_replica:g}, and {title} ({key}) takes a whole GPU: set it to "
            "1, or compile the model for the CPU"
        ).of("generation.gpu", "serve.gpus_per_replica")
    if key.device == "cpu" and config.generation.tensor_parallel > 1:
        raise RecipeError(
            f"serve.generation.tensor_parallel is {config.generation.tensor_parallel}, and {title} ({key}) computes on "
            "the CPU: leave it out, or compile the model with compile.engines=[vllm] and compile.gpus=1"
        ).of("generation.gpu", "serve.generation.tensor_parallel")


Version = TypeVar("Version", bound=LoadedConfig)


class CandidateConfig(FrozenConfig, Generic[Version]):
    """A version on trial beside production, with its share of the requests that name no version."""

    version: Version
    percent: Percent


class Cascade(FrozenConfig):
    """Versions that run before the one in production. Each gets the rows that no earlier stage was sure of."""

    before: tuple[VersionConfig, ...]
    rule: CascadeRule

    def summary(self, production: VersionConfig) -> str:
        """Return a summary of the expected results, in lines for people."""
        return self.rule.summary([version.title for version in (*self.before, production)])


class Deployed(FrozenConfig, Generic[Version]):
    """The versions that answer under one name."""

    production: Version
    canary: CandidateConfig[Version] | None = None
    """A version that answers some requests in place of production."""

    shadow: CandidateConfig[Version] | None = None
    """A version that gets copies of some requests. Its answers are discarded."""

    scaling: Scaling = Scaling()

    @classmethod
    def of(cls, versions: Mapping[Alias, Version], serve: ServeConfig, scaling: Scaling) -> Self:
        """Return the versions by their aliases, with the shares that a recipe gives the candidates."""

        def candidate_of(role: Role) -> CandidateConfig[Version] | None:
            candidate = serve.candidates.get(role)
            return CandidateConfig(version=versions[role], percent=candidate.percent) if candidate else None

        return cls(
            production=versions["production"],
            canary=candidate_of("canary"),
            shadow=candidate_of("shadow"),
            scaling=scaling,
        )

    @property
    def versions(self) -> tuple[Version, ...]:
        """All versions in memory, production first."""
        candidates = (candidate.version for candidate in (self.canary, self.shadow) if candidate)
        return (self.production, *candidates, *self.stages)

    @property
    def beside(self) -> tuple[str, ...]:
        """The roles beside production that are taken."""
        return tuple(role for role in ("canary", "shadow") if getattr(self, role))

    @property
    def stages(self) -> tuple[Version, ...]:
        """The stages of a cascade before production."""
        return ()

    @property
    def cascade_rule(self) -> CascadeRule | None:
        """The rule by which a cascade answers in place of production, if there is one."""
        return None

    @property
    def summary(self) -> str:
        """The expected results, in lines for people; empty if there is nothing to say."""
        return ""

    def lost_in(self, successor: "AnyDeployed") -> list[str]:
        """Return what is beside production here, and in the entry that replaces it no longer."""
        return [role for role in self.beside if role not in successor.beside]


class DeployedModel(Deployed[VersionConfig]):
    """The versions of a model that answers batches."""

    cascade: Cascade | None = None
    """A cascade in place of production, except for requests that name a version."""

    on_demand_bytes: PositiveInt | None = None
    """Total size of the models that a replica keeps loaded on demand. None: it is always loaded."""

    @property
    def stages(self) -> tuple[VersionConfig, ...]:
        """The stages of the cascade before production."""
        return self.cascade.before if self.cascade else ()

    @property
    def beside(self) -> tuple[str, ...]:
        """The roles beside production that are taken."""
        return (*super().beside, *(["cascade"] if self.cascade else []))

    @property
    def cascade_rule(self) -> CascadeRule | None:
        """The rule by which a cascade answers in place of production, if there is one."""
        return self.cascade.rule if self.cascade else None

    @property
    def summary(self) -> str:
        """The expected results of the cascade, in lines for people; empty without one."""
        return self.cascade.summary(self.production) if self.cascade else ""


class DeployedGenerator(Deployed[GeneratorConfig]):
    """The versions of a language model."""


AnyDeployed = DeployedModel | DeployedGenerator


_RELEASE = version_of("rayloom")

_SPARE_REQUESTS = 64
"""Room for requests that wait for no model: metadata, health, and those that a full queue refuses."""

_PASSED_ON = 1024
"""Room for requests that are passed on to another pool, which has limits of its own."""

_DRAIN_S, _DRAIN_STREAMS_S = 20.0, 120.0


class EndpointConfig(FrozenConfig):
    """The models of an endpoint by name, and the access to them. A name stands for one model, of either kind."""

    models: dict[str, DeployedModel] = Field(default_factory=dict)
    generators: dict[str, DeployedGenerator] = Field(default_factory=dict)
    """Language models."""

    access: Access = Access()

    elsewhere: dict[str, str] = Field(default_factory=dict)
    """The pools of the models that other replicas hold, by the models' names."""

    revision: str = ""
    """The version of the replicas. Serve reconfigures replicas of the same revision, and replaces all others."""

    @property
    def deployed(self) -> dict[str, AnyDeployed]:
        """All models by name."""
        return {**self.models, **self.generators}

    def without(self, name: str) -> Self:
        """Return the configuration that does not serve a name."""
        models = {key: model for key, model in self.models.items() if key != name}
        generators = {key: model for key, model in self.generators.items() if key != name}
        return self._with(models=models, generators=generators)

    def serving(self, name: str, model: AnyDeployed) -> Self:
        """Return the configuration that serves a model under a name, in place of what had the name."""
        rest = self.without(name)
        models, generators = rest.models, rest.generators
        if isinstance(model, DeployedGenerator):
            generators = {**generators, name: model}
        else:
            models = {**models, name: model}
        return self._with(models=models, generators=generators)

    def passing_on(self, elsewhere: Mapping[str, str]) -> Self:
        """Return the configuration that passes requests for these models on to their pools."""
        return self._with(elsewhere=dict(elsewhere))

    def with_access(self, access: Access) -> Self:
        """Return the configuration with another access."""
        return self._with(access=access)

    def on_new_replicas(self) -> Self:
        """Return the configuration with a new revision, so that Serve replaces the replicas."""
        return self._with(revision=f"{_RELEASE}-{secrets.token_hex(4)}")

    @property
    def is_of_this_release(self) -> bool:
        """Whether the replicas run this release, which can read the configuration."""
        return self.revision.startswith(f"{_RELEASE}-")

    def _with(self, **fields: Any) -> Self:
        # Not by model_copy, which would copy cached properties, too.
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | fields)

    @property
    def scaling(self) -> Scaling:
        """The combined requirements of all models."""
        return Scaling.combined([model.scaling for model in self.deployed.values()])

    @property
    def versions(self) -> list[VersionConfig]:
        """All distinct versions that are always in a replica's memory and answer batches."""
        resident = [model for model in self.models.values() if model.on_demand_bytes is None]
        return list(dict.fromkeys(version for model in resident for version in model.versions))

    @cached_property
    def on_demand(self) -> dict[str, VersionConfig]:
        """The versions that are loaded on demand, by name."""
        return {name: model.production for name, model in self.models.items() if model.on_demand_bytes is not None}

    @property
    def on_demand_bytes(self) -> int:
        """The largest total size that a model loaded on demand asks for."""
        return max((model.on_demand_bytes or 0 for model in self.models.values()), default=0)

    @property
    def generator_versions(self) -> list[GeneratorConfig]:
        """All distinct language models in a replica's memory."""
        return list(dict.fromkeys(version for model in self.generators.values() for version in model.versions))

    @property
    def drain_s(self) -> float:
        """The time that a replica which stops gives its requests to end."""
        return _DRAIN_STREAMS_S if self.generators or self.elsewhere else _DRAIN_S

    @property
    def full_loads(self) -> list[int]:
        """The requests that fill each version: a call of its engine, or its streams."""
        batched = [version.policy.max_batch_size for version in (*self.versions, *self.on_demand.values())]
        return [*batched, *(version.policy.max_streams for version in self.generator_versions)]

    @property
    def demand(self) -> Demand:
        """The resources that the replicas need."""
        sharded = tuple(filter(None, (version.tensor_parallel for version in self.versions)))
        memory_bytes = sum(version.memory_bytes for version in self.generator_versions)
        return Demand(scaling=self.scaling, sharded=sharded, memory_bytes=memory_bytes)

    def demand_with(self, name: str, serve: ServeConfig) -> Demand:
        """Return the resources that replicas need if they also serve a recipe's model, which has no version yet."""
        others = self.without(name)
        demand, scalings = others.demand, [model.scaling for model in others.deployed.values()]
        return demand.model_copy(
            update={
                "scaling": Scaling.combined([*scalings, Scaling.of(serve, measured=1)]),
                "sharded": (*demand.sharded, *filter(None, [serve.tensor_parallel])),
            }
        )

    @cached_property
    def max_requests(self) -> int:
        """The limit on concurrent requests in a replica: being read, waiting for an engine, and running.

        Each model's own queue refuses requests before. This limit only protects them.
        """
        policies = (version.policy for version in (*self.versions, *self.on_demand.values()))
        # Each queue counts twice, because as many requests may wait to be encoded.
        batched = sum(2 * policy.queue_limit + policy.max_batch_size for policy in policies)
        bounds = (version.policy for version in self.generator_versions)
        generated = sum(2 * bound.queue_limit + bound.max_streams for bound in bounds)
        return _SPARE_REQUESTS + batched + generated + _PASSED_ON * len(set(self.elsewhere.values()))
