"""One process of a training run: its rank, its collectives, its memory and its random numbers."""

import gc
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from app.config import TrainConfig
from app.errors import RayloomError, TrainingError
from app.models.precision import allow_tf32
from app.python_headers import require_python_headers
from app.torch_internals import defer_compiler, define_muon_uncompiled, set_default_group_timeout

# DeepSpeed reads this when it is imported.
os.environ.setdefault("DS_LOG_LEVEL", "warning")

_SLOW_STORAGE = timedelta(hours=2)
"""Maximum wait of the workers for one that reads or writes."""
_MARGIN = timedelta(minutes=1)
T = TypeVar("T")
Group = dist.ProcessGroup | None
"""None: all processes of the run."""


@dataclass(frozen=True)
class Worker:
    """One process of the run, and its device."""

    rank: int
    size: int
    """Number of processes."""
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process prints, and writes shared files."""
        return self.rank == 0

    def print(self, line: str) -> None:
        """Print a line in the first process only."""
        if self.is_first:
            print(line, flush=True)

    def all_reduce(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over all workers, on the CPU. Collective."""
        # NCCL reduces tensors on GPUs only.
        values = values.to(self.device)
        dist.all_reduce(values)
        return values.cpu()

    def broadcast(self, value: T | None = None) -> T | None:
        """Return the first worker's ``value`` in every worker. Collective."""
        message = [value]
        dist.broadcast_object_list(message, src=0)
        return message[0]


def gather(value: T, group: Group = None) -> list[T]:
    """Return the ``value`` of every process of ``group``, by rank. Collective."""
    values: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return cast("list[T]", values)


def gather_on_first(value: T, group: Group = None) -> list[T]:
    """Return the ``value`` of every process of ``group`` by rank in the first process, else an empty list. Collective.

    ``group`` contains the first process of the run.
    """
    values: list[T | None] = [None] * dist.get_world_size(group) if dist.get_rank() == 0 else []
    dist.gather_object(value, values or None, dst=0, group=group)
    return cast("list[T]", values)


def run_on_all(work: Callable[[], T], group: Group = None) -> T:
    """Run ``work`` in every process of ``group`` and return this process's result. Collective.

    Raises:
        RayloomError: ``work`` raised it in some process. The error of the lowest rank is raised in every process, so
            none waits for one that failed.
    """
    result, error = _run_caught(work)
    for failure in gather(error, group):
        if failure is not None:
            raise failure
    return cast("T", result)


def on_first(work: Callable[[], T], group: Group = None) -> T:
    """Run ``work`` in the first process. Return its result, or raise its RayloomError, in all of ``group``. Collective.

    ``group`` contains the first process.
    """
    message = list(_run_caught(work)) if dist.get_rank() == 0 else [None, None]
    dist.broadcast_object_list(message, src=0, group=group)
    result, error = message
    if isinstance(error, RayloomError):
        raise error
    return cast("T", result)


def _run_caught(work: Callable[[], T]) -> tuple[T | None, RayloomError | None]:
    """Return the result of ``work`` and None, or None and its error."""
    try:
        return work(), None
    except RayloomError as error:
        return None, error


def collective_timeout(config: TrainConfig) -> timedelta:
    """Return the timeout of collectives. It is longer than a hang, so that the watchdog reports which rank hangs."""
    return max(_SLOW_STORAGE, timedelta(seconds=config.hang_timeout_s) + _MARGIN)


def start_worker(config: TrainConfig) -> Worker:
    """Join the process group of Ray Train or torchrun, or create one of this process only.

    Raises:
        TrainingError: the recipe needs a GPU, and torch finds none; or it compiles, and Python's headers are missing.
    """
    device, timeout = config.device, collective_timeout(config)
    if device == "gpu" and not torch.cuda.is_available():
        raise TrainingError("train.device is gpu, and torch sees none here: set it to cpu, or check the driver").of(
            "gpu.missing", "train.device"
        )
    if config.torch_compile:
        require_python_headers("train.torch_compile", TrainingError)

    # DeepSpeed's calls cause these warnings.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # DeepSpeed chooses its accelerator when it is imported.
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    # What torchrun and Ray Train set. Without them this process is alone.
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    if device == "gpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        allow_tf32(True)
    if not config.torch_compile:
        defer_compiler()

    deepspeed = import_deepspeed()
    if not config.torch_compile:
        define_muon_uncompiled()

    if not dist.is_initialized() and os.environ["WORLD_SIZE"] == "1":
        # A store in memory needs no port. DeepSpeed would meet on one.
        dist.init_process_group(_backend(device), store=HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(_backend(device), timeout=timeout, verbose=False)
    set_default_group_timeout(timeout)
    torch_device = torch.device("cpu") if device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    return Worker(dist.get_rank(), dist.get_world_size(), torch_device)


def leave_process_group() -> None:
    """Leave all process groups, if this process is in any, and end their threads.

    A process aborts if gloo's thread frees a tensor while Python exits (github.com/pytorch/pytorch/issues/190489).
    The threads end when the last reference to their group is dropped. Only DeepSpeed can drop its own references. A
    ZeRO 3 engine leaks some, so its threads remain.
    """
    if dist.is_initialized():
        import deepspeed.comm

        if deepspeed.comm.is_initialized():
            deepspeed.comm.destroy_process_group()
            gc.collect()


def seed_random(seed: int) -> None:
    """Seed the generators of torch, Python and NumPy, which a model or its data may draw from."""
    # The seed of a rank may be more than the largest.
    torch.manual_seed(seed if seed < 2**64 else seed - 2**64)
    _seed_libraries(seed)


def _seed_libraries(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)  # it takes 32 bits


def seed_step(seed: int, data_rank: int, step: int) -> None:
    """Seed Python's and NumPy's generators for a step of training.

    Libraries draw from them, too, as when they send a request again. No step depends on that, or on earlier draws.
    """
    sequence = np.random.SeedSequence(seed % 2**64, spawn_key=(data_rank, step))
    _seed_libraries(int(sequence.generate_state(1, np.uint64)[0]))


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return copies of the states of torch's generators. Those of Python and NumPy are seeded for each step."""
    states = {"torch": torch.get_rng_state().clone()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def restore_random_state(states: dict[str, Tensor], device: torch.device) -> None:
    """Set the generators to the states that ``random_state`` returned."""
    torch.set_rng_state(states["torch"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def _backend(device: str) -> str:
    return "gloo" if device == "cpu" else "nccl"


def import_deepspeed() -> Any:
    """Import DeepSpeed without the shared-memory kernel of its CPU inference, which takes a minute to compile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        import deepspeed.ops
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
