"""One rank of a world of any size, in one process on a CPU: our engine on collectives that move nothing.

torch's ``fake`` backend accepts every collective and returns at once. Whatever DeepSpeed and our own code send is
counted on its way there, so the counts are those of the real stack and not of a formula. Received values are zeros.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from app.config import Layout, ModelConfig, PlanConfig, Precision, TrainConfig
from app.models.blueprint import Blueprint
from app.models.factory import build_model
from app.telemetry.step_time import Phase
from app.training.activity import Activity
from app.training.data.feed import MicroBatch
from app.training.engine import TrainingEngine, create_engine
from app.training.worker import import_deepspeed, start_worker
from benchmarks.states import States, states_of

_KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "send": "send",
}
"""torch's operations on process groups, by what the planner calls them."""
_GPT = ModelConfig(factory="app.models.gpt:gpt", args={"layers": 4, "width": 64, "heads": 8})
_NOTHING_KEPT = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}
"""ZeRO 3 keeps gathered parameters in a buffer of a 64th of the model. A layer of a large model does not fit there, but
the whole of a small one fits in the smallest buffer."""
_WARM_UP_STEPS = 2
"""ZeRO 3 records the order of layers in its first step, and a pipeline sends the shape of its tensors."""


@dataclass(frozen=True)
class FakeRank:
    """One rank of a run under a plan."""

    plan: PlanConfig
    workers: int
    accumulation: int = 1
    rank: int = 0
    micro_batch: int = 2
    precision: Precision = "bf16"
    model: ModelConfig = _GPT
    vocabulary: int = 512
    length: int = 16

    @property
    def config(self) -> TrainConfig:
        """The recipe's ``train`` section."""
        data = self.workers // self.plan.model_parallel
        return TrainConfig(
            global_batch_size=self.micro_batch * self.accumulation * data,
            workers=self.workers,
            precision=self.precision,
            device="cpu",
            deepspeed={"zero_optimization": _NOTHING_KEPT} if self.plan.zero_stage == 3 else {},
            plan=self.plan.model_copy(update={"micro_batch": self.micro_batch}),
        )

    @property
    def layout(self) -> Layout:
        """The degrees, and how a step is divided."""
        return self.config.layout(self.workers)

    @property
    def facts(self) -> dict[str, int]:
        """The data's properties that the factory may ask for."""
        return {"vocab_size": self.vocabulary, "max_length": self.length}

    def __str__(self) -> str:
        plan = self.plan
        degrees = [(name, getattr(plan, name)) for name in ("tensor", "pipeline") if getattr(plan, name) > 1]
        parts = [f"{name} {degree}" for name, degree in degrees]
        parts += [f"ZeRO {plan.zero_stage}", f"{self.workers} workers", f"accumulation {self.accumulation}"]
        return ", ".join([*parts, self.precision, f"rank {self.rank}"])


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one group, in one optimizer step."""

    kind: str
    group: str
    """The degrees along which its ranks differ, such as ``data`` or ``tensor x pipeline``. tied: stages that share."""
    calls: int
    nbytes: int
    """Bytes of the whole tensors: what is reduced or sent, and the result of a gather."""


@dataclass(frozen=True)
class Counted:
    """The findings of one rank."""

    case: FakeRank
    traffic: tuple[Traffic, ...]
    """Without messages that steer the step: norms, overflow, losses, and shapes of tensors."""
    steering_bytes: int
    """Bytes of these messages."""
    states: States


def count_all(cases: Iterable[FakeRank]) -> Iterator[Counted]:
    """Run every case in a process of its own, because DeepSpeed remembers its groups.

    A process is forked while this one does nothing else: a lock that another thread holds would stay closed in it.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    import_deepspeed()
    for case in cases:
        with get_context("fork").Pool(1) as pool:
            yield pool.apply(count, (case,))


def count(case: FakeRank) -> Counted:
    """Run optimizer steps as the rank of ``case``, and count the last. Only for a process that then ends."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(case.rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(case.workers)}
    dist.init_process_group("fake", store=FakeStore(), rank=case.rank, world_size=case.workers)
    start_worker(case.config)
    world = _World(case.rank, case.layout)
    with world:
        engine = create_engine(Blueprint.of(partial(build_model, case.model, case.facts)), case.config, case.layout, 10)
        _introduce_neighbours(engine, case, world)
        for _ in range(_WARM_UP_STEPS):
            engine.train_step(micro_batches_of(case), Activity())
        probe = _Probe(engine.deepspeed)
        world.forget()
        result = engine.train_step(micro_batches_of(case), probe)
    assert result.is_applied, f"{case}: the step was skipped, so its traffic is not a step's"
    return Counted(case, world.traffic(), world.steering_bytes, probe.largest)


class _World(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives of this rank, and receives what its neighbours in the pipeline would send."""

    def __init__(self, rank: int, layout: Layout) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.received: dict[torch.dtype, Tensor] = {}
        """The tensors that are received instead of zeros, by dtype."""
        self.sent: list[Tensor] = []
        self._rank, self._layout = rank, layout
        self.steering_bytes = 0
        self._calls: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def forget(self) -> None:
        """Begin to count anew."""
        self.steering_bytes = 0
        self._calls.clear()
        self._bytes.clear()

    def traffic(self) -> tuple[Traffic, ...]:
        """Return the counts, in the order of kind and group."""
        return tuple(Traffic(*key, self._calls[key], self._bytes[key]) for key in sorted(self._calls))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name == "recv_":
            self._fill(args[0])
        elif func.namespace == "c10d" and (kind := _KINDS.get(name)):
            self._count(kind, args)
            if kind == "send":
                self.sent.extend(args[0])
        return func(*args, **(kwargs or {}))

    def _count(self, kind: str, args: tuple[Any, ...]) -> None:
        if kind == "send":
            ranks = [self._rank, args[2]]
        else:
            group = next(argument for argument in args if isinstance(argument, torch.ScriptObject))
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
        nbytes = max(map(_nbytes, args))
        if len(ranks) > 1 and _steers(args):
            self.steering_bytes += nbytes
        elif len(ranks) > 1:
            key = kind, _group(kind, ranks, self._layout)
            self._calls[key] += 1
            self._bytes[key] += nbytes

    def _fill(self, buffers: list[Tensor]) -> None:
        for buffer in buffers:
            expected = self.received.get(buffer.dtype)
            if expected is None:
                buffer.zero_()
            else:
                buffer.copy_(expected)


def _nbytes(argument: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_iter(argument) if isinstance(leaf, Tensor))


def _steers(arguments: tuple[Any, ...]) -> bool:
    """Return whether a message steers the step: it is not of floating point, or has at most two numbers."""
    tensors = [leaf for leaf in tree_iter(arguments) if isinstance(leaf, Tensor)]
    return all(not tensor.is_floating_point() or tensor.numel() <= 2 for tensor in tensors)


def _group(kind: str, ranks: list[int], layout: Layout) -> str:
    coordinates = {
        "tensor": {layout.tensor_rank(rank) for rank in ranks},
        "data": {layout.data_rank(rank) for rank in ranks},
        "pipeline": {rank // (layout.tensor * layout.data) for rank in ranks},
    }
    group = " x ".join(name for name, found in coordinates.items() if len(found) > 1)
    return "tied" if (kind, group) == ("all_reduce", "pipeline") else group


def _introduce_neighbours(engine: TrainingEngine, case: FakeRank, world: _World) -> None:
    """Have ``world`` describe the tensors between stages as the neighbouring stages would."""
    if case.plan.pipeline == 1:
        return
    from deepspeed.runtime.utils import PartitionedTensor

    pipeline, width = engine.deepspeed, case.model.args["width"]
    boundary: Any = torch.zeros(case.micro_batch, case.length, width, dtype=pipeline.communication_data_type)
    if pipeline.is_pipe_partitioned:
        part = PartitionedTensor(boundary, pipeline.grid.get_slice_parallel_group())
        boundary = (part.to_meta(), part.data())
        world.received[torch.int64] = boundary[0]
    neighbour = pipeline.next_stage if pipeline.is_first_stage() else pipeline.prev_stage
    world.sent.clear()
    pipeline._send_tensor_meta(boundary, neighbour)
    world.received[torch.int32] = world.sent.pop()


@contextmanager
def connect_neighbours(engine: TrainingEngine, case: FakeRank) -> Iterator[None]:
    """Have the neighbours of a stage send tensors of the right shape, without counting anything else."""
    world = _World(case.rank, case.layout)
    with world:
        _introduce_neighbours(engine, case, world)
        yield


def micro_batches_of(case: FakeRank) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a step."""
    tokens = torch.zeros(case.micro_batch, case.length, dtype=torch.int64)
    return iter([MicroBatch({"input_ids": tokens}, tokens)] * case.accumulation)


class _Probe(Activity):
    """Measures the states of a rank before each phase or pipeline instruction of a step, and keeps the largest."""

    def __init__(self, deepspeed: Any) -> None:
        super().__init__()
        self.largest = States(0, 0, 0)
        self._deepspeed = deepspeed
        if instructions := getattr(deepspeed, "_INSTRUCTION_MAP", None):
            deepspeed._INSTRUCTION_MAP = {key: self._measured(run) for key, run in instructions.items()}

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:  # noqa: ARG002
        self._measure()
        yield

    def _measured(self, run: Callable[..., None]) -> Callable[..., None]:
        def measure_and_run(engine: Any, **arguments: Any) -> None:
            self._measure()
            run(engine, **arguments)

        return measure_and_run

    def _measure(self) -> None:
        self.largest = max(self.largest, states_of(self._deepspeed), key=lambda states: states.total)
