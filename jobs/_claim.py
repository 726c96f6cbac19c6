"""The endpoint's claim on room above training: an actor that claims it for the replicas that Serve wants."""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import ray
from ray.exceptions import RayActorError
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_fixed

from app.best_effort import BestEffort, best_effort
from app.cluster.coordinator_internals import PLACED, RENEW_S, WAITING, Bundle, claim, on_node
from app.serving.config import EndpointConfig
from app.serving.demand import Demand
from jobs._serve_internals import Deployed, deployed_in

_NAME, _NAMESPACE = "claims-room-for-the-endpoint", "rayloom"
_LOOK_S = 1.0
_START_TIMEOUT_S = 60.0
_IDLE_S = 60.0
"""Time without a pool above training after which the actor ends."""


def keep_claim(deployment: str) -> None:
    """Start to claim room for the pools above training, or warn. Their replicas belong to this deployment."""
    best_effort(lambda: _start(deployment), "no room can be taken from training", "the deployment")


@retry(retry=retry_if_exception_type(RayActorError), stop=stop_after_attempt(3), wait=wait_fixed(1.0), reraise=True)
def _start(deployment: str) -> None:
    options = {"name": _NAME, "namespace": _NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    claimant = _Claimant.options(**options).remote(deployment)  # type: ignore[attr-defined]
    # The actor may be about to end, because there was no such pool.
    ray.get(claimant.stay.remote(), timeout=_START_TIMEOUT_S)


def held_by(pools: Sequence[tuple[Demand, Deployed]]) -> list[Bundle]:
    """Return what replicas with a node hold. Ray may have put the shards beside them on any node."""
    replicas = [on_node(demand.bundles[0], address) for demand, found in pools for address in found.addresses]
    shards = [
        shard
        for demand, found in pools
        for _ in range(len(found.addresses) - found.loading)
        for shard in demand.bundles[1:]
    ]
    # Those of a certain node come first, because the coordinator may put any other there, too.
    return replicas + shards


def awaited_by(pools: Sequence[tuple[Demand, Deployed]]) -> list[Bundle]:
    """Return what replicas wait for: those without a node, and the shards of those that load."""
    return [
        bundle
        for demand, found in pools
        for bundle in demand.bundles * found.waiting + demand.bundles[1:] * found.loading
    ]


@ray.remote(num_cpus=0, max_restarts=-1)
class _Claimant:
    """Claims what the replicas of pools above training reserve. Without it, the claims expire within a minute."""

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment
        self._placed, self._waiting = _Claim(PLACED), _Claim(WAITING)
        self._needed_s = time.monotonic()
        self._looking = BestEffort("no room can be claimed for the endpoint", "the endpoint")
        threading.Thread(target=self._follow, daemon=True, name="claim").start()

    def stay(self) -> None:
        """Stay for a while, even if there is nothing to claim yet."""
        self._needed_s = time.monotonic()

    def _follow(self) -> None:
        while time.monotonic() - self._needed_s < _IDLE_S:
            self._looking(self._look)
            time.sleep(_LOOK_S)
        ray.kill(ray.get_runtime_context().current_actor)

    def _look(self) -> None:
        """Claim what is needed now."""
        pools = [(EndpointConfig.model_validate(found.user_config).demand, found) for found in self._deployed()]
        above = [(demand, found) for demand, found in pools if demand.scaling.above_training]
        if above:
            self.stay()
        # The coordinator would believe free what any other pool holds.
        self._placed.update(held_by(pools) if above else [])
        self._waiting.update(awaited_by(above))

    def _deployed(self) -> Iterable[Deployed]:
        return deployed_in(self._deployment).values()


@dataclass
class _Claim:
    """What one claimant has claimed."""

    claimant: str
    _bundles: Sequence[Bundle] = ()
    _made_s: float = field(default_factory=time.monotonic)

    def update(self, bundles: Sequence[Bundle]) -> None:
        """Claim these bundles, if others were claimed or the claim would expire."""
        is_old = time.monotonic() - self._made_s > RENEW_S
        if list(bundles) != list(self._bundles) or (bundles and is_old):
            claim(self.claimant, bundles)
            self._bundles, self._made_s = bundles, time.monotonic()
