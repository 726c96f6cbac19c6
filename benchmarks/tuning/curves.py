"""Learning curves by real training; one that was trained before is read, for training is deterministic.

What was trained lies under a folder named by what determines a curve beside its recipe: torch, and the code that
prepares data, makes models and trains them. In it, each curve is named by the checksum of its recipe. Another kind of
processor may come to other numbers: a kept folder is for one machine.
"""

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from upath import UPath

from app.checksums import code_revision, sha256_of
from app.config import Recipe
from app.errors import NonFiniteLossError
from app.storage import to_path, write_atomically
from app.training.plan import TrainingPlan
from app.training.records import Ending
from app.training.session import train
from app.training.worker import start_worker
from app.tuning.objectives import objective_of
from app.tuning.trial_config import trial_recipe
from app.tuning.trial_data import DataCache
from app.tuning.trial_training import TrialThread, log_to

_TRAINS = ("data", "models", "training")
"""The parts of the library that a curve depends on."""


@dataclass
class Curve:
    """The objective after each epoch of one configuration."""

    values: list[float] = field(default_factory=list)
    is_whole: bool = False
    """Training ended: there are no more epochs."""


class Curves:
    """Trains what is asked for, an epoch at a time, and keeps it in a folder."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        revision = sha256_of(f"{torch.__version__} {code_revision(*_TRAINS)}".encode())[:12]
        self._recipe, self._folder = recipe, folder / revision
        self._data = DataCache(to_path(self._folder / "data"))
        self._attempts: dict[str, TrialThread] = {}

    def value(self, values: dict[str, Any], epoch: int) -> float | None:
        """The objective after an epoch, the first being 1; None if training ended or broke before it."""
        assert self._recipe.tune is not None
        recipe = trial_recipe(self._recipe, values, self._recipe.tune)
        key = sha256_of(recipe.model_dump_json().encode())[:16]
        curve = self._read(key)
        while len(curve.values) < epoch and not curve.is_whole:
            curve = self._train_on(key, recipe, curve)
        return curve.values[epoch - 1] if epoch <= len(curve.values) else None

    def close(self) -> None:
        """End what is under way."""
        for attempt in self._attempts.values():
            attempt.stop()
        self._attempts.clear()

    def _train_on(self, key: str, recipe: Recipe, curve: Curve) -> Curve:
        """One epoch more; a curve that was left goes on from its checkpoint."""
        assert self._recipe.tune is not None
        if key not in self._attempts:
            self.close()
            self._attempts[key] = TrialThread(partial(_train, recipe, self._data, to_path(self._folder / "runs" / key)))
        try:
            said = self._attempts[key].next()
        except NonFiniteLossError:
            curve = Curve(curve.values, is_whole=True)
        else:
            if isinstance(said, Ending):
                curve = Curve(curve.values, is_whole=True)
            else:
                curve = Curve([*curve.values, objective_of(said, self._recipe.tune.objectives[0])])
        self._write(key, curve)
        return curve

    def _read(self, key: str) -> Curve:
        file = self._folder / "curves" / f"{key}.json"
        return Curve(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else Curve()

    def _write(self, key: str, curve: Curve) -> None:
        file = self._folder / "curves" / f"{key}.json"
        write_atomically(to_path(file), json.dumps(curve.__dict__).encode())


def _train(recipe: Recipe, data: DataCache, folder: UPath, report: Any) -> Ending:
    worker = start_worker(recipe.train)
    with log_to(folder):
        prepared = data.get(recipe)
        return train(TrainingPlan.of(recipe, prepared), prepared, worker, folder, report)
