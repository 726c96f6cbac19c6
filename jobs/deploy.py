"""Serve the production version of a recipe's model: python -m jobs.deploy RECIPE [key=value …]"""

import asyncio
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass

import ray
from pydantic import BaseModel
from ray import serve
from ray.serve.config import gRPCOptions
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ReplicaState

from app.config import Recipe, ServeConfig
from app.errors import ClusterError
from app.repository.repository import Repository
from app.runs import Outcome, Run
from app.serving.config import EndpointConfig, ServedModelConfig
from app.serving.grpc import SERVICER
from jobs._cluster import connect, require
from jobs._runner import main
from serve_deployments.model_server import ModelServer

APPLICATION = "rayloom"
DEPLOYMENT: str = ModelServer.name  # type: ignore[attr-defined] # from the decorator
DEFAULT_PORT, DEFAULT_GRPC_PORT = 8000, 8001
_ANSWER_TIMEOUT_S = 30.0
_SPARE_REQUESTS = 64
"""Beyond what waits for the models: metadata, health, and what comes while a queue is full, to be told so."""


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
    address = _start_serve(recipe.serve)

    run.open()
    began = time.monotonic()
    before = _deployed()
    wanted = ServedModelConfig.of(str(run.storage), version, serving, recipe.serve)
    after = EndpointConfig(models={**before.models, recipe.name: wanted})
    _change_over(recipe, before, after, serving.replicas)
    if recipe.serve.version is not None:  # else it is in production, or somebody has changed that meanwhile
        repository.promote(recipe.name, version)
    ready_s = round(time.monotonic() - began, 3)
    print(f"{recipe.name}, version {version}, answers at {address.http}, and over gRPC at {address.grpc}", flush=True)
    return Outcome(
        DeployMetrics(ready_s=ready_s, replicas=serving.replicas),
        {"http": address.http, "grpc": address.grpc, "model": f"{recipe.name}/{version}"},
    )


@dataclass(frozen=True)
class Address:
    """Where Ray Serve listens."""

    host: str
    port: int
    grpc_port: int

    @property
    def http(self) -> str:
        """As a URL."""
        return f"http://{self.host}:{self.port}"

    @property
    def grpc(self) -> str:
        """As clients of gRPC write it."""
        return f"{self.host}:{self.grpc_port}"


def _start_serve(config: ServeConfig) -> Address:
    """Start Ray Serve, unless it runs, and return where it listens.

    Raises:
        ClusterError: a port is taken, or Serve listens elsewhere already.
    """
    wanted = Address(
        config.host,
        config.port or int(os.environ.get("RAYLOOM_SERVE_PORT", DEFAULT_PORT)),
        config.grpc_port or int(os.environ.get("RAYLOOM_GRPC_PORT", DEFAULT_GRPC_PORT)),
    )
    if wanted.port == wanted.grpc_port:
        raise ClusterError(f"serve.port and serve.grpc_port are both {wanted.port}: give two ports, or leave one out")
    running = _listens_on()
    if running is None:
        _require_free(wanted.host, wanted.port, "serve.port")
        _require_free(wanted.host, wanted.grpc_port, "serve.grpc_port")
        serve.start(
            http_options=serve.HTTPOptions(host=wanted.host, port=wanted.port),
            grpc_options=gRPCOptions(port=wanted.grpc_port, grpc_servicer_functions=[SERVICER]),
        )
    elif running != wanted:
        raise ClusterError(
            f"serve.port is {wanted.port} and serve.grpc_port {wanted.grpc_port}, on {wanted.host}, and this cluster's "
            f"endpoint listens on {running.port} and {running.grpc_port}, on {running.host}, already: leave serve.host "
            "and the ports out, or restart the cluster"
        )
    return wanted


def _listens_on() -> Address | None:
    """Where the Serve that runs on this cluster listens, if one does."""
    try:
        client = serve.context._get_global_client(raise_if_no_controller_running=True)
    except RayServeException:
        return None
    grpc_port = ray.get(client._controller.get_grpc_config.remote()).port
    return Address(client.http_config.host, client.http_config.port, grpc_port)


def _require_free(host: str, port: int, key: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ClusterError(
                f"port {port} on {host} cannot be used ({error.strerror}): stop what listens there, or set {key}"
            ) from error


def _deployed() -> EndpointConfig:
    """What the endpoint serves now: nothing, if no replica runs."""
    application = serve.status().applications.get(APPLICATION)
    if not (application and application.deployments[DEPLOYMENT].replica_states.get(ReplicaState.RUNNING)):
        return EndpointConfig()
    # With the fast ingress, a handle needs an event loop, which its listeners go on using.
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(_ask_for_config(), loop).result(_ANSWER_TIMEOUT_S)


async def _ask_for_config() -> EndpointConfig:
    config: EndpointConfig = await serve.get_app_handle(APPLICATION).config.remote()
    return config


def _change_over(recipe: Recipe, before: EndpointConfig, after: EndpointConfig, replicas: int) -> None:
    """Deploy, and wait until every replica has loaded every model.

    Raises:
        ClusterError: one cannot. Then what was served before is deployed again: Serve would go on wanting what failed,
            and not replace a replica that dies.
    """
    try:
        _run_application(recipe, after, replicas)
    except RuntimeError as error:
        message: str = serve.status().applications[APPLICATION].deployments[DEPLOYMENT].message
        cause = message.strip().rpartition("\n")[2]
        if before.models:
            _run_application(recipe, before, replicas)
        raise ClusterError(
            f"the endpoint could not load {recipe.name}, and goes on with what it served before: {cause}"
        ) from error


def _run_application(recipe: Recipe, config: EndpointConfig, replicas: int) -> None:
    """Raises RuntimeError if a replica cannot load a model."""
    policies = [model.policy for model in config.models.values()]
    server = ModelServer.options(  # type: ignore[attr-defined] # from the decorator
        num_replicas=replicas,
        # Each model's queue refuses with an answer of its own; Serve's limits only guard them. Requests wait to be
        # read, wait for the engine, and run.
        max_ongoing_requests=_SPARE_REQUESTS + sum(2 * each.queue_limit + each.max_batch_size for each in policies),
        max_queued_requests=_SPARE_REQUESTS,
        user_config=config.model_dump(mode="json"),
        ray_actor_options={"num_cpus": recipe.serve.cpus_per_replica},
    )
    serve.run(server.bind(), name=APPLICATION, route_prefix="/")


if __name__ == "__main__":
    sys.exit(main("deploy", deploy))
