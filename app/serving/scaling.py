"""The desired number of replicas, as plain arithmetic for Serve's autoscaler."""

from collections.abc import Iterable

_MAX_GROWTH = 2.0
"""Limit on one increase. Once the queue is gone latency falls sharply, so a long queue overestimates the need."""

_SPARE = 0.5
"""Share of the latency target above which no replica is removed: one fewer might miss the target."""


def target_ongoing_requests(full_loads: Iterable[int]) -> float:
    """Return the target for waiting and running requests in a replica: the smallest load that fills one of its models.

    For a model that answers batches, that is one full call of the engine. While a call runs, the next one gathers.
    Assume requests of one row and one length. If a replica has enough of them for two full calls, every call is full,
    and more requests only wait longer. If it has enough for one, calls are about half full, which leaves room until
    another replica has started. If sizes differ by length, the largest counts, although calls of longer rows are full
    with fewer requests. A language model is full with as many answers as it generates at a time.
    """
    return float(min(full_loads, default=1))


def desired_replicas(replicas: int, ongoing: float, target_ongoing: float, latency_to_target: float) -> float:
    """Return the desired number of replicas: the larger of those by load and by latency.

    Args:
        replicas: number of running replicas.
        ongoing: requests in all replicas.
        target_ongoing: target for the requests in one replica.
        latency_to_target: the 95th percentile of latency in the slowest replica, as a share of its target; 0 without
            requests or without a target.
    """
    by_load = ongoing / target_ongoing
    if latency_to_target > 1:
        return max(by_load, replicas * min(latency_to_target, _MAX_GROWTH))
    # Between the two limits: keep the replicas, and let only the load add more.
    if latency_to_target > _SPARE:
        return max(by_load, replicas)
    return by_load
