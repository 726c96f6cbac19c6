"""Nodes and the workers on them: those that split the same matrices must share a node.

Tensor parallelism exchanges activations several times in every layer, while nothing else can be computed. Links between
nodes are many times slower than those within one (Narayanan et al. 2021, arXiv:2104.04473, section 3.2).
"""

import os
import socket
from collections.abc import Mapping
from functools import partial

from app.config import PlanConfig
from app.errors import TopologyError
from app.training.worker import Worker, run_on_all


def require_room_for_groups(plan: PlanConfig, workers: int, slots: Mapping[str, int]) -> None:
    """Check that nodes can hold the run's tensor groups whole, before any worker starts.

    Args:
        workers: number of the run's workers.
        slots: the number of workers that each node has room for, by its name.

    Raises:
        TopologyError: they cannot. The message has the largest degree that would fit.
    """
    if plan.tensor == 1 or _room(plan.tensor, slots) >= workers:
        return
    smaller = [degree for degree in range(1, plan.tensor) if plan.tensor % degree == 0]
    fitting = max((degree for degree in smaller if _room(degree, slots) >= workers), default=None)
    remedy = f"set train.plan.tensor to {fitting}" if fitting else "ask for fewer workers"
    nodes = ", ".join(f"{name} {number}" for name, number in slots.items())
    raise TopologyError(
        f"train.plan.tensor {plan.tensor} needs groups of {plan.tensor} workers that share a node, and {workers} "
        f"workers of such groups do not fit (workers that each node has room for: {nodes}): {remedy}, or start nodes "
        f"that have room for a multiple of {plan.tensor} workers"
    ).of("tensor_group.no_room", "train.plan.tensor")


def _room(tensor: int, slots: Mapping[str, int]) -> int:
    return sum(number // tensor * tensor for number in slots.values())


def require_groups_within_nodes(worker: Worker, plan: PlanConfig) -> None:
    """Check that this run's workers came to lie so that no tensor group straddles nodes. Collective.

    torchrun and Ray Train number the workers of a node one after the other, and tell each how many there are.

    Raises:
        TopologyError: a group straddles nodes, in every worker. The first rank of such a group is named.
    """
    if plan.tensor > 1:
        run_on_all(partial(_require_own_group_within_node, worker, plan.tensor))


def _require_own_group_within_node(worker: Worker, tensor: int) -> None:
    local_rank, local_size = (int(os.environ.get(name, 0)) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    first_of_node = worker.rank - local_rank
    first = worker.rank // tensor * tensor
    # Other launchers may not tell how many workers a node has.
    if local_size and not first_of_node <= first <= first_of_node + local_size - tensor:
        raise TopologyError(
            f"ranks {first} to {first + tensor - 1} split the same matrices (train.plan.tensor {tensor}), but are not "
            f"on one node: {socket.gethostname()} has ranks {first_of_node} to {first_of_node + local_size - 1}. Set "
            f"train.plan.tensor to a divisor of {local_size}, or give each node a multiple of {tensor} workers "
            "(--nproc-per-node of torchrun)"
        ).of("tensor_group.split", "train.plan.tensor")
