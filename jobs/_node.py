"""Run a job's work on a node with the resources it needs, as a Ray task that reserves them."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar, cast

import ray
from ray.exceptions import RayError, RayTaskError

from app.config import Placement
from app.errors import ClusterError
from app.telemetry.tracing import call_within, current_traceparent

Result = TypeVar("Result")
Work = Callable[[Callable[[str], None]], Result]
_USUAL_START_S = 5.0
"""Time in which a task usually starts if a node has room."""


@dataclass(frozen=True)
class _Done(Generic[Result]):
    """The result of the work, which ends the stream of lines."""

    result: Result


def run_on_node(name: str, work: Work[Result], placement: Placement) -> Result:
    """Run ``work`` in a Ray task of this job, and return its result.

    This process prints each line that ``work`` logs. It also prints a message if the task has not started after a few
    seconds. Like all tasks of a job, the task ends with this process, so ``ray job stop`` also stops it.

    Args:
        name: the task's name in Ray's dashboard and in messages.
        work: called with a function that logs a line. ``work`` and its result are pickled.
        placement: the labels of the node, and the amounts that Ray reserves on it. Without a GPU among them, ``work``
            sees none.

    Raises:
        ClusterError: the node or the process was lost.
        Exception: any error that ``work`` raises, unchanged.
    """
    resources = placement.resources
    custom = {kind: amount for kind, amount in resources.items() if kind not in ("CPU", "GPU")}
    task = _streamed.options(
        name=name,
        num_cpus=resources.get("CPU", 0.0),
        num_gpus=resources.get("GPU", 0.0),
        resources=custom,
        **placement.options,
    )
    stream = task.remote(partial(call_within, current_traceparent(), name, work))
    if not ray.wait([stream], timeout=_USUAL_START_S)[0]:
        required = " and ".join(f"{amount:g} {kind}" for kind, amount in resources.items() if amount)
        print(
            f"{name} has not started yet: it is waiting for a node with {required or 'capacity'} free, or for Ray to "
            "start its process",
            flush=True,
        )
    try:
        for item in map(ray.get, stream):
            if isinstance(item, _Done):
                return cast(Result, item.result)
            if item is not None:
                print(item, flush=True)
    except RayTaskError as error:
        raise error.cause from error
    except RayError as error:
        raise ClusterError(f"{name} was lost with its node or process ({str(error).strip()}): submit it again").of(
            "node.lost"
        ) from error
    raise ClusterError(f"{name} ended without a result: see Ray's logs").of("task.no_result")


# max_calls=1: a reused process would keep its GPU memory and environment.
@ray.remote(num_returns="streaming", max_retries=0, max_calls=1)  # type: ignore[untyped-decorator]
def _streamed(work: Work[Result]) -> Iterator[str | _Done[Result] | None]:
    """Yield None immediately to show that the task has started, then each line that ``work`` logs, then its result."""
    if not ray.get_gpu_ids():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray shows all of a node's GPUs to a task that reserves none
    yield None
    lines: SimpleQueue[str | None] = SimpleQueue()
    with ThreadPoolExecutor(1) as thread:
        working = thread.submit(work, lines.put)
        working.add_done_callback(lambda _: lines.put(None))
        while (line := lines.get()) is not None:
            yield line
        yield _Done(working.result())
