"""What the peers' scripts train: the same model, tokens, batches and plan as Rayloom."""

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


def skip_inference_kernel() -> None:
    """Spare the peers the minute in which DeepSpeed compiles a kernel that training does not call, as Rayloom does."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


@dataclass(frozen=True)
class Workload:
    """All that a script needs to know; written as JSON and named on its command line."""

    model: dict[str, Any]
    """Arguments of ``app.models.gpt.GPT``."""
    blocks_file: str
    """A .npy of shape (steps x global batch, block length + 1), in the order in which Rayloom trains on them."""
    micro_batch: int
    precision: str
    zero_stage: int
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    stamps_file: str

    @property
    def deepspeed(self) -> dict[str, Any]:
        """DeepSpeed's configuration: the keys of Rayloom's plan, and its defaults for the rest."""
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": self.precision == "bf16"},
            "zero_optimization": {"stage": self.zero_stage, "overlap_comm": True, "contiguous_gradients": True},
            "steps_per_print": 1_000_000,
        }

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """AdamW; matrices are decayed, vectors are not."""
        groups = [
            {
                "params": [parameter for parameter in model.parameters() if parameter.ndim > 1],
                "weight_decay": self.weight_decay,
            },
            {"params": [parameter for parameter in model.parameters() if parameter.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, fused=True)

    def write(self, path: Path) -> None:
        """Write it for ``read``."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls) -> Self:
        """The one that the script's first argument names."""
        return cls(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))


class Blocks(Dataset[tuple[Tensor, Tensor]]):
    """Blocks of tokens and, of each token, the next one; int64 of shape (block length,)."""

    def __init__(self, work: Workload) -> None:
        self._blocks = torch.from_numpy(np.load(work.blocks_file))

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        block = self._blocks[number]
        return block[:-1], block[1:]


@dataclass
class Stamps:
    """When each step ended, and its loss on this rank."""

    work: Workload
    ends: list[float] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)

    def add(self, loss: Tensor) -> None:
        """Say that a step ended; a loss is printed now and then."""
        self.ends.append(time.time())
        self.losses.append(loss.detach())
        if len(self.ends) % 50 == 0:
            print(f"step {len(self.ends)}  loss {loss.item():.4f}", flush=True)

    def write(self) -> None:
        """Write them where the workload says, with the mean loss of all ranks; each rank calls it."""
        losses = torch.stack(self.losses)
        torch.distributed.all_reduce(losses)
        if torch.distributed.get_rank() == 0:
            told = {"ends": self.ends, "losses": (losses / torch.distributed.get_world_size()).tolist()}
            Path(self.work.stamps_file).write_text(json.dumps(told), encoding="utf-8")
