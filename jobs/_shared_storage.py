"""Check that all nodes see a job's storage."""

import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from upath import UPath

from app.config import Placement
from app.storage import to_path
from app.training.coordination.shared_folder import marked, require_mark


def require_shared_storage(storage: UPath, *placements: Placement) -> None:
    """Check that storage is the same on every node where work may be placed.

    Args:
        storage: the folder that all jobs share.
        placements: one for each kind of work. A node that fits none of them is not checked.

    Raises:
        UnsharedStorageError: a node cannot see a file that this process wrote.
    """
    asked = [node["NodeID"] for node in ray.nodes() if any(placement.fits(node) for placement in placements)]
    here = ray.get_runtime_context().get_node_id()
    if set(asked) <= {here}:
        return
    with marked(storage) as mark:
        try:
            ray.get([_look.options(scheduling_strategy=_on(node)).remote(str(storage), mark) for node in asked])
        except RayTaskError as error:
            raise error.cause from error


def _on(node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


@ray.remote(name="look at storage", num_cpus=0)  # type: ignore[untyped-decorator]
def _look(storage: str, mark: str) -> None:
    require_mark(to_path(storage), mark)
