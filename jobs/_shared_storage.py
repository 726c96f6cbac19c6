"""Check that all nodes see a job's storage."""

import time

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from upath import UPath

from app.config import Placement
from app.errors import UnsharedStorageError
from app.storage import to_path
from app.training.coordination.shared_folder import marked, require_mark

_LIMIT_S = 60.0
"""Time in which all nodes must answer. A node that hangs on a lost mount never does."""


def require_shared_storage(storage: UPath, *placements: Placement) -> None:
    """Check that storage is the same on every node where work may be placed.

    Args:
        storage: the folder that all jobs share.
        placements: one for each kind of work. A node that fits none of them is not checked.

    Raises:
        UnsharedStorageError: a node cannot see a file that this process wrote, or cannot read storage.
    """
    asked = [node for node in ray.nodes() if any(placement.fits(node) for placement in placements)]
    here = ray.get_runtime_context().get_node_id()
    if {node["NodeID"] for node in asked} <= {here}:
        return
    with marked(storage) as mark:
        looks = [_look.options(scheduling_strategy=_on(node["NodeID"])).remote(str(storage), mark) for node in asked]
        deadline = time.monotonic() + _LIMIT_S
        for node, look in zip(asked, looks, strict=True):
            try:
                ray.get(look, timeout=max(0.0, deadline - time.monotonic()))
            except RayError as error:
                if _is_alive(node["NodeID"]):  # no work is placed on a lost node, of which Ray may learn late
                    raise _refusal(node["NodeManagerAddress"], storage, error) from error


def _is_alive(node_id: str) -> bool:
    return any(node["Alive"] and node["NodeID"] == node_id for node in ray.nodes())


def _refusal(address: str, storage: UPath, error: RayError) -> UnsharedStorageError:
    reason = error.cause if isinstance(error, RayTaskError) else error
    match reason:
        case UnsharedStorageError():
            return reason
        case TimeoutError():
            reason = f"no answer within {_LIMIT_S:.0f} s"
    return UnsharedStorageError(
        f"node {address} cannot read storage {str(storage)!r} ({str(reason).strip().partition(chr(10))[0]}): "
        "mend its mount or its rights there, or take the node out of the cluster"
    ).of("storage.unreadable", "storage")


def _on(node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


@ray.remote(name="look at storage", num_cpus=0)  # type: ignore[untyped-decorator]
def _look(storage: str, mark: str) -> None:
    require_mark(to_path(storage), mark)
