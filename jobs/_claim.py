"""The endpoint's claim on room above training: an actor that claims it for the replicas that Serve wants."""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import ray
from ray.exceptions import RayActorError
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_fixed

from app.best_effort import BestEffort
from app.cluster.coordinator_internals import PLACED, RENEW_S, WAITING, Bundle, claim, on_node
from app.serving.config import EndpointConfig
from jobs._serve_internals import Deployed, deployed_in

_NAME, _NAMESPACE = "claims-room-for-the-endpoint", "rayloom"
_LOOK_S = 1.0
_IDLE_S = 60.0
"""Time without a pool above training after which the actor ends."""


@retry(retry=retry_if_exception_type(RayActorError), stop=stop_after_attempt(3), wait=wait_fixed(1.0), reraise=True)
def keep_claim(deployment: str) -> None:
    """Start to claim room for the pools above training. Their replicas belong to this deployment."""
    options = {"name": _NAME, "namespace": _NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    claimant = _Claimant.options(**options).remote(deployment)  # type: ignore[attr-defined]
    # The actor may be about to end, because there was no such pool.
    ray.get(claimant.stay.remote())


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
        above = [(demand.bundles, found) for demand, found in pools if demand.scaling.above_training]
        if above:
            self.stay()
        # The first bundle is the replica itself. Ray may have put the others on any node.
        self._placed.update(
            [
                bundle
                for (replica, *beside), found in above
                for address in found.addresses
                for bundle in (on_node(replica, address), *beside)
            ]
        )
        self._waiting.update([bundle for bundles, found in above for _ in range(found.waiting) for bundle in bundles])

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
