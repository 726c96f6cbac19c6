"""python -m tests.parity.numerics FOLDER: measure gradients and batch norm on one and two ranks, as JSON in FOLDER.

FOLDER/run has a run of two ranks. FOLDER/parts has the same run, stopped and resumed. FOLDER/lost-checkpoint.txt has
the error of a checkpoint that only one rank could write.
"""

import ctypes
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional
from upath import UPath

from app.config import CheckpointConfig, Recipe, TrainConfig, load_recipe
from app.config.train import OptimizerConfig
from app.errors import TrainingError
from app.models.blueprint import Blueprint
from app.models.factory import build_model
from app.models.gpt import GPT
from app.process_state import return_freed_memory
from app.tasks import prepare
from app.training.activity import Activity
from app.training.checkpoints.names import buffer
from app.training.checkpoints.snapshot import Snapshot
from app.training.checkpoints.state import Position, TrainState
from app.training.checkpoints.store import CheckpointStore
from app.training.checkpoints.writer import CheckpointWriter
from app.training.data.feed import MicroBatch
from app.training.data.ranks import DataRank
from app.training.engine import create_engine
from app.training.plan import TrainingPlan
from app.training.session import train
from app.training.worker import import_deepspeed, leave_process_group, start_worker
from benchmarks.machine import peak_growth
from tests.parity.plans import FACTS, LENGTH, MODELS

ACCUMULATED = 64
STEPS = 4
UNEVEN = 67
RECIPE = ["model.factory=tests.parity.numerics:NormalisedCnn", "model.args={}", "train.epochs=1", "train.max_steps=6"]
Found = dict[str, list[float]]
_M_MMAP_THRESHOLD = -3
"""Option of glibc's ``mallopt``."""


class Classifier(nn.Module):
    """A small network with an unused layer, a scalar, transposed matrices, and optional batch norm."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        hidden = [nn.BatchNorm1d(32)] if norm else []
        self.layers = nn.Sequential(nn.Linear(16, 32), *hidden, nn.GELU(), nn.Linear(32, 4))
        self.unused = nn.Linear(4, 4)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.columns = nn.Parameter(torch.randn(4, 5).t())
        self.column = nn.Parameter(torch.zeros(1, 16).t())

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = (
            self.layers(features) * self.temperature + features[:, :5] @ self.columns + features @ self.column
        )
        return logits


class NormalisedCnn(nn.Module):
    """A small image network with batch norm and high momentum."""

    def __init__(self, num_labels: int, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8, momentum=0.5), nn.GELU(), nn.AdaptiveAvgPool2d(1)
        )
        self.classifier = nn.Linear(8, num_labels)

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.layers(pixel_values).flatten(1))
        return logits


def config_of(workers: int, batch: int, precision: str = "fp32", sync_batch_norm: bool = False, **plan: Any) -> Any:
    return TrainConfig.model_validate(
        {
            "global_batch_size": batch,
            "workers": workers,
            "precision": precision,
            "device": "gpu"
            if precision == "fp16"
            else "cpu",  # recipes allow fp16 on GPUs only; the engine still runs on the CPU
            "optimizer": {"name": "sgd", "lr": 0.1},
            "schedule": {"name": "constant", "warmup_fraction": 0.0},
            "gradient_clipping": 0.0,
            "sync_batch_norm": sync_batch_norm,
            "plan": plan,
            # At DeepSpeed's first loss scale, 2**16, the gradients may overflow, and an infinite norm proves nothing.
            "deepspeed": {"fp16": {"initial_scale_power": 8}},
        }
    )


def features() -> MicroBatch:
    return MicroBatch({"features": torch.randn(1, 16)}, torch.tensor([1]))


def tokens() -> MicroBatch:
    drawn = torch.randint(257, (1, LENGTH + 1))
    return MicroBatch({"input_ids": drawn[:, :-1]}, drawn[:, 1:])


def low_precisions() -> Iterable[str]:
    """Return the 16-bit precisions that this processor supports."""
    from deepspeed.accelerator import get_accelerator

    return ["bf16", "fp16"] if get_accelerator().is_fp16_supported() else ["bf16"]


def grad_norm(
    build: Callable[[], nn.Module], draw: Callable[[], MicroBatch], precision: str, times: int, **plan: int
) -> float:
    """Return the gradient norm of a step in which every micro-batch is the same sample."""
    workers = torch.distributed.get_world_size()
    batch = times * workers // plan.get("pipeline", 1)
    config = config_of(workers, batch, precision, **plan, micro_batch=1)
    torch.manual_seed(0)
    engine = create_engine(Blueprint.of(build), config, config.layout(workers), total_steps=1)
    torch.manual_seed(1)
    sample = draw().to(torch.device("cpu"), config)
    norm = engine.train_step(iter([sample] * times), Activity()).grad_norm
    assert norm is not None
    return norm


def one_rank(folder: Path) -> dict[str, Found]:
    """Return the gradient norms of one sample and of the same sample many times, by precision and plan."""
    norms = {
        f"{precision}, ZeRO {stage}": [
            grad_norm(Classifier, features, precision, times, zero_stage=stage) for times in (1, ACCUMULATED)
        ]
        for precision, stage in product(low_precisions(), range(4))
    }
    return {"grad norms": norms}


def batches(size: int) -> tuple[Tensor, Tensor]:
    """Return the samples of ``STEPS`` batches: features of shape (steps, size, 16) and classes."""
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randn(STEPS, size, 16, generator=generator)
    return drawn * 3 + drawn.mean(-1, keepdim=True), torch.randint(4, (STEPS, size), generator=generator)


def plain_losses(norm: bool, size: int) -> list[float]:
    """Train with plain PyTorch in one process. Return the loss of each step, then the running statistics."""
    torch.manual_seed(0)
    model, losses = Classifier(norm), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, classes in zip(*batches(size), strict=True):
        loss = functional.cross_entropy(model(inputs), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses + statistics_of(model)


def statistics_of(model: nn.Module) -> list[float]:
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return [
        value for norm in norms for statistic in (norm.running_mean, norm.running_var) for value in statistic.tolist()
    ]


def planned_losses(norm: bool, size: int, **plan: int) -> list[float]:
    """Train the same model with the trainer, and return the same values."""
    workers = torch.distributed.get_world_size()
    config = config_of(workers, size, sync_batch_norm=norm, **plan)
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"weight_decay": 0.0})})
    layout = config.layout(workers)
    torch.manual_seed(0)
    engine = create_engine(Blueprint.of(partial(Classifier, norm)), config, layout, total_steps=STEPS)
    data_rank, losses = DataRank(torch.distributed.get_rank(), workers), []
    for inputs, classes in zip(*batches(size), strict=True):
        shares = np.array_split(np.arange(size)[data_rank.rank :: data_rank.size], layout.gradient_accumulation)
        stream = (MicroBatch({"features": inputs[share]}, classes[share]) for share in shares)
        loss = engine.train_step(stream, Activity()).loss
        torch.distributed.all_reduce(loss)
        losses.append(loss.item() / workers)
    return losses + statistics_of(engine.deepspeed.module)


def two_ranks(folder: Path) -> dict[str, Found]:
    """Measure uneven micro-batches and batch norm under ZeRO. Pipelines run last: DeepSpeed keeps their grid."""
    os.environ["WORLD_SIZE"] = "2"
    losses = {"plain, uneven": plain_losses(False, 2 * UNEVEN), "plain, batch norm": plain_losses(True, 32)}
    for stage in range(4):
        losses[f"ZeRO {stage}, uneven"] = planned_losses(False, 2 * UNEVEN, zero_stage=stage)
        losses[f"ZeRO {stage}, batch norm"] = planned_losses(True, 32, zero_stage=stage)
    worker, data = start_worker(recipe_of().train), prepare(recipe_of())
    record = train(TrainingPlan.of(recipe_of(), data), data, worker, UPath(folder / "run")).records[-1]
    for stop in (3, None):
        train(TrainingPlan.of(recipe_of(stop), data), data, worker, UPath(folder / "parts"))
    found = peaks_by_plan()
    norms = [
        grad_norm(lambda: build_model(MODELS["short gpt"], FACTS), tokens, "bf16", times, pipeline=2)
        for times in (2, ACCUMULATED)
    ]
    lose_checkpoint(folder)
    validated = {"val_loss": [record.val_loss]}
    return {"losses": losses, "run": validated, "grad norms": {"bf16, pipeline 2": norms}, "peaks": found}


class Measured(Blueprint):
    """A blueprint that measures peak memory while it makes its model."""

    growths: ClassVar[list[int]] = []
    """Peak growth of each model made so far, in bytes."""

    def make(self, *arguments: Any, **options: Any) -> nn.Module:
        with peak_growth() as growth:
            model = super().make(*arguments, **options)
        self.growths.append(growth())
        return model


def peaks(layers: int, width: int, **plan: int) -> list[float]:
    """Return the peak memory of making a GPT in bf16, and of creating its engine.

    Peaks are bytes per parameter of the whole model, on the rank that holds most.
    """
    config = config_of(2, 2, "bf16", micro_batch=1, **plan)
    config = config.model_copy(update={"optimizer": OptimizerConfig(name="adamw")})
    return_freed_memory()
    with peak_growth() as growth:
        blueprint = Measured.of(partial(GPT, 257, LENGTH, layers=layers, width=width, heads=2))
        num_parameters = blueprint.num_parameters
        engine = create_engine(blueprint, config, config.layout(2), total_steps=1)
        found = torch.tensor([Measured.growths[-1], growth()]) / num_parameters
    engine.deepspeed.destroy()
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return found.tolist()


def peaks_by_plan() -> Found:
    """Return the peaks of three plans, each after a small model has loaded libraries and kernels."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)  # glibc would keep freed blocks of up to 32 MB
    plans: dict[str, dict[str, int]] = {"ZeRO 0": {"zero_stage": 0}, "tensor 2": {"tensor": 2}}
    plans["pipeline 2"] = {"pipeline": 2}
    return {name: [peaks(2, 16, **plan), peaks(2, 1024, **plan)][-1] for name, plan in plans.items()}


def lose_checkpoint(folder: Path) -> None:
    """Write a checkpoint while the second rank has no temporary folder. The first rank writes the error to a file."""
    store = CheckpointStore(UPath(f"memory://{folder}"))
    state = TrainState(
        position=Position(step=1), epoch_order="windows-2", records=[], workers=2, tensor=1, pipeline=1,
        optimizer_steps=1, schedule_steps=1, loss_scale=None, precision="fp32", shapes={},
    )  # fmt: skip
    writer = CheckpointWriter(store, CheckpointConfig(background=False))
    tempfile.tempdir = str(folder / "missing") if torch.distributed.get_rank() else None
    try:
        writer.save(lambda: Snapshot(state, {buffer("step"): torch.ones(1)}))
    except TrainingError as error:
        if torch.distributed.get_rank() == 0:
            (folder / "lost-checkpoint.txt").write_text(str(error), encoding="utf-8")
    finally:
        tempfile.tempdir = None
        writer.close()


def recipe_of(stop: int | None = None) -> Recipe:
    """Return the recipe of the kept runs. With ``stop``, an alert ends the run after this step, mid-epoch."""
    rules = (
        [f"alerts=[{{metric: step, above: {stop - 2}, do: [stop]}}]", "train.checkpoint.every_steps=1"] if stop else []
    )
    return load_recipe("recipes/digits.yaml", [*RECIPE, "train.workers=2", *rules])


def work(rank: int, size: int, folder: Path, find: Callable[[Path], dict[str, Found]]) -> None:
    """Run one rank. The first rank writes the findings."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    meeting_point = f"file://{folder / find.__name__}-meeting"
    torch.distributed.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=size)
    start_worker(TrainConfig())
    found = find(folder)
    if rank == 0:
        (folder / f"{find.__name__}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.barrier()
    leave_process_group()


def main() -> None:
    warnings.filterwarnings("ignore")
    os.environ["DS_ACCELERATOR"] = "cpu"
    import_deepspeed()
    folder = Path(sys.argv[1])
    for name in ("run", "parts"):
        (folder / name).mkdir()
    for size, find in ((1, one_rank), (2, two_ranks)):
        start_processes(work, (size, folder, find), nprocs=size, start_method="fork")


if __name__ == "__main__":
    main()
