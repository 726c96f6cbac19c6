"""The policy of Serve's autoscaler for the replicas of the model server."""

from typing import Any

from ray import cloudpickle
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from app.serving import scaling
from app.serving.config import EndpointConfig
from app.serving.scaling import desired_replicas, target_ongoing_requests

LATENCY = "latency_to_target"
DIRECT = "direct_requests"
ENDED = "ended_requests"
"""The names of the values that each replica reports. Direct requests are those that Serve does not see. Ended ones are
those since the last report."""

_REPORT_INTERVAL_S, _LOOK_BACK_S = 2.0, 10.0
_WAKE_INTERVAL_S = 0.25
"""The interval in a pool that may have no replica. Serve counts the request that wakes it only at the next report: the
report that the request itself causes holds what was recorded before (``_get_metrics_report`` in Ray 2.60)."""
_SETTLED_S = 30.0
"""Time after the start of a replica for which latencies still reflect the state before."""


def autoscaling_of(config: EndpointConfig, running: int) -> AutoscalingConfig:
    """Return the configuration that scales a pool's replicas as its models require.

    Requests come straight from HAProxy, so no handle counts them. Instead, replicas report them: Serve reports those
    that it sees, and the model server the others. The average over the look-back period counts.

    Args:
        running: number of its replicas now.
    """
    scaling_config = config.scaling
    return AutoscalingConfig(
        min_replicas=scaling_config.min_replicas,
        # Wake a pool without replicas: a model that cannot be loaded must fail the deployment.
        initial_replicas=None if scaling_config.min_replicas else min(max(1, running), scaling_config.max_replicas),
        max_replicas=scaling_config.max_replicas,
        target_ongoing_requests=target_ongoing_requests(config.full_loads),
        upscale_delay_s=scaling_config.upscale_delay_s,
        downscale_delay_s=scaling_config.downscale_delay_s,
        metrics_interval_s=_REPORT_INTERVAL_S if scaling_config.min_replicas else _WAKE_INTERVAL_S,
        look_back_period_s=_LOOK_BACK_S,
        policy=_policy(),
    )


def decide(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return the desired number of replicas. Serve applies its limits and delays to it."""
    reported = context.aggregated_metrics or {}
    latency_to_target = max(reported.get(LATENCY, {}).values(), default=0.0)
    ongoing = context.total_num_requests + sum(reported.get(DIRECT, {}).values())

    replicas = context.current_num_replicas
    if not replicas:
        return context.target_num_replicas, {}  # Serve itself starts the first one
    # Latencies from before the last increase must neither cause another one nor stop a replica before it has started.
    grown_s = context.last_scale_up_time
    if grown_s is not None and context.current_time - grown_s < _SETTLED_S:
        latency_to_target, replicas = min(latency_to_target, 1.0), max(replicas, context.target_num_replicas)
    target = context.config.get_target_ongoing_requests()
    wanted = desired_replicas(replicas, ongoing, target, latency_to_target)
    # The requests of a moment are reported. Between two moments many short ones may come and end. A replica that has
    # just started has reported nothing, and was started for a request.
    was_asked = ENDED not in reported or any(reported[ENDED].values())
    return max(wanted, float(was_asked)), {}


def _policy() -> AutoscalingPolicy:
    # Pickle the module by value, as Serve does with the function: its controller may run older code, or lack ours.
    cloudpickle.register_pickle_by_value(scaling)
    return AutoscalingPolicy(policy_function=decide)
