"""The cases and the rates: a GPT of 5 M parameters under several plans, over networks of several rates."""

import sysconfig
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.config import TrainConfig
from app.config.plan import Precision
from app.models.blueprint import Blueprint
from app.models.gpt import GPT

LENGTH, SAMPLES = 64, 4
"""Tokens of a sample, and samples of a rank in a step."""
_VOCABULARY = 256  # bytes
_PACKAGES = ("asyncio", "email", "multiprocessing", "unittest")


@dataclass(frozen=True)
class Case:
    """A way to reduce gradients."""

    name: str
    plan: dict[str, Any]
    precision: Precision = "fp32"

    def config(self, workers: int) -> TrainConfig:
        """Return the training section of a recipe."""
        return TrainConfig.model_validate(
            {
                "global_batch_size": SAMPLES * workers,
                "workers": workers,
                "precision": self.precision,
                "plan": self.plan,
                "optimizer": {"lr": 1e-3},
            }
        )


PLAIN = Case("ZeRO 0", {"zero_stage": 0})
_CASES = (
    PLAIN,
    Case("ZeRO 0, gradients as bf16", {"zero_stage": 0, "communication_data_type": "bf16"}),
    Case("ZeRO 1", {"zero_stage": 1}),
    Case("ZeRO 1, gradients as bf16", {"zero_stage": 1, "communication_data_type": "bf16"}),
    Case("ZeRO 1, bf16", {"zero_stage": 1}, "bf16"),
    *(Case(f"PowerSGD, rank {rank}", {"zero_stage": 0, "powersgd": {"rank": rank}}) for rank in (4, 16)),
)
CASES = {case.name: case for case in _CASES}
LOSS_CASES = (PLAIN.name, *(name for name in CASES if name.endswith("as bf16") or name.startswith("PowerSGD")))
"""The cases whose losses are compared. A case with another precision of the model is left out."""


@dataclass(frozen=True)
class Rate:
    """A limit on what each machine sends and receives."""

    name: str
    tc: str | None
    """As ``tc`` writes it. None: no limit."""
    bits_per_s: float | None
    steps: int
    """Measured steps of each case: fewer where a step is long."""


RATES = (
    Rate("no limit", None, None, 20),
    Rate("1 Gbit/s", "1gbit", 1e9, 20),
    Rate("100 Mbit/s", "100mbit", 1e8, 6),
    Rate("20 Mbit/s", "20mbit", 2e7, 2),
)


def blueprint() -> Blueprint:
    """Return the model."""
    return Blueprint.of(partial(GPT, _VOCABULARY, LENGTH, layers=5, width=288, heads=6))


class Text:
    """Bytes of the interpreter's standard library."""

    def __init__(self, rank: int) -> None:
        folders = [Path(sysconfig.get_path("stdlib"), package) for package in _PACKAGES]
        files = sorted(file for folder in folders for file in folder.rglob("*.py"))
        self._bytes = np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)
        self._random = np.random.default_rng(rank)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return the next inputs and targets, int64 of shape (samples, length)."""
        starts = self._random.integers(len(self._bytes) - LENGTH - 1, size=SAMPLES)
        rows = np.stack([self._bytes[start : start + LENGTH + 1] for start in starts]).astype(np.int64)
        return torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])
