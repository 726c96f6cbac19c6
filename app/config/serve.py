"""The recipe's ``serve``: the endpoint."""

from itertools import combinations
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from app.config.cascade import CascadeConfig
from app.config.rollout import CanaryConfig, Role, ScalingConfig, ShadowConfig
from app.config.section import CustomResources, NumberOrRange, Section


class BatchingConfig(Section):
    """How requests are joined into one call of the engine. Keys left out take what jobs.compile measured."""

    max_batch_size: PositiveInt | None = Field(default=None, description="rows in a call of the engine, at most")
    preferred_batch_sizes: list[PositiveInt] | None = Field(
        default=None, description="rows at which a call waits for no more"
    )
    timeout_us: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="microseconds that a request is held back for more, while the engine is free"
    )
    priority_levels: PositiveInt = Field(default=1, description="a request says its own; 1 is the most urgent")
    default_priority: PositiveInt | None = Field(
        default=None, description="of requests that say none; default: the last"
    )

    @model_validator(mode="after")
    def _default_priority_is_a_level(self) -> Self:
        if (given := self.default_priority or 1) > self.priority_levels:
            raise ValueError(f"default_priority is {given}: expected 1 to priority_levels, {self.priority_levels}")
        return self


def _absolute(path: str) -> str:
    if not Path(path).is_absolute():
        raise ValueError(f"{path!r} is a relative path, and a job runs in a copy of the folder: give an absolute one")
    return path


LocalFile = Annotated[str, AfterValidator(_absolute)]
"""A file on the machines of the cluster, not in storage."""


class TlsConfig(Section):
    """HTTPS, and with HAProxy as the ingress gRPC over TLS."""

    certificate: LocalFile = Field(description="absolute path of a PEM file, the chain behind it included")
    key: LocalFile = Field(description="absolute path of its private key, in PEM without a password")


class TensorParallelConfig(Section):
    """How the matrices of a model are sharded: across processes of every replica."""

    size: Annotated[int, Field(ge=2)] = Field(description="processes; it divides the model's heads of keys and values")
    cpus_per_process: Annotated[float, Field(gt=0.0)] = Field(default=1.0, description="that each reserves in Ray")
    gpus_per_process: Annotated[int, Field(ge=0, le=1)] = Field(default=0, description="0: they compute on CPUs")

    @property
    def reserved(self) -> dict[str, float]:
        """By each process in Ray, which takes no zeros."""
        reserved = {"CPU": self.cpus_per_process, "GPU": float(self.gpus_per_process)}
        return {kind: amount for kind, amount in reserved.items() if amount}


class ServeConfig(Section):
    """The endpoint. Replicas and threads that are left out are as jobs.compile measured them."""

    version: PositiveInt | None = Field(
        default=None, description="version to make production; default: production as it is"
    )
    host: str = Field(
        default="127.0.0.1", description="address to listen on; 0.0.0.0: every interface, which several nodes need"
    )
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None, description="default: the port that the local cluster chose, else 8000"
    )
    grpc_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None, description="default: the port that the local cluster chose, else 8001"
    )
    auth: Literal["auto", "token", "none"] = Field(
        default="auto", description="auto: a token is asked for where other machines reach the host"
    )
    token_file: LocalFile | None = Field(
        default=None, description="absolute path, mode 600; default: endpoint_token in ~/.rayloom, made if missing"
    )
    tls: TlsConfig | None = Field(default=None, description="serve HTTPS; default: HTTP")
    batching: BatchingConfig = BatchingConfig()
    queue_limit: PositiveInt = Field(default=256, description="requests that wait in a replica; one more is refused")
    request_timeout_s: PositiveFloat | None = Field(
        default=None, description="seconds until an answer; a request that asks for less gets less"
    )
    canary: CanaryConfig | None = Field(default=None, description="default: production answers every request")
    shadow: ShadowConfig | None = Field(default=None, description="default: requests are not copied")
    replicas: NumberOrRange | None = Field(
        default=None, description="or [least, most], by load; each holds every model, so the largest wish counts"
    )
    scaling: ScalingConfig = ScalingConfig()
    cpus_per_replica: Annotated[float, Field(ge=0.0)] = Field(
        default=0.0,
        description="CPUs that each replica reserves in Ray for this model; 0 leaves a laptop's cores to a training",
    )
    gpus_per_replica: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        default=0.0, description="share of a GPU that each replica reserves in Ray for this model, as 0.25; 0: none"
    )
    resources: CustomResources = Field(
        default={}, description="custom resources that each replica reserves in Ray for this model; select the node"
    )
    threads: PositiveInt | None = Field(default=None, description="threads of a replica's engine")
    tensor_parallel: TensorParallelConfig | None = Field(
        default=None, description="for a model that is too large for one device, compiled with compile.engines=[torch]"
    )
    ready_timeout_s: PositiveFloat = Field(
        default=600.0, description="seconds that replicas may take to load; then what was served before stays"
    )
    cascade: CascadeConfig | None = Field(default=None, description="cheaper models that answer what they are sure of")

    @property
    def reserved(self) -> dict[str, float]:
        """Resources that each replica reserves in Ray for this model."""
        return {"CPU": self.cpus_per_replica, "GPU": self.gpus_per_replica, **self.resources}

    @property
    def replica_range(self) -> tuple[int, int] | None:
        """Least and most replicas, if the recipe says how many."""
        return (self.replicas, self.replicas) if isinstance(self.replicas, int) else self.replicas

    @property
    def candidates(self) -> dict[Role, CanaryConfig | ShadowConfig]:
        """What is tried beside the version in production."""
        candidates: dict[Role, CanaryConfig | ShadowConfig] = {}
        if self.canary:
            candidates["canary"] = self.canary
        if self.shadow:
            candidates["shadow"] = self.shadow
        return candidates

    @model_validator(mode="after")
    def _versions_differ(self) -> Self:
        named = {"version": self.version, **{f"{role}.version": each.version for role, each in self.candidates.items()}}
        for one, other in combinations(named, 2):
            if named[one] is not None and named[one] == named[other]:
                raise ValueError(f"{one} and {other} are both {named[one]}: name different versions")
        return self

    @model_validator(mode="after")
    def _stages_fit_in_one_process(self) -> Self:
        if self.cascade and self.tensor_parallel:
            raise ValueError("a cascade is calibrated in one process: leave it or tensor_parallel out")
        return self

    @model_validator(mode="after")
    def _a_target_has_a_range(self) -> Self:
        least, most = self.replica_range or (1, 1)
        if self.scaling.latency_target_ms is not None and least == most:
            raise ValueError(
                f"scaling.latency_target_ms is {self.scaling.latency_target_ms:g}, and replicas do not vary: make them "
                "[least, most]"
            )
        return self

    @model_validator(mode="after")
    def _token_is_asked_for(self) -> Self:
        if self.token_file and self.auth == "none":
            raise ValueError("token_file is given, and auth is none: leave one of them out")
        return self
