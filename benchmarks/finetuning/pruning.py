"""Prune the model of the digits to 2:4 sparsity, and train on: python -m benchmarks.finetuning.pruning

Accuracies are of PyTorch on the validation split.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from upath import UPath

from app.compile.reference import Reference
from app.compile.source_model import SourceModel, load_source_model
from app.config import load_recipe
from app.engines.architecture import usable_cores
from app.models.sparsity import prunable_weights
from app.runs import CONFIG_FILE
from benchmarks.compile.models import Model, train
from benchmarks.machine import Conditions, machine, versions
from benchmarks.markdown import table, verdict

RESULTS = Path(__file__).with_name("PRUNING.md")
RECIPE = "recipes/digits.yaml"
COMMON = ("train.workers=1", "train.report_samples=0", "train.early_stopping={metric: val_accuracy, mode: max}")
WHOLE = ("train.epochs=12",)
TRAINED_ON = ("train.epochs=4", "train.optimizer.lr=1e-3")
SEEDS = (0, 1, 2)
MAX_LOSS = 0.01


@dataclass(frozen=True)
class Accuracies:
    """The accuracies of one model, with one seed."""

    whole: float
    pruned: float
    trained_on: float
    zeros: float
    """The share of the prunable weights that are zero at the end."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the report, and write it to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finetuning.pruning", description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS, help="file to write")
    arguments = parser.parse_args(argv)
    conditions = Conditions()
    with tempfile.TemporaryDirectory(prefix="bench-pruning-") as temporary:
        found = [measure(Path(temporary), seed) for seed in SEEDS]
    text = report(found, conditions)
    arguments.output.write_text(text, encoding="utf-8")
    print(text)


def measure(folder: Path, seed: int) -> Accuracies:
    """Train, prune and train on with one seed."""
    keys = (*COMMON, f"train.seed={seed}")
    whole = train(Model("whole", RECIPE, train, overrides=(*keys, *WHOLE)), folder)
    trained = train(
        Model("pruned", RECIPE, train, overrides=(*keys, *TRAINED_ON, f"train.prune.weights={whole}")), folder
    )
    before, after = _source(whole), _source(trained)
    weights = list(prunable_weights(after.trained.model))
    zeros = sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)
    found = Accuracies(
        _accuracy(before.reference), _accuracy(before.pruned().reference), _accuracy(after.reference), zeros
    )
    print(found, flush=True)
    return found


def _source(weights: UPath) -> SourceModel:
    return load_source_model(weights, load_recipe(str(weights.parent / CONFIG_FILE)), usable_cores())


def _accuracy(reference: Reference) -> float:
    assert reference.score
    return reference.score.value


def report(found: Sequence[Accuracies], conditions: Conditions) -> str:
    """Return the page."""
    lost = mean(accuracies.whole - accuracies.trained_on for accuracies in found)
    worst = max(accuracies.whole - accuracies.trained_on for accuracies in found)
    held = min(accuracies.zeros for accuracies in found)
    goals = [
        (
            "loss of accuracy after pruning and training on",
            "≤ 1 point",
            f"{100 * lost:.2f} points on average, {100 * worst:.2f} at most",
            verdict(worst <= MAX_LOSS),
        ),
        ("weights that are zero at the end", "≥ 50 %", f"{held:.1%}", verdict(held >= 0.5)),
    ]
    rows = [
        (str(seed), f"{one.whole:.4f}", f"{one.pruned:.4f}", f"{one.trained_on:.4f}")
        for seed, one in zip(SEEDS, found, strict=True)
    ]
    return f"""# Further training after 2:4 pruning

`python -m benchmarks.finetuning.pruning` wrote this. {machine()}.
{versions(("rayloom", "torch", "deepspeed"))}.
{conditions}

{table(("what", "goal", "reached", ""), goals)}

{table(("seed", "dense", "pruned", "pruned, then trained further"), rows)}

The model is the one of `{RECIPE}`, trained with `{" ".join(WHOLE)}`. Training continues with
`train.prune` and `{" ".join(TRAINED_ON)}`, and the zeros are kept. Each run uses one process
and keeps the epoch with the best validation accuracy. Accuracies are measured on the validation split of 374
pictures. One picture corresponds to 0.27 points.
"""


if __name__ == "__main__":
    main()
