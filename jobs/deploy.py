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
from ray.serve.schema import ApplicationStatus, ReplicaState

from app.config import Recipe, ServeConfig
from app.errors import ClusterError
from app.repository.repository import Repository
from app.runs import Outcome, Run
from app.serving.auth import access_of, is_loopback, token_file_of
from app.serving.cascade.rule import CascadeRule
from app.serving.config import EndpointConfig, Scaling
from app.serving.grpc import SERVICER
from app.serving.plan import deployed_model, promote_named
from jobs._cluster import connect, require
from jobs._runner import main
from jobs._tls import tls_options
from serve_deployments.autoscaling import autoscaling_of
from serve_deployments.model_server import ModelServer

APPLICATION = "rayloom"
DEPLOYMENT: str = ModelServer.name  # type: ignore[attr-defined] # from the decorator
DEFAULT_PORT, DEFAULT_GRPC_PORT = 8000, 8001
_ANSWER_TIMEOUT_S, _REPLACED_TIMEOUT_S = 30.0, 60.0
_HOSTS_OF_HAPROXY = ("127.0.0.1", "localhost", "0.0.0.0")  # noqa: S104
"""It asks the replicas of its node on loopback, and they listen where ``serve.host`` says."""
_QUEUED_REQUESTS = 64
"""In a replica that has as many as it takes."""


class DeployMetrics(BaseModel):
    """How long it took until the endpoint answered, and how many replicas it is served by then."""

    ready_s: float
    replicas: int
    cascade: CascadeRule | None = None
    """What was calibrated, if the recipe asks for a cascade."""


def deploy(run: Run) -> Outcome:
    """Put the production version behind the endpoint, or the one that the recipe makes so, and what is tried beside."""
    recipe = run.recipe
    model = deployed_model(recipe, run.storage)
    if model.cascade:
        print(model.cascade.summary(model.production), flush=True)
    connect()
    before = _deployed()
    access = access_of(recipe.serve, before.access)
    after = EndpointConfig(models={**before.models, recipe.name: model}, access=access)
    _require_room(after.scaling)
    address = _start_serve(recipe.serve, tls_options(recipe.serve.tls))

    run.open()
    began = time.monotonic()
    _change_over(recipe, before, after)
    promote_named(recipe, Repository(run.storage))
    ready_s = round(time.monotonic() - began, 3)
    version = model.production.version
    print(f"{recipe.name}, version {version}, answers at {address.http}, and over gRPC at {address.grpc}", flush=True)
    if file := token_file_of(recipe.serve):
        print(f"it asks for the token in {file}", flush=True)
    return Outcome(
        DeployMetrics(ready_s=ready_s, replicas=_running(), cascade=model.cascade.rule if model.cascade else None),
        {"http": address.http, "grpc": address.grpc, "model": f"{recipe.name}/{version}"},
    )


@dataclass(frozen=True)
class Address:
    """Where Ray Serve listens."""

    host: str
    port: int
    grpc_port: int
    scheme: str

    @property
    def http(self) -> str:
        """As a URL."""
        return f"{self.scheme}://{self.host}:{self.port}"

    @property
    def grpc(self) -> str:
        """As clients of gRPC write it."""
        return f"{self.host}:{self.grpc_port}"


def _start_serve(config: ServeConfig, tls: dict[str, str]) -> Address:
    """Start Ray Serve, unless it runs, and return where it listens.

    Raises:
        ClusterError: a port is taken, or Serve listens elsewhere already.
    """
    wanted = Address(
        config.host,
        config.port or int(os.environ.get("RAYLOOM_SERVE_PORT", DEFAULT_PORT)),
        config.grpc_port or int(os.environ.get("RAYLOOM_GRPC_PORT", DEFAULT_GRPC_PORT)),
        "https" if tls else "http",
    )
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" and wanted.host not in _HOSTS_OF_HAPROXY:
        raise ClusterError(
            f"serve.host is {wanted.host}, where HAProxy would not find the replicas: set it to 0.0.0.0, and let a "
            "firewall say who reaches it, or to 127.0.0.1"
        )
    nodes = sum(node["Alive"] for node in ray.nodes())
    if nodes > 1 and is_loopback(wanted.host):
        raise ClusterError(
            f"serve.host is {wanted.host}, and the cluster has {nodes} nodes, of which none would reach the replicas "
            "of another: set it to 0.0.0.0, where the endpoint asks for a token"
        )
    if wanted.port == wanted.grpc_port:
        raise ClusterError(f"serve.port and serve.grpc_port are both {wanted.port}: give two ports, or leave one out")
    running = _listens_on()
    if running is None:
        _require_free(wanted.host, wanted.port, "serve.port")
        _require_free(wanted.host, wanted.grpc_port, "serve.grpc_port")
        serve.start(
            http_options=serve.HTTPOptions(host=wanted.host, port=wanted.port, **tls),
            grpc_options=gRPCOptions(port=wanted.grpc_port, grpc_servicer_functions=[SERVICER]),
        )
    elif running != wanted:
        raise ClusterError(
            f"serve.port is {wanted.port} and serve.grpc_port {wanted.grpc_port}, on {wanted.host} by {wanted.scheme}, "
            f"and this cluster's endpoint listens on {running.port} and {running.grpc_port}, on {running.host} by "
            f"{running.scheme}, already: leave serve.host, serve.tls and the ports as they are, or restart the cluster"
        )
    return wanted


def _listens_on() -> Address | None:
    """Where the Serve that runs on this cluster listens, if one does."""
    try:
        client = serve.context._get_global_client(raise_if_no_controller_running=True)
    except RayServeException:
        return None
    grpc_port = ray.get(client._controller.get_grpc_config.remote()).port
    http = client.http_config
    return Address(http.host, http.port, grpc_port, "https" if http.ssl_certfile else "http")


def _require_free(host: str, port: int, key: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ClusterError(
                f"port {port} on {host} cannot be used ({error.strerror}): stop what listens there, or set {key}"
            ) from error


def _require_room(scaling: Scaling) -> None:
    """Refuse more than the local cluster can hold: all replicas, and one more, so that each can take another's place.

    Raises:
        ClusterError: it is more.
    """
    require({"CPU": (scaling.most + 1) * scaling.cpus}, "serve.replicas, while they change over,")


def _running() -> int:
    """How many replicas answer."""
    application = serve.status().applications.get(APPLICATION)
    return application.deployments[DEPLOYMENT].replica_states.get(ReplicaState.RUNNING, 0) if application else 0


def _deployed() -> EndpointConfig:
    """What the endpoint serves now: nothing, if nothing was ever loaded.

    Raises:
        ClusterError: no replica runs that could say.
    """
    until = time.monotonic() + _REPLACED_TIMEOUT_S
    while not _running():  # one that died is being replaced
        application = serve.status().applications.get(APPLICATION)
        if application is None or application.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.DELETING):
            return EndpointConfig()
        if time.monotonic() > until:
            raise ClusterError(
                f"the endpoint has had no replica for {_REPLACED_TIMEOUT_S:.0f} s, so what it serves besides cannot be "
                "read: see in the Ray dashboard why its replicas do not start, or restart the cluster"
            )
        time.sleep(1.0)
    # With the fast ingress, a handle needs an event loop, which its listeners go on using.
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(_ask_for_config(), loop).result(_ANSWER_TIMEOUT_S)


async def _ask_for_config() -> EndpointConfig:
    config: EndpointConfig = await serve.get_app_handle(APPLICATION).config.remote()
    return config


def _change_over(recipe: Recipe, before: EndpointConfig, after: EndpointConfig) -> None:
    """Deploy, and wait until every replica has loaded every model.

    Raises:
        ClusterError: one cannot. Then what was served before is deployed again: Serve would go on wanting what failed,
            and not replace a replica that dies.
    """
    try:
        _run_application(after)
    except RuntimeError as error:
        message: str = serve.status().applications[APPLICATION].deployments[DEPLOYMENT].message
        cause = message.strip().rpartition("\n")[2]
        if before.models:
            _run_application(before)
        goes_on = ", and goes on with what it served before" if before.models else ""
        raise ClusterError(f"the endpoint could not load {recipe.name}{goes_on}: {cause}") from error


def _run_application(config: EndpointConfig) -> None:
    """Raises RuntimeError if a replica cannot load a model."""
    scaling = config.scaling
    server = ModelServer.options(  # type: ignore[attr-defined] # from the decorator
        max_ongoing_requests=config.most_requests,
        max_queued_requests=_QUEUED_REQUESTS,
        user_config=config.model_dump(mode="json"),
        ray_actor_options={"num_cpus": scaling.cpus},
        **(
            {"num_replicas": scaling.most}
            if scaling.least == scaling.most
            else {"autoscaling_config": autoscaling_of(config)}
        ),
    )
    serve.run(server.bind(), name=APPLICATION, route_prefix="/")


if __name__ == "__main__":
    sys.exit(main("deploy", deploy))
