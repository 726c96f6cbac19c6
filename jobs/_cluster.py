"""The Ray cluster of a job: connect to it, and check its resources."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import ray
from ray.util.state import list_actors

from app.amounts import suffices
from app.cluster.state import MARK
from app.config import ACCELERATOR, Placement, TrainConfig, of_kind
from app.errors import ClusterError, PlanError, first_line
from app.planner.cluster import Cluster, catalogue_name, cluster_of, this_machine

_TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # each epoch waits until its report is fetched
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",  # a preempted node may have only half a minute
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # it prints every line twice
}


def connect() -> None:
    """Connect to the cluster to which this job was submitted.

    Raises:
        ClusterError: the job was started by hand, and there is no cluster.
    """
    # The steps of a lifecycle share one connection.
    if ray.is_initialized():
        return
    try:
        ray.init(address="auto", logging_level="warning", runtime_env={"env_vars": _TRAIN_ENVIRONMENT})
    except (ConnectionError, ray.exceptions.RayError) as error:
        raise ClusterError(
            "no Ray cluster answers here: start one with 'rayloom up' and send the job to it with 'rayloom submit', "
            f"or with 'ray job submit' ({first_line(error)})"
        ).of("cluster.no_answer") from error


def may_grow() -> bool:
    """Return True if the cluster may gain nodes while a job runs. The local cluster never does."""
    return MARK not in os.environ


def require(needed: Mapping[str, float], who: str, labels: Mapping[str, str] | None = None) -> None:
    """Check that the cluster has the resources that ``who`` needs. If it may grow, only print what it lacks.

    Only nodes with the ``labels`` count, which are selectors as in a recipe.

    The local cluster never grows. Another cluster may have an autoscaler, and the job waits for its nodes.

    Raises:
        ClusterError: the local cluster has too little of a resource.
    """
    selection = Placement({}, labels or {})
    nodes = [node["Resources"] for node in ray.nodes() if selection.selects(node)]
    shown = ", ".join(f"{key}: {selector}" for key, selector in selection.labels.items())
    where = f"the {len(nodes)} nodes with the labels {shown} have" if shown else "the cluster has"
    for resource, amount in needed.items():
        total = sum(node.get(resource, 0.0) for node in nodes)
        if suffices(total, amount):
            continue
        sentence = f"{who} need {_amount(resource, amount)}, and {where} {total:g}"
        if not may_grow():
            raise ClusterError(f"{sentence}: ask for fewer, or start a larger cluster").of("resources.too_few")
        print(f"{sentence}; waiting for it to grow", flush=True)


def require_node(placement: Placement, who: str) -> None:
    """Check that a node has the labels and the resources that ``who`` needs. If the cluster may grow, only print that.

    Raises:
        ClusterError: no node of the local cluster has.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if any(map(placement.fits, nodes)):
        return
    wanted = [_amount(kind, amount) for kind, amount in placement.resources.items() if amount]
    wanted += [f"the label {key}: {selector}" for key, selector in placement.labels.items()]
    wanted += [f"or instead {key}: {selector}" for key, selector in placement.fallback_labels.items()]
    sentence = f"{who} needs a node with {', '.join(wanted)}, and none of the {len(nodes)} nodes is one"
    if not may_grow():
        raise ClusterError(f"{sentence}: ask for less, or start such a node").of("node.none")
    print(f"{sentence}; waiting for it", flush=True)


def cores_of_nodes(placement: Placement) -> list[int]:
    """Return the CPUs of each node that has CPUs, the labels or those of the fallback, and what a process reserves."""
    reserved = placement.resources
    wanted = replace(placement, resources={**reserved, "CPU": max(1.0, reserved.get("CPU", 0.0))})
    return [int(node["Resources"]["CPU"]) for node in ray.nodes() if wanted.fits(node)]


def _amount(resource: str, amount: float) -> str:
    if resource.startswith(ACCELERATOR):
        return f"nodes with GPUs of the type {resource.removeprefix(ACCELERATOR)}"
    return f"{amount:g} {resource}s" if resource in ("CPU", "GPU") else f"{amount:g} of the resource {resource!r}"


def require_dashboard(who: str) -> None:
    """Check that the dashboard answers. Ray Train asks it whether ``who`` have ended, and then frees their CPUs.

    Raises:
        ClusterError: the dashboard does not answer. Later trials would wait for the CPUs forever.
    """
    try:
        list_actors(address=ray.get_runtime_context().gcs_address, limit=1)
    except Exception as error:
        raise ClusterError(
            f"the cluster's dashboard does not answer, and without it {who} keep their CPUs after they have ended: "
            "start the cluster with its dashboard, as 'rayloom up' does"
        ).of("dashboard.no_answer") from error


def training_cluster(config: TrainConfig) -> Cluster:
    """Return the part of this job's cluster that training uses: as many devices as workers."""
    workers = config.workers_range[1]
    if config.device == "cpu":
        return this_machine(workers, config.threads)
    cluster = live_cluster(config)
    return cluster.resized(workers, cluster.devices_per_node)


def live_cluster(config: TrainConfig) -> Cluster:
    """Return the part of this job's cluster where workers may be placed: its GPUs, or its CPUs if it has no GPUs."""
    connect()
    kind = Placement(of_kind(config.accelerator_type) | config.resources, config.labels)
    nodes = [node["Resources"] for node in ray.nodes() if kind.fits(node)]
    return cluster_of_nodes(nodes, config.workers_range[1], config.threads)


def cluster_of_nodes(nodes: Sequence[Mapping[str, float]], workers: int, threads: int = 1) -> Cluster:
    """Return the cluster of nodes with these resources.

    Raises:
        PlanError: the catalogue does not have the GPUs, or nodes have unlike ones.
    """
    with_gpus = [resources for resources in nodes if resources.get("GPU")]
    if not with_gpus:
        return this_machine(workers, threads)
    kinds = {(_accelerator(resources), int(resources["GPU"])) for resources in with_gpus}
    if len(kinds) > 1:
        shown = ", ".join(f"{count} x {name}" for name, count in sorted(kinds))
        raise PlanError(
            f"the cluster's nodes have unlike GPUs ({shown}): set train.accelerator_type to one of them, or give "
            "--cluster those that training will use"
        ).of("devices.differ")
    name, count = kinds.pop()
    return cluster_of(f"{len(with_gpus)}x{count}x{catalogue_name(name)}")


def _accelerator(resources: Mapping[str, float]) -> str:
    """Return the name that Ray gives a node's GPUs, such as A100-80G."""
    return next((key.removeprefix(ACCELERATOR) for key in resources if key.startswith(ACCELERATOR)), "of unknown type")
