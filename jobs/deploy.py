"""Serve the production version of a recipe's model: python -m jobs.deploy RECIPE [key=value …]"""

import asyncio
import os
import socket
import sys
import threading
import time

from pydantic import BaseModel
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ReplicaState

from app.config import Recipe, ServeConfig
from app.errors import ClusterError
from app.repository.repository import Repository
from app.runs import Outcome, Run
from jobs._cluster import connect, require
from jobs._runner import main
from serve_deployments.model_server import ModelServer, ServedModelConfig, ServedModels

APPLICATION = "rayloom"
DEPLOYMENT: str = ModelServer.name  # type: ignore[attr-defined] # from the decorator
DEFAULT_PORT = 8000
_ANSWER_TIMEOUT_S = 30.0


class DeployMetrics(BaseModel):
    """How long it took until the endpoint answered, and by how many replicas it is served."""

    ready_s: float
    replicas: int


def deploy(run: Run) -> Outcome:
    """Put the production version, or the one that the recipe makes so, behind the endpoint."""
    recipe, repository = run.recipe, Repository(run.storage)
    version = recipe.serve.version or repository.production(recipe.name)
    serving = repository.verify(recipe.name, version).served(recipe.serve)
    connect()
    # While a version replaces another, the replicas of both are there.
    require({"CPU": 2 * serving.replicas * recipe.serve.cpus_per_replica}, "serve.replicas, while they change over,")
    port = _start_serve(recipe.serve)

    run.open()
    began = time.monotonic()
    models = _deployed().models
    models[recipe.name] = ServedModelConfig(
        storage=str(run.storage),
        version=version,
        max_batch_size=serving.max_batch_size,
        timeout_us=serving.timeout_us,
        queue_limit=recipe.serve.queue_limit,
        threads=serving.threads,
    )
    _run_application(recipe, ServedModels(models=models), serving.replicas)
    if recipe.serve.version is not None:  # else it is in production, or somebody has changed that meanwhile
        repository.promote(recipe.name, version)
    ready_s = round(time.monotonic() - began, 3)
    endpoint = f"http://{recipe.serve.host}:{port}"
    print(f"{recipe.name}, version {version}, answers at {endpoint}", flush=True)
    return Outcome(
        DeployMetrics(ready_s=ready_s, replicas=serving.replicas),
        {"http": endpoint, "model": f"{recipe.name}/{version}"},
    )


def _start_serve(config: ServeConfig) -> int:
    """Start Ray Serve, unless it runs, and return the port that it listens on.

    Raises:
        ClusterError: the port is taken, or Serve listens on another host or port already.
    """
    wanted = (config.host, config.port or int(os.environ.get("RAYLOOM_SERVE_PORT", DEFAULT_PORT)))
    running = _listens_on()
    if running is None:
        _require_free(*wanted)
        serve.start(http_options=serve.HTTPOptions(host=wanted[0], port=wanted[1]))
    elif running != wanted:
        raise ClusterError(
            f"serve.port is {wanted[1]}, on {wanted[0]}, and this cluster's endpoint listens on {running[1]}, on "
            f"{running[0]}, already: leave serve.host and serve.port out, or restart the cluster"
        )
    return wanted[1]


def _listens_on() -> tuple[str, int] | None:
    """Host and port of the Serve that runs on this cluster, if one does."""
    try:
        options = serve.context._get_global_client(raise_if_no_controller_running=True).http_config
    except RayServeException:
        return None
    return options.host, options.port


def _require_free(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ClusterError(
                f"port {port} on {host} cannot be used ({error.strerror}): stop what listens there, or set serve.port"
            ) from error


def _deployed() -> ServedModels:
    """What the endpoint serves now: nothing, if no replica runs."""
    application = serve.status().applications.get(APPLICATION)
    if not (application and application.deployments[DEPLOYMENT].replica_states.get(ReplicaState.RUNNING)):
        return ServedModels()
    # With the fast ingress, a handle needs an event loop, which its listeners go on using.
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(_ask_for_config(), loop).result(_ANSWER_TIMEOUT_S)


async def _ask_for_config() -> ServedModels:
    config: ServedModels = await serve.get_app_handle(APPLICATION).config.remote()
    return config


def _run_application(recipe: Recipe, config: ServedModels, replicas: int) -> None:
    """Deploy, and wait until every replica has loaded every model. Raises ClusterError if one cannot."""
    server = ModelServer.options(  # type: ignore[attr-defined] # from the decorator
        num_replicas=replicas,
        # The queues refuse with an answer of their own; Serve's limit only guards them.
        max_ongoing_requests=2 * sum(model.queue_limit for model in config.models.values()),
        user_config=config.model_dump(mode="json"),
        ray_actor_options={"num_cpus": recipe.serve.cpus_per_replica},
    )
    try:
        serve.run(server.bind(), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        message: str = serve.status().applications[APPLICATION].deployments[DEPLOYMENT].message
        cause = message.strip().rpartition("\n")[2]
        raise ClusterError(
            f"the endpoint could not load {recipe.name}, and goes on with what it served before: {cause}"
        ) from error


if __name__ == "__main__":
    sys.exit(main("deploy", deploy))
