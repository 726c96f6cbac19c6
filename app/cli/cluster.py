"""The commands of the local cluster: start, stop and describe it."""

import shlex
from collections.abc import Mapping
from typing import Annotated

import typer

from app.cli.endpoint import EndpointClient, local_endpoint
from app.cli.monitoring import Notify, receivers_of
from app.cli.options import Json
from app.cli.tables import print_json
from app.cluster import local
from app.cluster.job_view import spinner
from app.cluster.node import node_folder, node_settings
from app.cluster.state import SUPERVISOR_LOG, TOKEN_FILE, ClusterState, read_state, running_cluster
from app.errors import ClusterError, RequestError
from app.monitoring import processes
from app.ports import OpenPort, open_ports
from app.storage import open_storage


def up(
    dashboard_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Default: 8265, or a free one.")] = None,
    serve_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Default: 8000, or a free one.")] = None,
    grpc_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Default: 8001, or a free one.")] = None,
    num_cpus: Annotated[int | None, typer.Option(min=0, help="Default: the cores of this machine.")] = None,
    monitoring: Annotated[
        bool, typer.Option("--monitoring", help="Start Prometheus and Alertmanager, which must be installed, too.")
    ] = False,
    notify: Notify = None,
    retention: Annotated[str | None, typer.Option(help="How long Prometheus keeps metrics. Default: 15d.")] = None,
) -> None:
    """Start a Ray cluster on this machine. It listens on loopback and requires a token."""
    if not monitoring:
        _require_none_of_monitoring({"--notify": notify, "--retention": retention})
        with spinner("starting Ray"):
            cluster = local.start(dashboard_port, serve_port, grpc_port, num_cpus)
        _describe(cluster, cluster.endpoint, cluster.grpc_endpoint)
        return
    # Both are checked before the cluster starts, so that an error leaves nothing to stop.
    receivers = receivers_of(notify)
    watched_by = processes.programs()
    with spinner("starting Ray"):
        cluster = local.start(dashboard_port, serve_port, grpc_port, num_cpus, watched_by)
    try:
        processes.start(cluster, receivers, retention or "15d")
    except BaseException:
        local.stop(cluster)
        raise
    _describe(cluster, cluster.endpoint, cluster.grpc_endpoint)


def _require_none_of_monitoring(options: Mapping[str, str | None]) -> None:
    """Raise RequestError if an option is set that needs ``--monitoring``."""
    for option, value in options.items():
        if value is not None:
            raise RequestError(
                f"{option} is {value!r}, which has no effect without --monitoring: add --monitoring, or leave "
                f"{option} out"
            ).of("options.contradict", option)


def down() -> None:
    """Stop the cluster that 'rayloom up' started, and remove its state. Storage stays."""
    cluster = read_state()
    if cluster is None:
        print("no local cluster is up: nothing to stop")
        return
    print(f"stopped {local.stop(cluster)} processes; models and runs stay in {cluster.storage}")


def status(
    ports: Annotated[bool, typer.Option("--ports", help="List every port that other machines could reach.")] = False,
    as_json: Json = False,
) -> None:
    """Show the local cluster: addresses, models, what its supervisor did, and how many ports others could reach."""
    cluster = running_cluster()
    if as_json:
        print_json(_facts(cluster))
        return
    endpoint = local_endpoint(cluster)
    _describe(cluster, endpoint.url, endpoint.grpc)
    _describe_supervisor(cluster)
    _describe_monitoring(cluster)
    _describe_ports(cluster, ports)
    _describe_models(cluster, endpoint)


def env(as_json: Json = False) -> None:
    """Print what 'ray job submit' needs. Use it as: eval "$(rayloom env)"."""
    _export(running_cluster().client_environment(), as_json)


def node(as_json: Json = False) -> None:
    """Prepare this node for 'ray start'. Use it as: settings="$(rayloom node)" && eval "$settings"."""
    _export(node_settings(node_folder()), as_json)


def _export(variables: Mapping[str, str], as_json: bool) -> None:
    if as_json:
        print_json(variables)
        return
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")


def _facts(cluster: ClusterState) -> dict[str, object]:
    """Return all that 'rayloom status' shows, for programs. ``models`` is null if the endpoint refuses to list them."""
    watched, endpoint = cluster.monitoring, local_endpoint(cluster)
    try:
        models, problem = [model.model_dump() for model in endpoint.models()], None
    except ClusterError as error:
        models, problem = None, str(error)
    return {
        "dashboard": cluster.dashboard,
        "token_file": str(TOKEN_FILE),
        "endpoint": endpoint.url,
        "grpc": endpoint.grpc,
        "storage": cluster.storage,
        "supervised": bool(cluster.supervisors()),
        "supervisor_log": str(SUPERVISOR_LOG),
        "monitoring": watched and {"page": watched.page, "prometheus": watched.prometheus_url},
        "open_ports": [vars(port) for port in _exposed(cluster)],
        "models": models,
        "problem": problem,
    }


def _describe(cluster: ClusterState, endpoint: str, grpc: str) -> None:
    print(f"dashboard  {cluster.dashboard}  (log in with the token in {TOKEN_FILE}, not that of 'ray get-auth-token')")
    print(f"endpoint   {endpoint}  (answers once a model is deployed; its API is at /docs)")
    print(f"gRPC       {grpc}")
    print(f"storage    {cluster.storage}")
    if cluster.monitoring:
        print(f"monitoring {cluster.monitoring.page}  (Prometheus is at {cluster.monitoring.prometheus_url})")


def _describe_supervisor(cluster: ClusterState) -> None:
    """Print whether the supervisor runs, and what it did last."""
    watched = "watches Ray's control processes" if cluster.supervisors() else "has ended: nothing restarts Ray"
    print(f"supervisor {watched}; its log is {SUPERVISOR_LOG}")
    lines = SUPERVISOR_LOG.read_text(encoding="utf-8").splitlines() if SUPERVISOR_LOG.exists() else []
    for line in lines[-3:]:
        print(f"supervisor {line}")


def _describe_monitoring(cluster: ClusterState) -> None:
    """Print how many of the monitoring processes run. They are not restarted."""
    if cluster.monitoring:
        wanted, running = len(cluster.monitoring.model_dump(exclude_none=True)), len(cluster.watchers())
        print(f"monitoring {running} of {wanted} processes run; their logs are in {processes.CONFIGURATION}")


def _describe_models(cluster: ClusterState, endpoint: EndpointClient) -> None:
    """Print the deployed models, and a command to paste for each."""
    try:
        from app.cli.examples import commands_for  # reads data

        served, commands = endpoint.models(), commands_for(endpoint, open_storage(cluster.storage))
    except ClusterError as error:
        print(f"models     {error}")
        return
    titles = [f"{model.name} version {model.version}{f' ({model.reason})' if model.reason else ''}" for model in served]
    print(f"models     {', '.join(titles) or 'none deployed'}")
    for command in commands:
        print(f"try        {command}")


def _describe_ports(cluster: ClusterState, are_listed: bool) -> None:
    """Count or list the ports that Ray opens on other interfaces than loopback."""
    exposed = _exposed(cluster)
    more = ":" if are_listed else "; 'rayloom status --ports' lists them"
    print(f"ports      {len(exposed)} that other machines could reach, unless a firewall blocks them{more}")
    for port in exposed if are_listed else ():
        print(f"  {port.port:>5}  {port.address:<18} {port.process}")


def _exposed(cluster: ClusterState) -> list[OpenPort]:
    return [port for port in open_ports(cluster.processes()) if not port.is_loopback]
