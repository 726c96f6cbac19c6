"""What an endpoint serves, and how."""

from typing import Self

from pydantic import BaseModel

from app.config import ServeConfig
from app.repository.manifest import ServingDefaults
from app.serving.batching.policy import BatchingPolicy


class ServedModelConfig(BaseModel):
    """One model of an endpoint."""

    storage: str
    version: int
    threads: int
    """Of its engine."""

    policy: BatchingPolicy

    @classmethod
    def of(cls, storage: str, version: int, serving: ServingDefaults, config: ServeConfig) -> Self:
        """A version, served as compile measured and the recipe says."""
        batching = config.batching
        policy = BatchingPolicy(
            max_batch_size=serving.max_batch_size,
            preferred_batch_sizes=serving.preferred_batch_sizes,
            max_queue_delay_s=serving.timeout_us / 1e6,
            priority_levels=batching.priority_levels,
            default_priority=batching.default_priority or batching.priority_levels,
            queue_limit=config.queue_limit,
            default_timeout_s=config.request_timeout_s,
        )
        return cls(storage=storage, version=version, threads=serving.threads, policy=policy)


class EndpointConfig(BaseModel):
    """Every model of an endpoint, by name."""

    models: dict[str, ServedModelConfig] = {}
