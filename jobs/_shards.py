"""Preparation of data in shards on the nodes of the cluster, a Ray task for each unit of the source."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import ray
from ray.exceptions import RayError, RayTaskError
from upath import UPath

from app.artifacts import DATA
from app.config import Placement
from app.data.prepared import PreparedData
from app.errors import ClusterError
from app.runs import Run
from app.tasks import prepare
from app.training.sources import adds_sources
from jobs._cluster import connect, require
from jobs._shared_storage import require_shared_storage

_TASKS_PER_CPU, _MIN_TASKS = 2, 64
"""Tasks that run or wait: one queued behind each running one, and enough that an autoscaler sees the demand.

More would only burden the driver, which checks all of them whenever one ends.
"""


def prepare_on_cluster(run: Run, prepared: UPath | None = None) -> PreparedData | None:
    """Make the shards of a run's recipe, if it has any and they are not there. Return the data.

    A run that goes on, or that gets the folder ``prepared`` of another job, keeps the data that it has.
    """
    keeps_data = (run.folder / DATA).exists() and not adds_sources(run)
    if run.recipe.data.stream is not None or prepared is not None or keeps_data:
        return None
    connect()  # small data are prepared in this process, and a job without a cluster leaves nothing behind
    return prepare(run.recipe, partial(_run_units, run.storage, run.recipe.train.preparation))


def _run_units(storage: UPath, placement: Placement, work: Callable[[int], int], units: Sequence[int]) -> Iterator[int]:
    """Yield the number of each unit when its task is done. Units are files in storage, so nothing else is sent.

    Raises:
        ClusterError: a node or process was lost several times.
        UnsharedStorageError: a node would write its shards where no other node finds them.
        RayloomError: what ``work`` raises.
    """
    if not units:
        return
    connect()
    require_shared_storage(storage, placement)
    require(placement.resources, "a unit of the preparation", placement.labels)
    start = _work_on.options(resources=_custom(placement), **placement.options)
    shared = ray.put(work)  # it names every file of the source
    waiting = list(units)[::-1]
    running: list[ray.ObjectRef] = []
    try:
        while waiting or running:
            limit = max(_MIN_TASKS, _TASKS_PER_CPU * int(ray.cluster_resources().get("CPU", 0)))
            while waiting and len(running) < limit:
                running.append(start.remote(shared, waiting.pop()))
            done, running = ray.wait(running)
            yield from map(ray.get, done)
    except RayTaskError as error:
        raise error.cause from error
    except RayError as error:
        raise ClusterError(f"the preparation was lost with its node ({str(error).strip()}): submit it again").of(
            "node.lost"
        ) from error


def _custom(placement: Placement) -> dict[str, float]:
    return {kind: amount for kind, amount in placement.resources.items() if kind != "CPU"}


@ray.remote(name="prepare", num_cpus=1, max_retries=3)  # type: ignore[untyped-decorator]
def _work_on(work: Callable[[int], int], unit: int) -> int:
    return work(unit)
