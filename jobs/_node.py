"""Work of a job on a node that has what it needs: a Ray task that reserves it."""

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
Tell = Callable[[str], None]
Work = Callable[[Tell], Answer]


@dataclass(frozen=True)
class _Done(Generic[Answer]):
    """What the work came to."""

    answer: Answer


def run_on_node(what: str, work: Work[Answer], resources: Mapping[str, float]) -> Answer:
    """Do ``work`` in a task of this job, and return its answer.

    Each line that it tells is printed here. It ends with this process, as all tasks of a job do: ``ray job stop``
    stops it, too.

    Args:
        what: names it in Ray's dashboard and in messages.
        work: gets a function that takes a line; pickled, and its answer too.
        resources: what Ray reserves on one node. Without a GPU the work sees none.

    Raises:
        ClusterError: the node or the process was lost.
        Exception: what the work raises, as it is.
    """
    custom = {kind: amount for kind, amount in resources.items() if kind not in ("CPU", "GPU")}
    task = _streamed.options(
        name=what,
        num_cpus=resources.get("CPU", 0.0),
        num_gpus=resources.get("GPU", 0.0),
        resources=custom,
    )
    try:
        for reference in task.remote(work):
            told = ray.get(reference)
            if isinstance(told, _Done):
                return cast(Answer, told.answer)
            print(told, flush=True)
    except RayTaskError as error:
        raise error.cause from error
    except RayError as error:
        raise ClusterError(
            f"{what} was lost with its node or process ({str(error).strip()}): submit it again"
        ) from error
    raise ClusterError(f"{what} ended without an answer: look at Ray's logs")


@ray.remote(num_returns="streaming", max_retries=0)  # type: ignore[untyped-decorator]
def _streamed(work: Work[Answer]) -> Iterator[str | _Done[Answer]]:
    """Yield the lines that ``work`` tells as it tells them, and its answer."""
    if not ray.get_gpu_ids():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray shows all of a node's GPUs to a task that reserves none
    lines: SimpleQueue[str | None] = SimpleQueue()
    with ThreadPoolExecutor(1) as thread:
        working = thread.submit(work, lines.put)
        working.add_done_callback(lambda _: lines.put(None))
        while (line := lines.get()) is not None:
            yield line
        yield _Done(working.result())
