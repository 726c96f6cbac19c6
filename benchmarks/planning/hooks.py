"""What DeepSpeed's own Python takes for a parameter, and for a stage: python -m benchmarks.planning.hooks

The tensors are so small that Python is all there is to measure, and a fake world moves nothing. It prints the values
that ``app/planner/step_time.py`` holds.
"""

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from app.config import ModelConfig, PlanConfig
from app.models.blueprint import Blueprint
from app.models.factory import build_model
from app.tasks.objective import CrossEntropy
from app.training.activity import Activity
from app.training.engine import create_engine
from app.training.worker import import_deepspeed, start_worker
from benchmarks.planning.fake_world import FakeRank, connect_neighbours, micro_batches_of

_LAYERS = (2, 10)
_ACCUMULATIONS = (1, 9)
_STEPS = 15
_PIPELINE_LAYERS = 8


def main() -> None:
    """Measure in processes of their own, and print microseconds."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import_deepspeed()
    plain_s, parameters = _per_layer(None)
    for stage in (0, 1, 2, 3):
        spent_s, _ = _per_layer(stage)
        what = "a gathered parameter" if stage == 3 else "a parameter"
        print(f"ZeRO {stage}: {(spent_s - plain_s) / parameters * 1e6:.0f} us for {what} and micro-batch")
    whole_s = _micro_batch_s(_case(PlanConfig(), _PIPELINE_LAYERS, 1), is_plain=True)
    stage_s = _micro_batch_s(_case(PlanConfig(pipeline=2), _PIPELINE_LAYERS, 1))
    print(f"pipeline: {(stage_s - whole_s / 2) * 1e6:.0f} us for a stage and micro-batch")


def _per_layer(stage: int | None) -> tuple[float, float]:
    """Return the seconds that further layers take in a micro-batch, and the number of their parameters."""
    seconds, parameters = [], []
    for layers in _LAYERS:
        case = _case(PlanConfig(zero_stage=stage or 0), layers, 1)  # type: ignore[arg-type]
        seconds.append(_micro_batch_s(case, is_plain=stage is None))
        parameters.append(len(list(build_model(case.model, case.facts).parameters())))
    return seconds[1] - seconds[0], parameters[1] - parameters[0]


def _case(plan: PlanConfig, layers: int, accumulation: int) -> FakeRank:
    model = ModelConfig(factory="app.models.gpt:gpt", args={"layers": layers, "width": 8, "heads": 1})
    return FakeRank(plan, 8, accumulation, micro_batch=1, model=model, vocabulary=16, length=4)


def _micro_batch_s(case: FakeRank, is_plain: bool = False) -> float:
    """Return the seconds of one more micro-batch in a step."""
    run = _plain_step_s if is_plain else _step_s
    few, many = (
        _alone(run, FakeRank(**{**vars(case), "accumulation": accumulation})) for accumulation in _ACCUMULATIONS
    )
    return (many - few) / (_ACCUMULATIONS[1] - _ACCUMULATIONS[0])


def _alone(run: Callable[[FakeRank], float], case: FakeRank) -> float:
    with get_context("fork").Pool(1) as pool:
        return pool.apply(run, (case,))


def _step_s(case: FakeRank) -> float:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(case.rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(case.workers)}
    dist.init_process_group("fake", store=FakeStore(), rank=case.rank, world_size=case.workers)
    start_worker(case.config)
    blueprint = Blueprint.of(partial(build_model, case.model, case.facts))
    engine = create_engine(blueprint, case.config, case.layout, 100)
    with connect_neighbours(engine, case):  # in the first step stages tell each other the shapes of tensors
        engine.train_step(micro_batches_of(case), Activity())
    return _processor_s(lambda: engine.train_step(micro_batches_of(case), Activity()))


def _plain_step_s(case: FakeRank) -> float:
    """Return the seconds of forward and backward passes of torch alone."""
    torch.set_num_threads(1)
    model = build_model(case.model, case.facts).to(torch.bfloat16)

    def step() -> None:
        for batch in micro_batches_of(case):
            CrossEntropy().mean(model(**batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]

    return _processor_s(step)


def _processor_s(step: Callable[[], object]) -> float:
    """Return the fewest seconds of processor time that a step takes, which others on the machine hardly change."""

    def times() -> Iterator[float]:
        for _ in range(_STEPS):
            started = time.process_time()
            step()
            yield time.process_time() - started

    return min(times())


if __name__ == "__main__":
    main()
