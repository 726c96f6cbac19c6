"""Peak memory of a rank: torchrun --nproc-per-node N -m benchmarks.training.peak_worker SIZE PLAN

Measures engine creation and two optimizer steps. Prints one JSON list: the number of parameters, the peak until the
engine was created, and the peak until the steps were done. Peaks are bytes of resident memory above what the process
uses with its libraries loaded, each the maximum over the ranks.
"""

import gc
import json
import sys
from functools import partial

import torch

from app.config import TrainConfig
from app.models.blueprint import Blueprint
from app.models.gpt import GPT
from app.process_state import return_freed_memory
from app.training.activity import Activity
from app.training.data.feed import MicroBatch
from app.training.engine import TrainingEngine, create_engine
from app.training.worker import leave_process_group, start_worker
from benchmarks.machine import peak_growth
from benchmarks.training.peak import PLANS, SIZES

_VOCABULARY, _LENGTH = 16_384, 16


def main() -> None:
    """Measure one model under one plan."""
    size, plan = SIZES[sys.argv[1]], PLANS[sys.argv[2]] | {"micro_batch": 1}
    torch.set_num_threads(1)
    worker = start_worker(TrainConfig())
    ranks = worker.size // (plan.get("tensor", 1) * plan.get("pipeline", 1))
    config = TrainConfig.model_validate(
        {"global_batch_size": ranks, "workers": worker.size, "precision": "bf16", "plan": plan}
    )
    small = Blueprint.of(partial(GPT, 256, _LENGTH, layers=2, width=64, heads=2))
    _train(_create(small, config, worker.size))  # loads libraries and kernels
    return_freed_memory()
    with peak_growth() as growth:
        large = Blueprint.of(
            partial(GPT, _VOCABULARY, _LENGTH, layers=size.layers, width=size.width, heads=size.width // 64)
        )
        num_parameters = large.num_parameters  # ZeRO 3 leaves each rank a part of them
        engine = _create(large, config, worker.size)
        made = growth()
        _train(engine)
        found = torch.tensor([made, growth()])
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    if worker.is_first:
        print("PEAK", json.dumps([num_parameters, *found.tolist()]), flush=True)
    leave_process_group()


def _create(blueprint: Blueprint, config: TrainConfig, workers: int) -> TrainingEngine:
    return create_engine(blueprint, config, config.layout(workers), total_steps=10)


def _train(engine: TrainingEngine) -> None:
    """Do two steps, and destroy the engine."""
    tokens = torch.zeros(1, _LENGTH, dtype=torch.int64)
    for _ in range(2):  # the optimizer state exists before the second
        engine.train_step(iter([MicroBatch({"input_ids": tokens}, tokens)]), Activity())
    engine.deepspeed.destroy()
    gc.collect()


if __name__ == "__main__":
    main()
