"""The application of Ray Serve that serves all models. One job at a time changes it."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus

import httpx
import ray
from pydantic import ValidationError
from ray import serve
from ray.exceptions import ActorAlreadyExistsError
from ray.serve.config import BackpressureConfig
from ray.serve.schema import ApplicationStatus, DeploymentStatusTrigger, ReplicaState
from tenacity import RetryError, retry, retry_if_result, stop_after_delay, wait_fixed

from app.errors import ClusterError
from app.serving.config import Demand, EndpointConfig
from app.serving.ingress.haproxy_script import APPLICATION
from jobs._cluster import require
from jobs._serve_internals import await_proxies, deployed_user_config
from serve_deployments.autoscaling import autoscaling_of
from serve_deployments.model_server import ModelServer

DEPLOYMENT: str = ModelServer.name  # type: ignore[attr-defined] # from the decorator
_LOCK, _NAMESPACE = "changes-the-endpoint", "rayloom"
_ROLLBACK_TIMEOUT_S = 600.0
"""Time to return to the previous configuration, whose models have been loaded before."""
_ROUTES_TIMEOUT_S = 60.0
_POLL_S = 0.1
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


def desired_config() -> EndpointConfig:
    """Return the last configuration that was given to Serve, loaded or not; an empty one if there was none.

    Raises:
        ClusterError: another release of Rayloom has deployed the endpoint.
    """
    config = deployed_user_config(APPLICATION, DEPLOYMENT)
    try:
        return EndpointConfig() if config is None else EndpointConfig.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        raise ClusterError(
            f"another release of Rayloom has deployed the endpoint ({'.'.join(map(str, first['loc']))}: "
            f"{first['msg']}): end it with 'serve shutdown', and deploy its models again"
        ).of("endpoint.other_release") from error


def roll_out(before: EndpointConfig, after: EndpointConfig, timeout_s: float) -> None:
    """Serve ``after``, and wait until every replica has loaded every model.

    Raises:
        ClusterError: a replica cannot load a model, or not in time. Then ``before`` is deployed again. Otherwise Serve
            would keep trying the failed configuration, and not replace dead replicas. If ``before`` fails, too, for
            example after a killed job, deploy the model in the error again, or undeploy it.
    """
    # An empty configuration has no tokens. A rollback to it must not open the endpoint to everybody.
    if not before.models:
        before = before.model_copy(update={"access": after.access})
    try:
        _run_application(after, timeout_s)
    except (RuntimeError, TimeoutError) as error:
        cause = f"{error} (serve.ready_timeout_s)" if isinstance(error, TimeoutError) else str(error)
        try:
            _run_application(before, _ROLLBACK_TIMEOUT_S)
        except (RuntimeError, TimeoutError) as again:
            raise ClusterError(
                f"{cause}; and what was served before does not start either: {again}; deploy that model again, or "
                "undeploy it"
            ) from again
        raise ClusterError(f"the endpoint goes on with what it served before: {cause}") from error


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
        raise ClusterError(f"every replica is ready, but requests do not reach them: {error}") from error


@retry(retry=retry_if_result(bool), stop=stop_after_delay(_ROUTES_TIMEOUT_S), wait=wait_fixed(_POLL_S))
def _await_answer(url: str) -> bool:
    """Return whether HAProxy has no replica for a request: it learns of new ones after Serve calls them ready."""
    try:
        status = httpx.get(f"{url}/v2/health/live", verify=False).status_code  # noqa: S501 # nothing secret is sent
    except httpx.TransportError:  # this node may have no proxy
        return False
    return status == HTTPStatus.SERVICE_UNAVAILABLE


def running_replicas() -> int:
    """Return the number of running replicas."""
    server = serve.status().applications[APPLICATION].deployments[DEPLOYMENT]
    return int(server.replica_states.get(ReplicaState.RUNNING, 0))


def require_room(before: EndpointConfig, demand: Demand) -> None:
    """Check that the cluster has room for all replicas and, during a change, for one more.

    With several sharded models it needs room for twice the replicas. A replica reserves room for its models one by one,
    and two new replicas that each have a part of it would wait for each other.

    Raises:
        ClusterError: there is too little room, or the models of a replica need more than its single GPU.
    """
    scaling = demand.scaling
    if round(scaling.gpus, 4) > 1:
        raise ClusterError(
            f"serve.gpus_per_replica of all models are {scaling.gpus:g} together, and a replica has one GPU for all of "
            "them: ask for less"
        )
    spare = 0 if not before.models else scaling.max_replicas if len(demand.sharded) > 1 else 1
    needed = {kind: (scaling.max_replicas + spare) * amount for kind, amount in demand.reserved.items()}
    require(needed, "serve.replicas, while they change over," if spare else "serve.replicas")


def require_calibration_room(before: EndpointConfig, reserved: Mapping[str, float]) -> None:
    """Check that the cluster has room for a calibration beside the running replicas.

    Raises:
        ClusterError: it has not, so the calibration would wait forever.
    """
    taken = {kind: before.scaling.max_replicas * amount for kind, amount in before.demand.reserved.items()}
    needed = {kind: amount + taken.get(kind, 0.0) for kind, amount in reserved.items() if amount}
    require(needed, "the calibration of serve.cascade" + (" and the running replicas" if before.models else ""))


def _run_application(config: EndpointConfig, timeout_s: float) -> None:
    """Deploy a configuration, and wait for its replicas. Raises RuntimeError or TimeoutError as ``_await_running``."""
    scaling = config.scaling
    server = ModelServer.options(  # type: ignore[attr-defined] # from the decorator
        max_ongoing_requests=config.max_requests,
        max_queued_requests=_QUEUED_REQUESTS,
        backpressure_config=_BACKPRESSURE,
        user_config=config.model_dump(mode="json"),
        ray_actor_options={"num_cpus": scaling.cpus, "num_gpus": scaling.gpus, "resources": scaling.resources},
        **(
            {"num_replicas": scaling.max_replicas}
            if scaling.min_replicas == scaling.max_replicas
            else {"autoscaling_config": autoscaling_of(config)}
        ),
    )
    target = serve.RunTarget(server.bind(), name=APPLICATION, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)
    _await_running(timeout_s)


def _await_running(timeout_s: float) -> None:
    """Wait until all replicas run, like ``serve.run``, but with a limit, and even if a replica dies meanwhile.

    Serve reports a failed deployment whenever a replica becomes unhealthy during it, even an old one, and continues.

    Raises:
        RuntimeError: a replica cannot start; with its last error.
        TimeoutError: it takes longer than ``timeout_s``.
    """
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        application = serve.status().applications[APPLICATION]
        if application.status is ApplicationStatus.RUNNING:
            return
        server = application.deployments[DEPLOYMENT]
        is_unhealthy = server.status_trigger is DeploymentStatusTrigger.HEALTH_CHECK_FAILED
        if application.status is ApplicationStatus.DEPLOY_FAILED and not is_unhealthy:
            raise RuntimeError(server.message.strip().rpartition("\n")[2])
        time.sleep(_POLL_S)
    raise TimeoutError(f"the replicas are not ready after {timeout_s:g} s")
