"""One rank: python -m benchmarks.network.rank STEPS CASE…, with the variables that torchrun sets

The first rank prints a line of JSON for each case. ``all-reduce`` is a case, too: one reduction of the whole gradient,
by all ranks at once and within each machine first.
"""

import gc
import json
import sys
import time
from collections.abc import Callable

import psutil
import torch
import torch.distributed as dist

from app.config import TrainConfig
from app.training.activity import Activity
from app.training.data.feed import MicroBatch
from app.training.engine import create_engine
from app.training.worker import Worker, leave_process_group, seed_random, start_worker
from benchmarks.network.cases import CASES, Case, Text, blueprint

ALL_REDUCE = "all-reduce"
INTERFACE = "eth0"
_WARM_UP, _SHORT_WARM_UP = 3, 1
"""Steps before the measured ones. PowerSGD itself begins after two."""
_FEW_STEPS = 2
"""Number of measured steps up to which the warm-up is short, because each step takes many seconds."""
_LAST = 20
"""Number of last steps whose mean loss is printed."""


def main() -> None:
    """Measure the cases one after the other."""
    torch.set_num_threads(1)
    steps, names = int(sys.argv[1]), sys.argv[2:]
    worker = start_worker(TrainConfig())
    for name in names:
        if name == ALL_REDUCE:
            _measure_reductions(worker, steps)
        else:
            _train(worker, CASES[name], steps)
    leave_process_group()


def _train(worker: Worker, case: Case, steps: int) -> None:
    config = case.config(worker.size)
    seed_random(0)
    engine = create_engine(blueprint(), config, config.layout(worker.size), total_steps=_WARM_UP + 2 * steps)
    text, losses = Text(worker.rank), []

    def step() -> None:
        inputs, targets = text.batch()
        result = engine.train_step(iter([MicroBatch({"input_ids": inputs}, targets)]), Activity())
        losses.append(result.loss)

    for _ in range(_WARM_UP if config.plan.powersgd or steps > _FEW_STEPS else _SHORT_WARM_UP):
        step()
    seconds, sent = _measured(step, steps)
    loss = worker.all_reduce(torch.stack(losses[-_LAST:]).mean()).item() / worker.size
    _tell(worker, case.name, seconds, sent, loss)
    engine.deepspeed.destroy()
    gc.collect()


def _measure_reductions(worker: Worker, times: int) -> None:
    """Measure the sum of a gradient over all ranks at once, then within each machine of two ranks first."""
    gradient = torch.ones(blueprint().num_parameters)
    machines = [dist.new_group([first, first + 1]) for first in range(0, worker.size, 2)]
    leaders = dist.new_group(list(range(0, worker.size, 2)))
    first = worker.rank - worker.rank % 2

    def flat() -> None:
        dist.all_reduce(gradient)

    def by_machine() -> None:
        dist.reduce(gradient, first, group=machines[first // 2])
        if worker.rank == first:
            dist.all_reduce(gradient, group=leaders)
        dist.broadcast(gradient, first, group=machines[first // 2])

    for name, work in (("all ranks at once", flat), ("within machines first", by_machine)):
        gradient.fill_(1)
        work()
        assert torch.all(gradient == worker.size)
        _tell(worker, name, *_measured(work, times), None)


def _measured(work: Callable[[], None], times: int) -> tuple[float, int]:
    """Return the seconds of ``work``, and the bytes that this machine has sent for it."""
    dist.barrier()
    began_s, before = time.perf_counter(), _sent()
    for _ in range(times):
        work()
    dist.barrier()
    return (time.perf_counter() - began_s) / times, (_sent() - before) // times


def _sent() -> int:
    """Bytes that the network interface has sent, with all headers; 0 where ranks share a machine."""
    counters = psutil.net_io_counters(pernic=True).get(INTERFACE)
    return counters.bytes_sent if counters else 0


def _tell(worker: Worker, name: str, seconds: float, sent: int, loss: float | None) -> None:
    worker.print(f"MEASURED {json.dumps([name, seconds, sent, loss])}")


if __name__ == "__main__":
    main()
