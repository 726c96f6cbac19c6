"""What is trained: small runs of the GPT, as a recipe for Rayloom and as a workload for its peers."""

import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from app.config import Recipe, load_recipe
from app.tasks import prepare
from app.training.data.recipe_order import order_of
from benchmarks.training.workload import Workload

WORKERS = 2
_RECIPE = "recipes/stdlib_gpt.yaml"
_PACKAGES = ("asyncio", "email", "multiprocessing", "unittest")


@dataclass(frozen=True)
class Case:
    """One model under one plan."""

    name: str
    vocab_size: int
    layers: int
    width: int
    heads: int
    block_length: int
    global_batch: int
    precision: str
    zero_stage: int
    steps: int

    def overrides(self, folder: Path) -> list[str]:
        """Return the overrides that turn the recipe into this case, with its storage below ``folder``."""
        return [
            f"storage={folder / 'storage'}",
            f"data.source={folder / 'corpus'}",
            "data.validation_fraction=0.01",
            f"data.tokenizer.vocab_size={self.vocab_size}",
            f"data.block_length={self.block_length}",
            f"model.args={{layers: {self.layers}, width: {self.width}, heads: {self.heads}}}",
            "train.epochs=1",
            f"train.max_steps={self.steps}",
            f"train.global_batch_size={self.global_batch}",
            f"train.precision={self.precision}",
            "train.schedule={name: constant, warmup_fraction: 0.0}",
            "train.early_stopping=null",
            f"train.plan.zero_stage={self.zero_stage}",
        ]

    def recipe(self, folder: Path) -> Recipe:
        """Return the recipe of this case."""
        return load_recipe(_RECIPE, self.overrides(folder))

    def command(self, folder: Path) -> list[str]:
        """The arguments of ``app.training``."""
        return [_RECIPE, *self.overrides(folder)]

    def workload(self, folder: Path) -> Workload:
        """The same for the peers; the batches that Rayloom makes of the corpus are written for them."""
        recipe = self.recipe(folder)
        data, optimizer = prepare(recipe), recipe.train.optimizer
        order = order_of(recipe, data)
        rows = np.concatenate([order.batch(1, number) for number in range(self.steps)])
        blocks = data.train.batch(rows.tolist())
        blocks_file = folder / f"{self.name}.npy"
        np.save(blocks_file, np.column_stack([blocks.inputs["input_ids"], blocks.targets[:, -1]]))
        return Workload(
            model={**data.facts, **recipe.model.args},
            blocks_file=str(blocks_file),
            micro_batch=self.global_batch // WORKERS,
            precision=self.precision,
            zero_stage=self.zero_stage,
            lr=optimizer.lr,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
            stamps_file=str(folder / f"{self.name}.stamps"),
        )


CASES = (
    Case("small, ZeRO 2", 1024, 2, 64, 2, 64, 8, "fp32", 2, 1200),
    Case("larger, ZeRO 1", 4096, 4, 192, 6, 128, 8, "fp32", 1, 120),
)


def copy_corpus(folder: Path) -> None:
    """A part of the interpreter's standard library, about 1.3 MB of text, as ``folder/corpus``."""
    for package in _PACKAGES:
        source = Path(sysconfig.get_path("stdlib"), package)
        shutil.copytree(source, folder / "corpus" / package, ignore=shutil.ignore_patterns("__pycache__"))
