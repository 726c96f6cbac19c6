"""A model that fails in the way that it is told, and spaces that tell it."""

import os
import signal
import time
from pathlib import Path

import optuna
import torch
from torch import Tensor

from app.models.image import SmallCnn
from tests.helpers import wait_until


class TroubledCnn(SmallCnn):
    """A small network; its trouble begins with batch ``batch`` of training, and each batch takes ``pause_s``."""

    def __init__(
        self,
        num_labels: int,
        channels: int,
        width: int = 16,
        trouble: str = "none",
        batch: int = 30,
        once: str = "",
        pause_s: float = 0.0,
    ) -> None:
        super().__init__(num_labels, channels, width)
        self.trouble, self.batch, self.once, self.pause_s, self.batches = trouble, batch, once, pause_s, 0

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits = super().forward(pixel_values)
        if not self.training:
            return logits
        time.sleep(self.pause_s)
        self.batches += 1
        if self.batches < self.batch:
            return logits
        match self.trouble:
            case "killed once" if not Path(self.once).exists():
                Path(self.once).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            case "exits":
                os._exit(9)
            case "raises":
                raise RuntimeError("this model cannot go on")
            case "out of memory":
                torch.empty(2**60)
            case "hangs":
                Path(self.once).with_name("hangs").touch()
                time.sleep(1e6)
            case "not a number":
                return logits * torch.nan
        return logits


class MeetingCnn(SmallCnn):
    """A small network that trains only in two processes at once. Each waits for the other for up to five minutes."""

    def __init__(self, num_labels: int, channels: int, folder: str, width: int = 16) -> None:
        super().__init__(num_labels, channels, width)
        self.folder = Path(folder)

    def forward(self, pixel_values: Tensor) -> Tensor:
        if self.training:
            (self.folder / str(os.getpid())).touch()
            wait_until(lambda: len(list(self.folder.iterdir())) > 1, timeout_s=300)
        return super().forward(pixel_values)


def troubles(trial: optuna.Trial) -> None:
    kinds = ["none", "killed once", "exits", "raises", "out of memory", "hangs", "not a number"]
    trial.suggest_categorical("model.args.trouble", kinds)


def sizes(trial: optuna.Trial) -> None:
    trial.suggest_int("model.args.width", 8, 16, step=8)


def rates(trial: optuna.Trial) -> None:
    trial.suggest_float("train.optimizer.lr", 1e-4, 1e-2, log=True)


def slower(trial: optuna.Trial) -> None:
    trial.suggest_float("train.optimizer.lr", 1e-6, 1e-2, log=True)
