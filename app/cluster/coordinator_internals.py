"""Ray's internal coordinator, which divides the cluster's resources by priority (Ray 2.60).

Ray Train registers its workers there with priority 10. Ray Serve never registers, so the endpoint claims its room here.
The coordinator counts all resources of a node, not the free ones, and ignores label selectors. Claims also go to the
node autoscaler.
"""

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import ray
from ray.exceptions import RayError

Bundle = dict[str, float]
"""Resources that one node must have."""

PLACED, WAITING = "rayloom-endpoint", "rayloom-endpoint-waiting"
"""The ids of the claims of replicas that have room, and of those that wait for it."""
RENEW_S = 20.0
"""Time after which a claim is renewed, well before it expires."""
_ABOVE_TRAINING = 20
_EXPIRES_S, _TIMEOUT_S = 60.0, 5.0
_NAME = "AutoscalingCoordinator"
"""The name of the actor and of its namespace."""
_ANY_SHARE = 0.001
_FRACTION = 2**30


def on_node(bundle: Bundle, address: str | None) -> Bundle:
    """Return the bundle for the node with this address. None: for any node."""
    return {**bundle, f"node:{address}": _ANY_SHARE} if address else bundle


def exact(amounts: Mapping[str, float]) -> Bundle:
    """Return the amounts as binary fractions, rounded down by less than Ray can count.

    The coordinator adds and subtracts floats. It would find only four times 0.6 in 3.0.
    """
    return {kind: math.floor(amount * _FRACTION) / _FRACTION for kind, amount in amounts.items()}


def claim_of(claimant: str, bundles: Sequence[Bundle]) -> dict[str, Any]:
    """Return the coordinator's arguments for a claim above training's priority."""
    return {
        "requester_id": claimant,
        "resources": [exact(bundle) for bundle in bundles],
        "expire_after_s": _EXPIRES_S,
        # Training's value is the highest of Ray's own. The coordinator reads only the value of a priority.
        "priority": SimpleNamespace(value=_ABOVE_TRAINING),
    }


def claim(claimant: str, bundles: Sequence[Bundle]) -> None:
    """Claim all of these bundles above training. They replace those of the previous claim.

    Raises:
        RayError: the coordinator does not answer.
    """
    if bundles:
        from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (  # imports pandas
            get_or_create_autoscaling_coordinator,
        )

        coordinator = get_or_create_autoscaling_coordinator()
        ray.get(coordinator.request_resources.remote(**claim_of(claimant, bundles)), timeout=_TIMEOUT_S)
    elif (coordinator := _find()) is not None:
        ray.get(coordinator.cancel_request.remote(claimant), timeout=_TIMEOUT_S)


def has_waiting_replicas() -> bool:
    """Return whether replicas wait for room that nodes have; False if the coordinator does not answer."""
    try:
        if (coordinator := _find()) is None:
            return False
        return bool(ray.get(coordinator.get_reserved_resources.remote(WAITING), timeout=_TIMEOUT_S))
    except (RayError, OSError):  # the look-up raises OSError, too
        return False


def _find() -> Any:
    """Return the coordinator, or None if nobody has started it."""
    try:
        return ray.get_actor(_NAME, namespace=_NAME)
    except ValueError:
        return None
