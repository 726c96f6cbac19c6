"""torchrun --nproc-per-node N -m benchmarks.training.memory_worker: what a rank holds under ZeRO 0 to 3.

One line of JSON for each stage: stage, micro-batches, parameters of the model, and what is the largest of any rank in
bytes.
"""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from app.config import TrainConfig
from app.models.blueprint import Blueprint
from app.models.gpt import GPT
from app.telemetry.step_time import Phase
from app.training.activity import Activity
from app.training.data.feed import MicroBatch
from app.training.engine import create_engine
from app.training.worker import Worker, leave_process_group, start_worker
from benchmarks.states import new_bytes, states_of

_VOCABULARY, _LENGTH, _SAMPLES = 2048, 16, 2


def main() -> None:
    """Measure every stage; on two workers also where two micro-batches are added up."""
    worker = start_worker(TrainConfig())
    for accumulation in (1, 2) if worker.size == 2 else (1,):
        for stage in range(4):
            held = torch.tensor(_measure(worker, stage, accumulation))
            torch.distributed.all_reduce(held, torch.distributed.ReduceOp.MAX)
            if worker.is_first:
                print("HELD", json.dumps([stage, accumulation, *held.tolist()]), flush=True)
    leave_process_group()


def _measure(worker: Worker, stage: int, accumulation: int) -> list[int]:
    """Parameters of the model, then bytes of its parameters, gradients, optimizer state, and of all else."""
    gc.collect()
    there_before = list(_all_tensors())
    samples = _SAMPLES * accumulation * worker.size
    plan = {"zero_stage": stage, "micro_batch": _SAMPLES}
    config = TrainConfig.model_validate(
        {"global_batch_size": samples, "workers": worker.size, "precision": "bf16", "plan": plan}
    )
    blueprint = Blueprint.of(partial(GPT, _VOCABULARY, _LENGTH, layers=3, width=512, heads=4))
    count = blueprint.num_parameters
    engine = create_engine(blueprint, config, config.layout(worker.size), total_steps=10)
    tokens = torch.zeros(_SAMPLES, _LENGTH, dtype=torch.int64)
    batches = [MicroBatch({"input_ids": tokens}, tokens)] * accumulation
    engine.train_step(iter(batches), Activity())
    probe = _Probe(engine.deepspeed, accumulation, there_before)
    engine.train_step(iter(batches), probe)
    engine.deepspeed.destroy()
    return [count, *probe.held]


class _Probe(Activity):
    """Measures between the last backward pass of a step and the update, when gradients are there.

    The step must be the second, so that the optimizer's state is there too.
    """

    def __init__(self, engine: Any, accumulation: int, there_before: list[Tensor]) -> None:
        super().__init__()
        self._engine, self._remaining, self._there_before = engine, accumulation, there_before
        self.held: list[int] = []

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        if name is Phase.OPTIMIZER:
            self._remaining -= 1
            if not self._remaining:
                self.held = _bytes_held(self._engine, self._there_before)
        yield


def _bytes_held(engine: Any, there_before: list[Tensor]) -> list[int]:
    """Return the bytes of parameters, gradients, optimizer state and every other tensor."""
    gc.collect()
    seen = {tensor.untyped_storage().data_ptr() for tensor in there_before}
    states = states_of(engine, seen)
    other = sum(new_bytes(tensor, seen) for tensor in _all_tensors())
    return [states.parameters, states.gradients, states.optimizer, other]


def _all_tensors() -> Iterator[Tensor]:
    for object_ in gc.get_objects():
        if isinstance(object_, Tensor) and object_.device.type != "meta":
            yield object_


if __name__ == "__main__":
    main()
