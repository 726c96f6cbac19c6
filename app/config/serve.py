"""The recipe's ``serve``: the endpoint."""

from itertools import combinations
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from app.config.placement import LabelSelector, Placement
from app.config.rollout import CanaryConfig, Role, ScalingConfig, ShadowConfig
from app.config.section import (
    Amount,
    Count,
    CustomResources,
    NumberOrRangeFromZero,
    PositiveAmount,
    Section,
    VersionReference,
)
from app.errors import RecipeError


class _PriorityConfig(Section):
    priority_levels: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=1, description="number of priorities that a request can have; 1 is the most urgent"
    )
    default_priority: PositiveInt | None = Field(
        default=None, description="priority of requests that name none; default: the last"
    )

    @model_validator(mode="after")
    def _default_priority_is_a_level(self) -> Self:
        if (given := self.default_priority or 1) > self.priority_levels:
            raise ValueError(f"default_priority is {given}: expected 1 to priority_levels, {self.priority_levels}")
        return self


class BatchingConfig(_PriorityConfig):
    """How requests are batched. Keys that are left out have the values that jobs.compile measured."""

    max_batch_size: Count | None = Field(default=None, description="maximum rows in a call of the engine")
    preferred_batch_sizes: list[PositiveInt] | None = Field(
        default=None, description="numbers of rows at which a batch is not held back for more"
    )
    timeout_us: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="microseconds for which a request is held back for others while the engine is free"
    )


def _absolute(path: str) -> str:
    if not Path(path).is_absolute():
        raise RecipeError(
            f"{path!r} is a relative path, and a job runs in a copy of the folder: give an absolute one"
        ).of("path.relative")
    return path


LocalFile = Annotated[str, AfterValidator(_absolute)]
"""A file on the machines of the cluster, not in storage."""


class TlsConfig(Section):
    """HTTPS, and with HAProxy as the ingress gRPC over TLS."""

    certificate: LocalFile = Field(description="absolute path of a PEM file with the certificate and its chain")
    key: LocalFile = Field(description="absolute path of its private key, a PEM file without a password")


class TensorParallelConfig(Section):
    """How a model's matrices are sharded across the processes of each replica."""

    size: Annotated[int, Field(ge=2)] = Field(
        description="number of processes; it must divide the model's key-value heads"
    )
    cpus_per_process: PositiveAmount = Field(default=1.0, description="CPUs that each process reserves in Ray")
    gpus_per_process: Annotated[int, Field(ge=0, le=1)] = Field(
        default=0, description="GPUs that each process reserves in Ray; 0: it computes on CPUs"
    )

    @property
    def reserved(self) -> dict[str, float]:
        """Resources that each process reserves in Ray, without zeros, which Ray refuses."""
        reserved = {"CPU": self.cpus_per_process, "GPU": float(self.gpus_per_process)}
        return {kind: amount for kind, amount in reserved.items() if amount}


class CascadeConfig(Section):
    """Each model answers the rows of which it is confident. The recipe's own model answers the rest."""

    before: Annotated[list[VersionReference], Field(min_length=1, max_length=3)] = Field(
        description="models that get requests first, cheapest first: NAME for its production version, or NAME/VERSION"
    )
    accuracy_floor: Annotated[float, Field(ge=0.8, le=0.999)] = Field(
        default=0.995, description="minimum accuracy of the cascade, as a share of this model's own"
    )


class GenerationConfig(_PriorityConfig):
    """How a language model answers. Only for versions that generate tokens."""

    max_streams: Count = Field(
        default=64, description="maximum number of answers that a replica generates at a time; further ones wait"
    )
    cache_mb: PositiveInt = Field(
        default=1024, description="memory of a replica in MiB for the keys and values of all answers"
    )
    queue_tokens: PositiveInt = Field(
        default=65_536,
        description="maximum tokens of prompts and promised answers that wait in a replica; further requests are "
        "refused with the time after which to try again",
    )
    max_tokens: PositiveInt | None = Field(
        default=None, description="limit of an answer for requests that set none; default: up to the model's length"
    )
    prefix_cache: bool = Field(default=True, description="reuse the cache of prompts that begin alike")
    tensor_parallel: PositiveInt = Field(
        default=1,
        description="for a version of vllm on a GPU: number of GPUs of a replica, which share the model's matrices",
    )


class OnDemandConfig(Section):
    """A model that is loaded at its first request, and let go when others of its pool need the memory."""

    memory_mb: PositiveInt = Field(
        description="maximum size in MiB of the files of all models that a replica keeps loaded on demand; the largest "
        "value of the pool's models counts"
    )


class ServeConfig(Section):
    """The endpoint. Replicas and threads that are left out have the values that jobs.compile measured."""

    version: PositiveInt | None = Field(
        default=None, description="version to make production; default: production as it is"
    )
    host: str = Field(
        default="127.0.0.1", description="address to listen on; several nodes need 0.0.0.0, every interface"
    )
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None, description="default: the port that the local cluster chose, else 8000"
    )
    grpc_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None, description="default: the port that the local cluster chose, else 8001"
    )
    auth: Literal["auto", "token", "none"] = Field(
        default="auto", description="auto: a token is required if other machines can reach the host"
    )
    token_file: LocalFile | None = Field(
        default=None, description="absolute path, mode 600; default: endpoint_token in ~/.rayloom, created if missing"
    )
    tls: TlsConfig | None = Field(default=None, description="serve HTTPS; default: HTTP")
    batching: BatchingConfig = BatchingConfig()
    generation: GenerationConfig = GenerationConfig()
    queue_limit: Count = Field(
        default=256, description="maximum number of requests that wait in a replica; further ones are refused"
    )
    request_timeout_s: PositiveFloat | None = Field(
        default=None, description="maximum seconds until an answer; a request may ask for less"
    )
    canary: CanaryConfig | None = Field(default=None, description="default: production answers every request")
    shadow: ShadowConfig | None = Field(default=None, description="default: requests are not copied")
    pool: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")] | None = Field(
        default=None,
        description="name of the replicas that hold this model and the others of this pool; default: those that all "
        "models without a pool share",
    )
    replicas: NumberOrRangeFromZero | None = Field(
        default=None,
        description="number of replicas, or [min, max] by load; the models of a pool share them, so the largest number "
        "counts; in a pool, min may be 0: the first request after a pause starts a replica",
    )
    scaling: ScalingConfig = ScalingConfig()
    cpus_per_replica: Amount = Field(
        default=0.0,
        description="CPUs that each replica reserves in Ray for this model; with 0, training can run beside it",
    )
    gpus_per_replica: Annotated[Amount, Field(le=1.0)] = Field(
        default=0.0,
        description="share of a GPU that each replica reserves in Ray for this model, such as 0.25; 0: none",
    )
    resources: CustomResources = Field(
        default={},
        description="custom resources that each replica reserves in Ray for this model; they select the node",
    )
    labels: LabelSelector = Field(
        default={}, description="labels of the replicas' nodes, as a label selector of Ray: {market: on-demand}"
    )
    fallback_labels: LabelSelector = Field(
        default={},
        description="labels of the nodes to take where none with serve.labels has room, such as {market: spot}; their "
        "replicas are stopped first",
    )
    above_training: bool = Field(
        default=False,
        description="replicas have priority over training for the resources that they reserve: an elastic training "
        "shrinks, one of fixed size pauses, and both come back",
    )
    threads: PositiveInt | None = Field(default=None, description="threads of a replica's engine")
    tensor_parallel: TensorParallelConfig | None = Field(
        default=None, description="for a model that is too large for one device, compiled with compile.engines=[torch]"
    )
    ready_timeout_s: PositiveFloat = Field(
        default=600.0,
        description="maximum seconds until all replicas have loaded; after that, the previous models stay",
    )
    on_demand: OnDemandConfig | None = Field(
        default=None, description="load the model at its first request; default: before the replica gets requests"
    )
    cascade: CascadeConfig | None = Field(
        default=None, description="cheaper models that answer the requests of which they are confident"
    )

    @property
    def reserved(self) -> dict[str, float]:
        """Resources that each replica reserves in Ray for this model."""
        return {"CPU": self.cpus_per_replica, "GPU": self.gpus_per_replica, **self.resources}

    @property
    def placement(self) -> Placement:
        """The nodes that may hold a replica of this model alone, and what Ray reserves for it."""
        return Placement(self.reserved, self.labels, self.fallback_labels)

    @property
    def replica_range(self) -> tuple[int, int] | None:
        """Minimum and maximum number of replicas; None if the recipe sets none."""
        return (self.replicas, self.replicas) if isinstance(self.replicas, int) else self.replicas

    @property
    def candidates(self) -> dict[Role, CanaryConfig | ShadowConfig]:
        """The canary and the shadow, by role."""
        candidates: dict[Role, CanaryConfig | ShadowConfig] = {}
        if self.canary:
            candidates["canary"] = self.canary
        if self.shadow:
            candidates["shadow"] = self.shadow
        return candidates

    @model_validator(mode="after")
    def _versions_differ(self) -> Self:
        named = {
            "version": self.version,
            **{f"{role}.version": candidate.version for role, candidate in self.candidates.items()},
        }
        for one, other in combinations(named, 2):
            if named[one] is not None and named[one] == named[other]:
                raise RecipeError(f"{one} and {other} are both {named[one]}: name different versions").of(
                    "versions.equal"
                )
        return self

    @model_validator(mode="after")
    def _stages_fit_in_one_process(self) -> Self:
        if self.cascade and self.tensor_parallel:
            raise ValueError("a cascade is calibrated in one process: leave it or tensor_parallel out")
        return self

    @model_validator(mode="after")
    def _on_demand_is_one_version(self) -> Self:
        beside = [*self.candidates, *(key for key in ("cascade", "tensor_parallel") if getattr(self, key))]
        if self.on_demand and beside:
            raise RecipeError(f"on_demand and {beside[0]} are given: leave one of them out").of("keys.contradict")
        return self

    @model_validator(mode="after")
    def _shared_replicas_stay(self) -> Self:
        if self.pool is None and self.replica_range and not self.replica_range[0]:
            raise RecipeError(
                f"replicas is [0, {self.replica_range[1]}], and the replicas that all models share always run: set "
                "pool, or replicas to [1, max]"
            ).of("replicas.zero")
        return self

    @model_validator(mode="after")
    def _a_target_has_a_range(self) -> Self:
        min_replicas, max_replicas = self.replica_range or (1, 1)
        if self.scaling.latency_target_ms is not None and min_replicas == max_replicas:
            raise RecipeError(
                f"scaling.latency_target_ms is {self.scaling.latency_target_ms:g}, and the number of replicas is "
                "fixed: set replicas to [min, max]"
            ).of("replicas.fixed")
        return self

    @model_validator(mode="after")
    def _a_fallback_has_something_before_it(self) -> Self:
        if self.fallback_labels and not self.labels:
            raise RecipeError(
                f"fallback_labels are {self.fallback_labels}, and there are no labels to fall back from: set labels, "
                "or give these as labels"
            ).of("labels.fallback")
        return self

    @model_validator(mode="after")
    def _what_comes_first_is_counted(self) -> Self:
        if self.above_training and not any(self.reserved.values()) and not self.tensor_parallel:
            raise RecipeError(
                "above_training is true, and a replica reserves nothing that training could give up: set "
                "cpus_per_replica or gpus_per_replica"
            ).of("priority.nothing")
        if self.above_training and self.labels:
            raise RecipeError(
                "above_training and labels are given, and Ray heeds no labels when it takes room from training: select "
                "the nodes with resources, or leave one of them out"
            ).of("keys.contradict")
        return self

    @model_validator(mode="after")
    def _token_is_asked_for(self) -> Self:
        if self.token_file and self.auth == "none":
            raise RecipeError("token_file is given, and auth is none: leave one of them out").of("keys.contradict")
        return self
