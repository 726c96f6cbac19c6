"""Measure a cascade of two models beside the large one alone: python -m benchmarks.serving.cascade"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from upath import UPath

from app.compile.compilation import Compilation
from app.compile.publication import publish
from app.compile.subject import load_subject
from app.compile.variants import wanted_variants
from app.config import load_recipe
from app.data.classification import LabelledDataset
from app.data.examples import Split
from app.errors import RayloomError
from app.repository.repository import Repository
from app.serving.cascade.cascade import Cascade, Stage
from app.serving.cascade.interface import Interface
from app.serving.cascade.rule import CascadeRule
from app.serving.cascade.versions import calibrated, load_validation
from app.serving.model import LoadedModel, load_model
from app.telemetry.flops import flops_per_sample
from app.tensors import OUTPUT, Tensors
from app.training.weights import RECIPE_FILE, load_weights
from benchmarks.compile.models import Model, train
from benchmarks.machine import load_average, machine, today, versions
from benchmarks.markdown import table, verdict
from benchmarks.rounds import turns
from benchmarks.spread import Spread

FLOOR, MOST_COMPUTE = 0.995, 0.5
_THREADS = 1
_BATCH_SIZES = (1, 32)
_PACKAGES = ("rayloom", "openvino", "torch")


@dataclass(frozen=True)
class Task:
    """A recipe, and what makes its small and its large model."""

    name: str
    recipe_file: str
    small: tuple[str, ...]
    large: tuple[str, ...]
    both: tuple[str, ...] = ()


# Both parts of the validation split are to be large enough to tell 0.995 from 1.
TASKS = {
    each.name: each
    for each in (
        Task(
            "reviews",
            "recipes/reviews.yaml",
            small=("model.args={layers: 1, width: 32, heads: 2, dropout: 0.2}", "train.optimizer.lr=2.0e-3"),
            large=("train.optimizer.lr=7.0e-4",),
            both=("data.validation_fraction=0.3", "train.linear_baseline=false"),
        ),
        Task(
            "fashion",
            "recipes/fashion.yaml",
            small=("model.args={width: 8, poolings: 1}", "train.optimizer.lr=1.0e-2"),
            large=("model.args={width: 16, poolings: 2}",),
            both=("data.validation_fraction=0.2", "train.epochs=4"),
        ),
    )
}


@dataclass(frozen=True)
class Contender:
    """A published model, with the arithmetic that it does on a row."""

    model: LoadedModel
    flops: Callable[[Tensors], float]
    """Of each of the rows that are given, all of one shape."""


@dataclass(frozen=True)
class Findings:
    """What a cascade did on rows that it was not calibrated on."""

    rule: CascadeRule
    rows: int
    small_accuracy: float
    large_accuracy: float
    lost: int
    """Rows that only the large model answers right; those that only the cascade does are gained."""
    gained: int

    small_share: float
    """Of the rows, those that the small model answers."""

    flops: float
    """As a share of the large model's, like what follows."""
    small_flops: float
    seconds: dict[int, Spread]
    """By the rows of a batch."""

    @property
    def relative_accuracy(self) -> float:
        """Of the cascade to the large model's."""
        return 1.0 + (self.gained - self.lost) / (self.large_accuracy * self.rows)

    @property
    def standard_error(self) -> float:
        """Of the relative accuracy, from rows that one of the two alone answers right."""
        return float(np.sqrt(self.lost + self.gained)) / (self.large_accuracy * self.rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.cascade", description=__doc__)
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS), help="names of tasks")
    parser.add_argument("--rounds", type=int, default=5, help="turns of the cascade and the large model")
    arguments = parser.parse_args(argv)
    before = load_average()
    found, left_out = {}, {}
    for name in arguments.tasks:
        try:
            found[name] = measure(TASKS[name], arguments.rounds)
        except RayloomError as error:  # for instance since its data is not here
            left_out[name] = str(error)
    print(report(found, left_out, f"{before} before, {load_average()} after"))


def measure(task: Task, num_rounds: int) -> Findings:
    """Train and publish both models, calibrate on one half of the validation split, and measure on the other.

    Raises:
        RayloomError: the product refuses a step.
    """
    with tempfile.TemporaryDirectory(prefix="bench-cascade-") as temporary:
        small = _contender(task, "small", task.small, Path(temporary))
        large = _contender(task, "large", task.large, Path(temporary))
        of_rule, of_test = _halves(load_validation(large.model.manifest))
    rule = calibrated([small.model, large.model], of_rule, FLOOR)
    print(f"{task.name}: {rule}", flush=True)
    return _compared(small, large, rule, of_test, num_rounds)


def _contender(task: Task, size: str, overrides: Sequence[str], folder: Path) -> Contender:
    """As a person makes one: trained in a process of its own, compiled for this CPU in float32, and published."""
    name, compiled = f"{task.name}-{size}", folder / f"compiled-{size}"
    settings = ("train.workers=1", "compile={precisions: [fp32], engines: [openvino], batch_sizes: [1, 32]}")
    weights = train(Model(name, task.recipe_file, train, overrides=(*task.both, *overrides, *settings)), folder)
    compiled.mkdir()
    recipe = load_recipe(str(weights / RECIPE_FILE))
    subject, wanted = load_subject(weights, recipe, _THREADS), wanted_variants(recipe.compile)
    compilation = Compilation(subject, recipe.compile, wanted, compiled, partial(print, flush=True))
    compilation.prove()
    storage = UPath(folder / "storage")
    manifest = publish(compilation, compilation.choose(), name, Repository(storage), UPath(folder))
    module = load_weights(weights).model

    def flops(rows: Tensors) -> float:
        return flops_per_sample(module, {key: torch.from_numpy(tensor) for key, tensor in rows.items()}) / 3

    return Contender(load_model(storage, name, manifest.version, _THREADS), flops)


def _halves(validation: LabelledDataset) -> list[LabelledDataset]:
    order = np.random.default_rng(0).permutation(len(validation)).tolist()
    inputs, classes = validation.split.inputs, validation.split.classes
    parts = (order[: len(order) // 2], order[len(order) // 2 :])
    return [replace(validation, split=Split([inputs[i] for i in part], [classes[i] for i in part])) for part in parts]


def _compared(
    small: Contender, large: Contender, rule: CascadeRule, validation: LabelledDataset, num_rounds: int
) -> Findings:
    contenders = (small, large)
    cascade = Cascade([Stage(Interface.of(each.model), _asked(each.model)) for each in contenders], rule)
    order, batches = _batches(validation, _BATCH_SIZES[-1])
    answers = [asyncio.run(cascade.infer(batch)) for batch in batches]
    stages = np.concatenate([each for _, each in answers])
    classes = np.array(validation.split.classes)[order]
    right = np.concatenate([outputs[OUTPUT] for outputs, _ in answers]).argmax(-1) == classes
    right_small, right_large = (
        np.concatenate([each.model.engine.infer(batch)[OUTPUT] for batch in batches]).argmax(-1) == classes
        for each in contenders
    )
    flops = np.array([_flops_of_rows(each, batches) for each in contenders])
    runs = np.stack([np.full(len(stages), 0 in rule.used), stages == 1])
    return Findings(
        rule=rule,
        rows=len(stages),
        small_accuracy=float(right_small.mean()),
        large_accuracy=float(right_large.mean()),
        lost=int((right_large & ~right).sum()),
        gained=int((right & ~right_large).sum()),
        small_share=float((stages == 0).mean()),
        flops=float((flops * runs).sum() / flops[1].sum()),
        small_flops=float(flops[0].sum() / flops[1].sum()),
        seconds={
            size: _times(cascade, large.model, _batches(validation, size)[1], num_rounds) for size in _BATCH_SIZES
        },
    )


def _batches(validation: LabelledDataset, size: int) -> tuple[NDArray[np.intp], list[Tensors]]:
    """Batches of rows that alone are padded to one length, and the place of their rows in the split."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index in range(len(validation)):
        row = validation.batch([index]).inputs
        by_shape.setdefault(next(iter(row.values())).shape, []).append(index)
    cut = [each[start : start + size] for each in by_shape.values() for start in range(0, len(each), size)]
    return np.concatenate(cut), [validation.batch(indices).inputs for indices in cut]


def _flops_of_rows(contender: Contender, batches: Sequence[Tensors]) -> NDArray[np.float64]:
    """Of each row."""
    return np.concatenate([np.full(len(next(iter(batch.values()))), contender.flops(batch)) for batch in batches])


def _asked(model: LoadedModel) -> Callable[[Tensors], Awaitable[Tensors]]:
    async def infer(tensors: Tensors) -> Tensors:
        return model.engine.infer(tensors)

    return infer


def _times(cascade: Cascade, large: LoadedModel, batches: Sequence[Tensors], num_rounds: int) -> Spread:
    """Time of the cascade / time of the large model, round by round; in a round they take turns."""

    def seconds(infer: Callable[[Tensors], Awaitable[object]]) -> float:
        async def run() -> None:
            for batch in batches:
                await infer(batch)

        began = time.perf_counter()
        asyncio.run(run())
        return time.perf_counter() - began

    contenders = {"large": _asked(large), "cascade": cascade.infer}
    for infer in contenders.values():  # the first call of a shape is slower
        seconds(infer)
    rounds = [{name: seconds(contenders[name]) for name in names} for names in turns(list(contenders), num_rounds)]
    return Spread(tuple(each["cascade"] / each["large"] for each in rounds))


def report(found: dict[str, Findings], left_out: dict[str, str], load: str) -> str:
    """What was reached, beside the goals."""
    goals = table(("what", "goal", "reached", ""), [row for name, each in found.items() for row in _goals(name, each)])
    header = ("task", "rows", "small", "large", "answered by small", "lost", "gained", "promised: share, compute")
    rows = [
        (
            name,
            f"{each.rule.samples:,} + {each.rows:,}",
            f"{each.small_accuracy:.4f}",
            f"{each.large_accuracy:.4f}",
            f"{each.small_share:.3f}",
            f"{each.lost}",
            f"{each.gained}",
            f"{each.rule.expected_shares[0]:.3f}, {each.rule.expected_compute:.3f}",
        )
        for name, each in found.items()
    ]
    missing = "".join(f"\n- **{name}** was left out: {why}" for name, why in left_out.items())
    return f"""
## A cascade of two models

{today()}. {machine()}. {versions(_PACKAGES)}. Load average: {load}.

{goals}

{table(header, rows)}

The small and the large model are trained by the benchmark, compiled in float32 and run by OpenVINO with {_THREADS}
thread. The rule is calibrated on one half of the validation split (rows: the first number) with a floor of {FLOOR}, and
everything else is measured on the other half. **small**, **large**: accuracy of each alone. **lost**, **gained**: rows
that only the large model or only the cascade answers right; the standard error of the accuracy is theirs. Time is that
of all rows in batches of rows of one length, cascade / large model, of each round the ratio, of the rounds the median.
Both halves are rows by which training chose its best epoch.{missing}
""".strip()


def _goals(name: str, found: Findings) -> Iterator[tuple[str, ...]]:
    accuracy, most = found.relative_accuracy, f"≤ {MOST_COMPUTE}"
    reached = f"{accuracy:.4f} ± {found.standard_error:.4f}"
    yield f"{name}: accuracy / the large model's", f"≥ {FLOOR}", reached, verdict(accuracy >= FLOOR)
    reached = f"{found.flops:.3f} (small model alone {found.small_flops:.3f})"
    yield f"{name}: operations / the large model's", most, reached, verdict(found.flops <= MOST_COMPUTE)
    for size, ratio in found.seconds.items():
        what = f"{name}: time / the large model's, batches of {size}"
        yield what, most, str(ratio), verdict(ratio.median <= MOST_COMPUTE)


if __name__ == "__main__":
    main()
