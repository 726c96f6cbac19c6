"""python -m tests.parity.numerics: what a few ranks find of gradients, as a line of JSON."""

import json
import os
import warnings
from collections.abc import Callable, Iterable
from itertools import product

import torch
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from app.config import TrainConfig
from app.models.factory import build_model
from app.training.activity import Activity
from app.training.data.micro_batch import MicroBatch
from app.training.engine import create_engine
from app.training.worker import import_deepspeed, start_worker
from tests.parity.plans import FACTS, LENGTH, MODELS

ACCUMULATED = 64
Norms = dict[str, list[float]]
"""By precision and plan: the norm of one sample's gradient, then of the same sample many times."""


class Classifier(nn.Module):
    """A small network with a layer that no sample reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
        self.unused = nn.Linear(4, 4)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.layers(features)
        return logits


def features() -> MicroBatch:
    return MicroBatch({"features": torch.randn(1, 16)}, torch.tensor([1]))


def tokens() -> MicroBatch:
    drawn = torch.randint(257, (1, LENGTH + 1))
    return MicroBatch({"input_ids": drawn[:, :-1]}, drawn[:, 1:])


def precisions() -> Iterable[str]:
    """Those of fewer bits than fp32 that this processor computes in."""
    from deepspeed.accelerator import get_accelerator

    return ["bf16", "fp16"] if get_accelerator().is_fp16_supported() else ["bf16"]


def grad_norm(
    build: Callable[[], nn.Module], draw: Callable[[], MicroBatch], precision: str, times: int, **plan: int
) -> float:
    """The norm of the gradient of one sample that makes up every micro-batch of a step."""
    workers = torch.distributed.get_world_size()
    data = workers // plan.get("pipeline", 1)
    config = TrainConfig.model_validate(
        {
            "global_batch_size": times * data,
            "workers": workers,
            "precision": precision,
            "device": "gpu" if precision == "fp16" else "cpu",  # the recipe's rule; the engine runs where it is
            "optimizer": {"name": "sgd", "lr": 1.0e-3},
            "plan": {**plan, "micro_batch": 1},
        }
    )
    torch.manual_seed(0)
    engine = create_engine(build(), config, config.layout(workers), total_steps=1)
    torch.manual_seed(1)
    sample = draw().to(torch.device("cpu"), config)
    norm = engine.train_step(iter([sample] * times), Activity()).grad_norm
    assert norm is not None
    return norm


def grad_norms() -> Norms:
    return {
        f"{precision}, ZeRO {stage}": [
            grad_norm(Classifier, features, precision, times, zero_stage=stage) for times in (1, ACCUMULATED)
        ]
        for precision, stage in product(precisions(), range(4))
    }


def pipeline_grad_norms() -> Norms:
    return {
        f"{precision}, pipeline 2": [
            grad_norm(lambda: build_model(MODELS["short gpt"], FACTS), tokens, precision, times, pipeline=2)
            for times in (2, ACCUMULATED)
        ]
        for precision in precisions()
    }


def work(find: Callable[[], Norms]) -> Norms:
    """One rank's part."""
    torch.set_num_threads(1)
    start_worker(TrainConfig())
    found = find()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return found


def launch(processes: int, find: Callable[[], Norms]) -> Norms:
    """What so many processes find, in their first one's words; forked, since imports take longest."""
    here = "127.0.0.1"
    config = LaunchConfig(
        *(1, 1, processes),
        run_id="numerics",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{here}:0",
        local_addr=here,
        start_method="fork",
    )
    found: Norms = elastic_launch(config, work)(find)[0]
    return found


def main() -> None:
    warnings.filterwarnings("ignore")
    os.environ["DS_ACCELERATOR"] = "cpu"
    import_deepspeed()
    print("FOUND " + json.dumps(launch(1, grad_norms) | launch(2, pipeline_grad_norms)), flush=True)


if __name__ == "__main__":
    main()
