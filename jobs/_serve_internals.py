"""Ray Serve's client and controller (Ray 2.60). They and ``_internal`` in ``_endpoint.py`` are private parts of Ray."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import ray
from ray import serve
from ray.serve.config import HTTPOptions, gRPCOptions
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ReplicaState

_LOADING = {ReplicaState.STARTING, ReplicaState.UPDATING, ReplicaState.RECOVERING}


@dataclass(frozen=True)
class Deployed:
    """A deployment as it was last given to Serve."""

    user_config: dict[str, Any]
    runtime_env: dict[str, Any]
    """Ray's runtime environment of its replicas, which is that of the job that deployed it."""
    addresses: list[str]
    """Addresses of the nodes of its replicas, including replicas that start or stop."""
    waiting: int
    """Number of replicas that Serve wants and that have no node yet."""
    loading: int
    """Number of replicas that have a node, and perhaps not all of their models."""

    @classmethod
    def of(cls, details: Mapping[str, Any]) -> Self:
        """Read Serve's details of a deployment."""
        placed = [replica for replica in details["replicas"] if replica.get("node_ip")]
        addresses = [replica["node_ip"] for replica in placed]
        waiting = max(0, details["target_num_replicas"] - len(addresses), len(details["replicas"]) - len(addresses))
        loading = sum(replica["state"] in _LOADING for replica in placed)
        config = details["deployment_config"]
        return cls(
            config["user_config"],
            config.get("ray_actor_options", {}).get("runtime_env") or {},
            addresses,
            waiting,
            loading,
        )


def deployed_in(deployment: str) -> dict[str, Deployed]:
    """Return the deployments of this name, by the names of their applications.

    ``serve.status()`` leaves ``user_config`` out. The dashboard's REST API has it, but a cluster may run without a
    dashboard.
    """
    if (client := _client()) is None:
        return {}
    return {
        name: Deployed.of(application["deployments"][deployment])
        for name, application in client.get_serve_details()["applications"].items()
        if deployment in application["deployments"]
    }


def start_options() -> tuple[HTTPOptions, gRPCOptions] | None:
    """Return the options that Serve runs with; None if it does not run.

    ``serve.start`` silently keeps the options of a running Serve.
    """
    if (client := _client()) is None:
        return None
    return client.http_config, ray.get(client._controller.get_grpc_config.remote())


def await_proxies() -> None:
    """Wait until every proxy has a route to a replica. Raises TimeoutError after Serve's own limit.

    ``serve.run`` does so, too, but it also waits for the replicas, without a limit.
    """
    serve.context._get_global_client().wait_for_proxies_serving()


def _client() -> Any:
    """Return the client of the Serve that runs on this cluster, or None. Ray's public API does not show it."""
    serve.context._check_cached_client_alive()  # drops the client of a Serve that was shut down
    try:
        return serve.context._get_global_client(raise_if_no_controller_running=True)
    except RayServeException:
        return None
