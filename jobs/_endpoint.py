"""The applications of Ray Serve that serve the models, one for each pool. One job at a time changes them."""

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any

import httpx
import ray
from pydantic import ValidationError
from ray import serve
from ray.exceptions import ActorAlreadyExistsError
from ray.serve.config import BackpressureConfig
from ray.serve.schema import ApplicationStatus, DeploymentStatusTrigger, ReplicaState
from tenacity import RetryError, retry, retry_if_result, stop_after_delay, wait_fixed

from app.best_effort import best_effort
from app.errors import ClusterError
from app.process_state import sigterm_calls, sigterm_exits
from app.serving.config import EndpointConfig
from app.serving.demand import Demand
from app.serving.pool_configs import PoolConfigs
from app.serving.pools import Pool, application_of, is_ours, named, pool_of, prefix_of
from jobs._claim import keep_claim
from jobs._cluster import may_grow, require, require_node
from jobs._code import drop_code, keep_code
from jobs._serve_internals import Deployed, await_proxies, deployed_in
from serve_deployments.autoscaling import autoscaling_of
from serve_deployments.model_server import ModelServer

DEPLOYMENT: str = ModelServer.name  # type: ignore[attr-defined] # from the decorator
_LOCK, _NAMESPACE = "changes-the-endpoint", "rayloom"
_ROLLBACK_TIMEOUT_S = 600.0
"""Time to return to the previous configuration, whose models have been loaded before."""
_ROUTES_TIMEOUT_S = 60.0
_POLL_S, _POLL_FACTOR = 0.1, 10
"""Minimum pause between two questions to Serve, in seconds and as a multiple of the time of its last answer."""
_MAX_PAUSE_S = 2.0
_QUEUED_REQUESTS = 256
"""Queue in front of a replica. Even requests with a free place pass it, if they arrive in one turn of its loop."""
_BACKPRESSURE = BackpressureConfig(retry_after_s=1.0)


@contextmanager
def endpoint_lock() -> Iterator[bool]:
    """Hold the only right to change the endpoint within the block. Yield whether another job had to be awaited.

    Each job writes the whole configuration, so of two concurrent jobs the second would undo the changes of the first.
    """
    has_waited = False
    while (holder := _hold()) is None:
        if not has_waited:
            print("another job is changing what the endpoint serves: waiting until it has ended", flush=True)
        has_waited = True
        time.sleep(1.0)
    try:
        yield has_waited
    finally:
        ray.kill(holder)


# Restarted if only its process dies, so that the job keeps the lock.
@ray.remote(num_cpus=0, max_restarts=-1)
class _Holder:
    """An actor whose name is the lock. It ends with its job, so a killed job releases the lock."""


def _hold() -> ray.actor.ActorHandle | None:
    """Take the lock. Return None while another job has it."""
    try:
        return _Holder.options(name=_LOCK, namespace=_NAMESPACE).remote()  # type: ignore[attr-defined]
    except ActorAlreadyExistsError:
        return None


def desired_pools() -> PoolConfigs:
    """Return the last configuration of each pool that was given to Serve, loaded or not.

    Raises:
        ClusterError: another release of Rayloom has deployed the endpoint.
    """
    given = {name: found.user_config for name, found in deployed_in(DEPLOYMENT).items()}
    ours = {name: config for name, config in given.items() if is_ours(name)}
    try:
        return PoolConfigs({pool_of(name): EndpointConfig.model_validate(config) for name, config in ours.items()})
    except ValidationError as error:
        first = error.errors()[0]
        raise ClusterError(
            f"another release of Rayloom has deployed the endpoint ({'.'.join(map(str, first['loc']))}: "
            f"{first['msg']}): end it with 'serve shutdown', and deploy its models again"
        ).of("endpoint.other_release") from error


def roll_out(before: PoolConfigs, after: PoolConfigs, pool: Pool, timeout_s: float) -> None:
    """Serve ``after``, and wait until every replica of each pool that changes has loaded every model of its pool.

    Args:
        pool: it gets new replicas even if its configuration is unchanged, because a killed job may have left it
            without its models. Replicas of other pools are only reconfigured.

    Raises:
        ClusterError: a replica cannot load a model, or not in time. Then ``before`` is deployed again. Otherwise Serve
            would keep trying the failed configuration, and not replace dead replicas. If ``before`` fails, too, for
            example after a killed job, deploy the model in the error again, or undeploy it.
        SystemExit: the job was told to stop. ``before`` is deployed again first.
    """
    after, previous = after.on_new_replicas(pool), deployed_in(DEPLOYMENT)
    changed = after.changed_from(before)
    # An empty configuration has no tokens. A rollback to it must not open the endpoint to everybody.
    if not before.deployed:
        before = before.with_access(after.shared.access)
    try:
        with sigterm_exits():
            for one in changed:
                _give(one, after, previous)
                _await(one, after, timeout_s)
    except (KeyboardInterrupt, SystemExit):
        failures = _give_back(changed, before, previous)  # the job was told to stop, so it awaits no replicas
        outcome = f"was not restored ({failures[0]}): deploy its models again" if failures else "is deployed again"
        print(f"stopped: what was served before {outcome}", flush=True)
        raise
    except Exception as error:  # whatever Serve raises, no pool may stay half changed
        cause = f"{error} (serve.ready_timeout_s)" if isinstance(error, TimeoutError) else str(error)
        print(f"{cause}: deploying again what was served before", flush=True)
        if failures := _give_back(changed, before, previous) or _await_back(changed, before):
            raise ClusterError(
                f"{cause}; and what was served before does not start either: {failures[0]}; deploy that model again, "
                "or undeploy it"
            ).of("rollback.fails") from error
        raise ClusterError(f"the endpoint goes on with what it served before: {cause}").of("rollout.fails") from error
    kept = {config.revision for config in after.by_pool.values()}
    best_effort(lambda: drop_code(kept), "the code of earlier replicas stays in Ray's memory", "the endpoint")


def _give_back(changed: Sequence[Pool], before: PoolConfigs, previous: Mapping[str, Deployed]) -> list[Exception]:
    """Give Serve what pools had before. Return why it refuses some. SIGTERM does not interrupt it."""
    with sigterm_calls(lambda: None):
        return _failures(lambda pool: _give(pool, before, previous), reversed(changed))


def _await_back(changed: Sequence[Pool], before: PoolConfigs) -> list[Exception]:
    """Wait until pools run as before. Return why some do not."""
    return _failures(lambda pool: _await(pool, before, _ROLLBACK_TIMEOUT_S), reversed(changed))


def _failures(action: Callable[[Pool], None], pools: Iterable[Pool]) -> list[Exception]:
    failures = []
    for pool in pools:
        try:
            action(pool)
        except Exception as error:
            failures.append(error)
    return failures


def await_routes(url: str | None = None) -> None:
    """Wait until requests reach the replicas. With ``url``, the endpoint's, wait until it has answered one.

    Raises:
        ClusterError: they do not within a minute.
    """
    try:
        await_proxies()
        if url:
            _await_answer(url)
    except (TimeoutError, RetryError) as error:
        raise ClusterError(f"every replica is ready, but requests do not reach them: {error}").of(
            "routes.no_answer"
        ) from error


@retry(retry=retry_if_result(bool), stop=stop_after_delay(_ROUTES_TIMEOUT_S), wait=wait_fixed(_POLL_S))
def _await_answer(url: str) -> bool:
    """Return whether HAProxy has no replica for a request: it learns of new ones after Serve calls them ready."""
    try:
        status = httpx.get(f"{url}/v2/health/live", verify=False).status_code  # noqa: S501 # nothing secret is sent
    except httpx.TransportError:  # this node may have no proxy
        return False
    return status == HTTPStatus.SERVICE_UNAVAILABLE


def running_replicas(pool: Pool) -> int:
    """Return the number of a pool's replicas that run."""
    application = serve.status().applications.get(application_of(pool))
    server = application.deployments.get(DEPLOYMENT) if application else None
    return int(server.replica_states.get(ReplicaState.RUNNING, 0)) if server else 0


def require_room(before: PoolConfigs, pool: Pool, demand: Demand) -> None:
    """Check that the cluster has room for all replicas and, during a change of ``pool``, for one more.

    With several sharded models it needs room for twice the replicas. A replica reserves room for its models one by one,
    and two new replicas that each have a part of it would wait for each other.

    Args:
        demand: of the pool after the change.

    Raises:
        ClusterError: there is too little room, the models of a replica need more than its single GPU, no node is large
            enough for a replica, or the nodes have too little memory for the language models.
    """
    scaling = demand.scaling
    if round(scaling.gpus, 4) > scaling.max_gpus:
        raise ClusterError(
            f"serve.gpus_per_replica of all models are {scaling.gpus:g} together, and a replica has {scaling.max_gpus} "
            "for all of them: ask for less, or set serve.pool"
        ).of("replica.too_large", "serve.gpus_per_replica")
    spare = 0 if not before[pool].deployed else scaling.max_replicas if len(demand.sharded) > 1 else 1
    others = [config.demand for other, config in before.by_pool.items() if other != pool]
    _require_memory(
        [(demand, scaling.max_replicas + spare), *((other, other.scaling.max_replicas) for other in others)]
    )
    needed = {kind: (scaling.max_replicas + spare) * amount for kind, amount in demand.reserved.items()}
    for other in others:
        for kind, amount in other.reserved.items():
            if needed.get(kind):
                needed[kind] += other.scaling.max_replicas * amount
    require(needed, "serve.replicas, while they change over," if spare else "serve.replicas")
    require_node(demand.placement, f"a replica of {named(pool)}")


def _require_memory(demands: Sequence[tuple[Demand, int]]) -> None:
    """Raise ClusterError if the nodes have too little memory for the language models of so many replicas.

    Replicas reserve no memory in Ray. Ray counts as a node's memory most of what was free when it joined.

    Args:
        demands: of each pool, with its number of replicas. The first one is about to change.
    """
    nodes = [int(node["Resources"].get("memory", 0)) for node in ray.nodes() if node["Alive"]]
    left = [-memory for memory in nodes]  # a heap: the roomiest node is first
    heapq.heapify(left)
    for demand, replicas in reversed(demands):
        for placed in range(replicas if demand.memory_bytes else 0):
            if not left or -left[0] < demand.memory_bytes:
                shown = ", ".join(map(_gib, nodes)) or "no memory"
                raise ClusterError(
                    f"the language models of a replica need {_gib(demand.memory_bytes)} for their weights and caches, "
                    f"and the nodes with {shown} have room for {placed} of {replicas} replicas, with those of a "
                    "change: set a smaller serve.generation.cache_mb, or undeploy a model"
                ).of("endpoint.memory", "serve.generation.cache_mb")
            heapq.heapreplace(left, left[0] + demand.memory_bytes)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def require_calibration_room(before: PoolConfigs, reserved: Mapping[str, float]) -> None:
    """Check that the cluster has room for a calibration beside the running replicas.

    Raises:
        ClusterError: it has not, so the calibration would wait forever.
    """
    needed = {kind: amount for kind, amount in reserved.items() if amount}
    for config in before.by_pool.values():
        for kind, amount in config.demand.reserved.items():
            if kind in needed:
                needed[kind] += config.scaling.max_replicas * amount
    require(needed, "the calibration of serve.cascade" + (" and the running replicas" if before.deployed else ""))


def _give(pool: Pool, pools: PoolConfigs, previous: Mapping[str, Deployed]) -> None:
    """Give Serve a pool's configuration, or delete a pool that has none. Await neither.

    Args:
        previous: the deployments before the change, by application. Serve keeps replicas whose revision is unchanged.
    """
    application, config = application_of(pool), pools.by_pool.get(pool)
    if config is None:
        serve.delete(application, _blocking=False)
        return
    scaling, environment = config.scaling, _environment_of(previous.get(application), config)
    if may_grow() and config.revision:  # the node of the local cluster keeps it on its disk
        keep_code(config.revision, environment)
    server = ModelServer.options(  # type: ignore[attr-defined] # from the decorator
        version=config.revision,
        # Ray 2.60 accepts a version only with this. Without a version, every deploy replaces all replicas.
        _internal=True,
        max_ongoing_requests=config.max_requests,
        max_queued_requests=_QUEUED_REQUESTS,
        backpressure_config=_BACKPRESSURE,
        graceful_shutdown_timeout_s=config.drain_s,
        user_config=config.model_dump(mode="json"),
        ray_actor_options={
            "num_cpus": scaling.cpus,
            "num_gpus": scaling.gpus,
            "resources": scaling.resources,
            **config.demand.placement.options,
            **environment,
        },
        **(
            {"num_replicas": scaling.max_replicas}
            if scaling.min_replicas == scaling.max_replicas
            else {"autoscaling_config": autoscaling_of(config, running_replicas(pool))}
        ),
    )
    target = serve.RunTarget(server.bind(), name=application, route_prefix=prefix_of(pool) or "/")
    serve.run_many([target], wait_for_applications_running=False)
    if scaling.above_training:
        keep_claim(DEPLOYMENT)


def _await(pool: Pool, pools: PoolConfigs, timeout_s: float) -> None:
    """Wait until a pool's replicas run, or until a deleted pool is gone.

    Raises RuntimeError or TimeoutError as ``_await_running``.
    """
    if pool in pools.by_pool:
        _await_running(application_of(pool), timeout_s)
    else:
        # Nobody is sent there any more, so its last answers need not be awaited.
        with suppress(TimeoutError):
            serve.delete(application_of(pool))


def _environment_of(previous: Deployed | None, config: EndpointConfig) -> dict[str, Any]:
    """Return the runtime environment of the replicas to keep, as an option of Ray. New replicas use this job's."""
    if previous is None or previous.user_config.get("revision") != config.revision or not previous.runtime_env:
        return {}
    return {"runtime_env": previous.runtime_env}


def _await_running(name: str, timeout_s: float) -> None:
    """Wait until all replicas of an application run, like ``serve.run``, but with a limit.

    It waits even if a replica dies meanwhile: Serve reports a failed deployment whenever a replica becomes unhealthy
    during it, even an old one, and continues.

    Raises:
        RuntimeError: a replica cannot start; with its last error.
        TimeoutError: it takes longer than ``timeout_s``; with what Serve waits for.
    """
    deadline_s, waits = time.monotonic() + timeout_s, ""
    while True:
        asked_s = time.monotonic()
        application = serve.status().applications[name]
        answer_s = time.monotonic() - asked_s
        if application.status is ApplicationStatus.RUNNING:
            return
        server = application.deployments.get(DEPLOYMENT)
        if server is not None:
            waits = server.message.strip()
            is_unhealthy = server.status_trigger is DeploymentStatusTrigger.HEALTH_CHECK_FAILED
            if application.status is ApplicationStatus.DEPLOY_FAILED and not is_unhealthy:
                raise RuntimeError(waits.rpartition("\n")[2])
        if asked_s >= deadline_s:
            raise TimeoutError(f"the replicas are not ready after {timeout_s:g} s" + (f" ({waits})" if waits else ""))
        pause_s = min(max(_POLL_S, _POLL_FACTOR * answer_s), _MAX_PAUSE_S, deadline_s - time.monotonic())
        time.sleep(max(0.0, pause_s))
