"""Ray Serve's client and controller: the only private parts of Ray that jobs use (Ray 2.60)."""

from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions, gRPCOptions
from ray.serve.exceptions import RayServeException


def deployed_user_configs(deployment: str) -> dict[str, dict[str, Any]]:
    """Return the last ``user_config`` of each application's deployment of this name, by the applications' names.

    ``serve.status()`` leaves it out. The dashboard's REST API has it, but a cluster may run without a dashboard.
    """
    if (client := _client()) is None:
        return {}
    return {
        name: found["deployments"][deployment]["deployment_config"]["user_config"]
        for name, found in client.get_serve_details()["applications"].items()
        if deployment in found["deployments"]
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
    try:
        return serve.context._get_global_client(raise_if_no_controller_running=True)
    except RayServeException:
        return None
