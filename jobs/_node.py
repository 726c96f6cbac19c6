"""Run a job's work on a node with the resources it needs, as a Ray task that reserves them."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar, cast

import ray
from ray.exceptions import RayError, RayTaskError

from app.errors import ClusterError

Answer = TypeVar("Answer")
Work = Callable[[Callable[[str], None]], Answer]
_START_S = 5.0
"""Time that a task usually needs at most to start on a node with room."""


@dataclass(frozen=True)
class _Done(Generic[Answer]):
    """The result of the work, which ends the stream of lines."""

    answer: Answer


def run_on_node(what: str, work: Work[Answer], resources: Mapping[str, float]) -> Answer:
    """Run ``work`` in a Ray task of this job, and return its result.

    This process prints each line that ``work`` logs, and a line while no node has room. Like all tasks of a job, the
    task ends with this process, so ``ray job stop`` stops it, too.

    Args:
        what: name of the task in Ray's dashboard and in messages.
        work: called with a function that logs a line. ``work`` and its result are pickled.
        resources: amounts that Ray reserves on one node. Without a GPU among them, ``work`` sees none.

    Raises:
        ClusterError: the node or the process was lost.
        Exception: any error that ``work`` raises, unchanged.
    """
    custom = {kind: amount for kind, amount in resources.items() if kind not in ("CPU", "GPU")}
    task = _streamed.options(
        name=what,
        num_cpus=resources.get("CPU", 0.0),
        num_gpus=resources.get("GPU", 0.0),
        resources=custom,
    )
    stream = task.remote(work)
    if not ray.wait([stream], timeout=_START_S)[0]:
        wanted = ", ".join(f"{kind}: {amount:g}" for kind, amount in resources.items() if amount)
        print(f"{what} has not started yet: waiting for a node with {wanted or 'room'} free", flush=True)
    try:
        for item in map(ray.get, stream):
            if isinstance(item, _Done):
                return cast(Answer, item.answer)
            if item is not None:
                print(item, flush=True)
    except RayTaskError as error:
        raise error.cause from error
    except RayError as error:
        raise ClusterError(
            f"{what} was lost with its node or process ({str(error).strip()}): submit it again"
        ) from error
    raise ClusterError(f"{what} ended without a result: see Ray's logs")


# max_calls: a process that is used again would keep its GPU memory and environment.
@ray.remote(num_returns="streaming", max_retries=0, max_calls=1)  # type: ignore[untyped-decorator]
def _streamed(work: Work[Answer]) -> Iterator[str | _Done[Answer] | None]:
    """Yield None at once, then the lines of ``work`` as it logs them, then its result."""
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
