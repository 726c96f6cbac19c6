"""The configurations of an endpoint's pools, and which pool serves a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from app.errors import ClusterError
from app.serving.access import Access
from app.serving.config import AnyDeployed, EndpointConfig
from app.serving.pools import SHARED, Pool, named


@dataclass(frozen=True)
class PoolConfigs:
    """What each pool serves. The shared pool is deployed as soon as any other is."""

    by_pool: Mapping[Pool, EndpointConfig] = field(default_factory=dict)

    def __getitem__(self, pool: Pool) -> EndpointConfig:
        return self.by_pool.get(pool, EndpointConfig())

    @property
    def shared(self) -> EndpointConfig:
        """The shared pool, whose access is that of all pools."""
        return self[SHARED]

    @property
    def deployed(self) -> dict[str, AnyDeployed]:
        """All models by name."""
        return {name: model for config in self.by_pool.values() for name, model in config.deployed.items()}

    def of(self, name: str) -> Pool:
        """Return the pool that serves a model; the shared one if none does."""
        return next((pool for pool, config in self.by_pool.items() if name in config.deployed), SHARED)

    def serving(self, pool: Pool, name: str, model: AnyDeployed) -> Self:
        """Return the pools with a model in one of them, in place of what has its name there.

        Raises:
            ClusterError: another pool serves the name, or the pool's models ask for different nodes.
        """
        self.require_free(pool, name)
        for other, beside in self[pool].without(name).deployed.items():
            for key in ("labels", "fallback_labels"):
                _require_same_nodes(key, name, getattr(model.scaling, key), other, getattr(beside.scaling, key))
        return self._with({**self.by_pool, pool: self[pool].serving(name, model)})

    def with_access(self, access: Access) -> Self:
        """Return the pools with another access."""
        by_pool = {pool: config.with_access(access) for pool, config in self.by_pool.items()}
        return type(self)({**by_pool, SHARED: self.shared.with_access(access)})

    def on_new_replicas(self, pool: Pool) -> Self:
        """Return the pools with new replicas in one of them, and in those of another release. Others keep theirs."""
        return type(self)(
            {
                name: config.on_new_replicas() if name == pool or not config.is_of_this_release else config
                for name, config in self.by_pool.items()
            }
        )

    def without(self, name: str) -> Self:
        """Return the pools that do not serve a name. A pool is removed with its last model, but not the shared one."""
        left = {pool: config.without(name) for pool, config in self.by_pool.items()}
        return self._with({pool: config for pool, config in left.items() if config.deployed or pool is SHARED})

    def require_free(self, pool: Pool, name: str) -> None:
        """Raise ClusterError if another pool than ``pool`` serves a name."""
        if name in self.deployed and (other := self.of(name)) != pool:
            raise ClusterError(
                f"model {name!r} is served by {named(other)}, and serve.pool asks for {named(pool)}: undeploy it "
                f"first, or set serve.pool to {other or 'null'}"
            ).of("pool.other", "serve.pool")

    def changed_from(self, before: "PoolConfigs") -> list[Pool]:
        """Return the pools that differ, in the order in which to change them.

        A shared pool that is missing comes first: HAProxy and access depend on it. Otherwise pools with a model more
        come before the shared one, which passes requests on to them. Removed pools come last.
        """
        pools = dict.fromkeys([*self.by_pool, *before.by_pool])
        differing = [pool for pool in pools if self.by_pool.get(pool) != before.by_pool.get(pool)]
        has_shared = SHARED in before.by_pool
        return sorted(differing, key=lambda pool: (pool not in self.by_pool, (pool is SHARED) == has_shared))

    def _with(self, by_pool: Mapping[Pool, EndpointConfig]) -> Self:
        """Return these configurations, of which the shared one knows where the models of the others are."""
        elsewhere = {name: pool for pool, config in by_pool.items() if pool is not SHARED for name in config.deployed}
        shared = by_pool.get(SHARED, EndpointConfig()).passing_on(elsewhere)
        return type(self)({**by_pool, SHARED: shared})


def _require_same_nodes(key: str, name: str, labels: Mapping[str, str], other: str, others: Mapping[str, str]) -> None:
    if labels != others:
        raise ClusterError(
            f"serve.{key} of {name!r} are {dict(labels)}, and those of {other!r} in the same pool {dict(others)}: "
            f"give the models of a pool the same {key}, or different pools"
        ).of("pool.labels", f"serve.{key}")
