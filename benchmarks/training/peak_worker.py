"""Peak memory of a rank: torchrun --nproc-per-node N -m benchmarks.training.peak_worker SIZE STAGE

Measures engine creation and the first optimizer step. Prints one JSON list: the number of parameters, the peak until
the engine was created, and the peak until the step was done. Peaks are bytes of resident memory above what the process
uses with its libraries loaded, each the maximum over the ranks.
"""

import gc
import json
import re
import sys
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from app.config import TrainConfig
from app.models.blueprint import Blueprint, return_freed_memory
from app.models.gpt import GPT
from app.training.engine import create_engine
from app.training.worker import start_worker
from benchmarks.training.peak import SIZES

_VOCABULARY, _LENGTH = 16_384, 16
_PROCESS = Path("/proc/self")


def main() -> None:
    """Measure one model under one ZeRO stage."""
    size, stage = SIZES[sys.argv[1]], int(sys.argv[2])
    torch.set_num_threads(1)
    worker = start_worker(TrainConfig())
    plan = {"zero_stage": stage, "micro_batch": 1}
    config = TrainConfig.model_validate(
        {"global_batch_size": worker.size, "workers": worker.size, "precision": "bf16", "plan": plan}
    )
    _train(partial(GPT, 256, _LENGTH, layers=1, width=64, heads=1), config, worker.size)  # loads libraries and kernels
    return_freed_memory()
    (_PROCESS / "clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
    before = _resident("VmRSS")
    build = partial(GPT, _VOCABULARY, _LENGTH, layers=size.layers, width=size.width, heads=size.width // 64)
    count, made = _train(build, config, worker.size)
    found = torch.tensor([made - before, _resident("VmHWM") - before])
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    if worker.is_first:
        print("PEAK", json.dumps([count, *found.tolist()]), flush=True)
    torch.distributed.destroy_process_group()


def _train(build: partial[GPT], config: TrainConfig, workers: int) -> tuple[int, int]:
    """Create the engine and do one step. Returns the number of parameters, and the peak of engine creation."""
    blueprint = Blueprint.of(build)
    count = blueprint.num_parameters
    engine = create_engine(blueprint, config, config.layout(workers), total_steps=10).deepspeed
    made = _resident("VmHWM")
    tokens = torch.zeros(1, _LENGTH, dtype=torch.int64)
    engine.backward(cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten()))
    engine.step()
    engine.destroy()
    gc.collect()
    return count, made


def _resident(name: str) -> int:
    """Return a memory counter in bytes; ``VmHWM`` is the peak of ``VmRSS``."""
    found = re.search(rf"{name}:\s+(\d+) kB", (_PROCESS / "status").read_text(encoding="ascii"))
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    main()
