"""How many replicas there should be: what Serve's autoscaler asks, as plain arithmetic."""

from collections.abc import Iterable

from app.serving.batching.policy import BatchingPolicy

_MAX_GROWTH = 2.0
"""At once: latency falls faster than replicas rise once the queue is gone, so a long queue asks for too many."""

_SPARE = 0.5
"""Of the target. Above it one replica fewer might miss it."""


def target_ongoing_requests(policies: Iterable[BatchingPolicy]) -> float:
    """Return the target for waiting and running requests in a replica: one full call of an engine.

    While a call runs, the next one gathers. Assume requests of one row and one length. If a replica has enough of them
    for two full calls, every call is full, and more requests only wait longer. If it has enough for one, calls are
    about half full, which leaves room until another replica has started. If sizes differ by length, the largest counts,
    although calls of longer rows are full with fewer requests. Of several models, the one with the smallest calls
    counts.
    """
    return float(min((policy.max_batch_size for policy in policies), default=1))


def desired_replicas(replicas: int, ongoing: float, target_ongoing: float, latency_to_target: float) -> float:
    """How many replicas are wanted, by load or by latency, whichever asks for more.

    Args:
        replicas: that run now.
        ongoing: requests in all of them.
        target_ongoing: in one of them, as it should be.
        latency_to_target: of the slowest replica, the time that 95 in 100 requests take as a share of its target; 0
            without requests, or without a target.
    """
    by_load = ongoing / target_ongoing
    if latency_to_target > 1:
        return max(by_load, replicas * min(latency_to_target, _MAX_GROWTH))
    if latency_to_target > _SPARE:
        return max(by_load, replicas)
    return by_load
