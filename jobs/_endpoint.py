"""The application of Ray Serve that holds every model: what it serves, changed by one job at a time."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import ray
from ray import serve
from ray.exceptions import ActorAlreadyExistsError
from ray.serve.config import BackpressureConfig
from ray.serve.schema import ApplicationStatus, DeploymentStatusTrigger, ReplicaState

from app.cluster.haproxy_script import APPLICATION
from app.errors import ClusterError
from app.serving.config import EndpointConfig
from jobs._cluster import require
from jobs._serve_internals import await_proxies, deployed_user_config
from serve_deployments.autoscaling import autoscaling_of
from serve_deployments.model_server import ModelServer

DEPLOYMENT: str = ModelServer.name  # type: ignore[attr-defined] # from the decorator
_LOCK, _NAMESPACE = "changes-the-endpoint", "rayloom"
_BACK_TIMEOUT_S = 600.0
"""For what was served before, and so can be loaded."""
_POLL_S = 0.1
_QUEUED_REQUESTS = 256
"""In a replica, until they have a place: also those for which there is one, if they come in one turn of its loop."""
_BACKPRESSURE = BackpressureConfig(retry_after_s=1.0)


@contextmanager
def endpoint_lock() -> Iterator[bool]:
    """Wait until no other job changes the endpoint, and let none begin until the end of the block.

    Each writes down all that is served: of two at a time the second would take away what the first has added.
    The value is whether there was one to wait for.
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


@ray.remote(num_cpus=0, max_restarts=-1)
class _Holder:
    """Its name is the lock, which nobody needs to take away from a job that was killed: the actor ends with it."""


def _hold() -> ray.actor.ActorHandle | None:
    """The lock; None while another job has it."""
    try:
        return _Holder.options(name=_LOCK, namespace=_NAMESPACE).remote()  # type: ignore[attr-defined]
    except ActorAlreadyExistsError:
        return None


def desired_config() -> EndpointConfig:
    """What Serve was told last to serve, whether its replicas have come to that yet or not: nothing, if never told."""
    config = deployed_user_config(APPLICATION, DEPLOYMENT)
    return EndpointConfig() if config is None else EndpointConfig.model_validate(config)


def roll_out(before: EndpointConfig, after: EndpointConfig, timeout_s: float) -> None:
    """Serve ``after``, and wait until every replica has loaded every model.

    Raises:
        ClusterError: one cannot, or not in time. Then ``before`` is deployed again: Serve would go on wanting what
            failed, and not replace a replica that dies. If that cannot be loaded either, because an earlier job was
            killed on the way, say, the model that the error names is to be deployed anew or undeployed.
    """
    if not before.models:
        before = before.model_copy(update={"access": after.access})
    try:
        _run_application(after, timeout_s)
    except (RuntimeError, TimeoutError) as error:
        cause = f"{error} (serve.ready_timeout_s)" if isinstance(error, TimeoutError) else str(error)
        try:
            _run_application(before, _BACK_TIMEOUT_S)
        except (RuntimeError, TimeoutError) as again:
            raise ClusterError(
                f"{cause}; and what was served before does not start either: {again}; deploy that model anew, or "
                "undeploy it"
            ) from again
        raise ClusterError(f"the endpoint goes on with what it served before: {cause}") from error


def await_routes() -> None:
    """Wait until requests find the replicas.

    Raises:
        ClusterError: they do not within a minute.
    """
    try:
        await_proxies()
    except TimeoutError as error:
        raise ClusterError(f"every replica is ready, and requests do not find them: {error}") from error


def running_replicas() -> int:
    """How many replicas answer."""
    server = serve.status().applications[APPLICATION].deployments[DEPLOYMENT]
    return int(server.replica_states.get(ReplicaState.RUNNING, 0))


def require_room(before: EndpointConfig, after: EndpointConfig) -> None:
    """Refuse more than the local cluster can hold: all replicas, and where some answer already, one that takes a place.

    Where several models are sharded all take their places at once: each waits for room for one of its models after the
    other, and two that have some of it would wait for each other.

    Raises:
        ClusterError: it is more, or the models of a replica want more than the GPU that they share.
    """
    scaling = after.scaling
    if round(scaling.gpus, 4) > 1:
        raise ClusterError(
            f"serve.gpus_per_replica of all models are {scaling.gpus:g} together, and a replica has one GPU for all of "
            "them: ask for less"
        )
    sharded = [version for version in after.versions if version.tensor_parallel]
    spare = 0 if not before.models else scaling.max_replicas if len(sharded) > 1 else 1
    needed = {kind: (scaling.max_replicas + spare) * amount for kind, amount in after.reserved.items()}
    require(needed, "serve.replicas, while they change over," if spare else "serve.replicas")


def require_calibration_room(before: EndpointConfig, reserved: Mapping[str, float]) -> None:
    """Refuse a calibration that the local cluster cannot hold beside the replicas that answer.

    Raises:
        ClusterError: it would wait forever for what the replicas have reserved.
    """
    taken = {kind: before.scaling.max_replicas * amount for kind, amount in before.reserved.items()}
    needed = {kind: amount + taken.get(kind, 0.0) for kind, amount in reserved.items() if amount}
    require(needed, "the calibration of serve.cascade" + (" and the replicas that answer" if before.models else ""))


def _run_application(config: EndpointConfig, timeout_s: float) -> None:
    """Raises RuntimeError if a replica cannot load a model, and TimeoutError if one is not ready in time."""
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
    """As ``serve.run`` waits, but not for ever, and also while a replica that has died is replaced.

    Serve calls a change failed whenever a replica is found ill during it, be it an old one, and goes on with it.

    Raises:
        RuntimeError: a replica cannot start; it says what that one said last.
        TimeoutError: it takes longer.
    """
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        application = serve.status().applications[APPLICATION]
        if application.status is ApplicationStatus.RUNNING:
            return
        server = application.deployments[DEPLOYMENT]
        found_ill = server.status_trigger is DeploymentStatusTrigger.HEALTH_CHECK_FAILED
        if application.status is ApplicationStatus.DEPLOY_FAILED and not found_ill:
            raise RuntimeError(server.message.strip().rpartition("\n")[2])
        time.sleep(_POLL_S)
    raise TimeoutError(f"the replicas are not ready after {timeout_s:g} s")
